"""Reader who follows a how-to page: all its commands in order, with the documented output."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.sdk.connectors.vllm.process_group import mapped_files

REPOSITORY = Path(__file__).parents[4]
START_S = 600.0
PORTS = range(20_000, 32_768)
"""Ports that the system gives to no connection. Dynamo reads ports as signed numbers of 16 bits."""


def page_commands(page: str, elsewhere: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return a page's commands with their documented output, but those that begin with *elsewhere*."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for each in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = each.splitlines(keepends=True)
            end = next(
                (n for n, line in enumerate(lines[1:], 1) if not line.startswith("      ")), len(lines)
            )
            found.append(("".join(lines[:end]).strip(), "".join(lines[end:])))
    return [(command, printed) for command, printed in found if not command.startswith(elsewhere)]


def open_port() -> int:
    """Return a port on which nobody listens."""
    dice = random.Random()
    while True:
        port = dice.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Follower:
    """Reader following a page in a new folder; use as a context manager.

    *changes* are the differences to the page: its ports, which may be taken.
    """

    def __init__(self, folder: Path, changes: Mapping[str, str], **environment: str) -> None:
        self._folder = folder
        self._changes = {"/tmp/": f"{folder}/", **changes}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), **environment}
        self._running: list[subprocess.Popen[str]] = []

    def here(self, text: str) -> str:
        """Return the page's text with this run's folder and ports."""
        for theirs, ours in self._changes.items():
            text = text.replace(theirs, ours)
        return text

    def run(self, command: str) -> str:
        """Run a command and return what it prints."""
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self._environment[name] = self.here(value)
            return ""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.here(command)],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def start(self, command: str, log: str) -> subprocess.Popen[str]:
        """Start a command in the background."""
        with (self._folder / log).open("w") as file:
            started = subprocess.Popen(
                ["bash", "-c", f"exec env {self.here(command)}"],
                cwd=self._folder,
                env=self._environment,
                stdout=subprocess.PIPE if log == "up.log" else file,
                stderr=file,
                text=True,
                process_group=0,
            )
        self._running.append(started)
        return started

    def start_and_await(self, command: str, log: str, url: str, answer: str = "") -> subprocess.Popen[str]:
        """Start a server, and return when the page's *url* answers with the text *answer*."""
        started = self.start(command, log)
        until_s = time.monotonic() + START_S
        while True:
            words = (self._folder / log).read_text(errors="replace")
            assert started.poll() is None, words[-4000:]
            assert time.monotonic() < until_s, words[-4000:]
            try:
                with urllib.request.urlopen(self.here(url), timeout=5) as body:
                    if answer in body.read().decode():
                        return started
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.5)

    def stop(self, started: subprocess.Popen[str]) -> None:
        """Press Ctrl-C, and wait."""
        files = mapped_files(started.pid)
        started.send_signal(signal.SIGINT)
        try:
            started.wait(120)
        finally:
            started.kill()
            started.wait()
            self._running.remove(started)
            for file in files:
                file.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for started in reversed(list(self._running)):
            self.stop(started)
            if started.stdout is not None:
                started.stdout.close()
