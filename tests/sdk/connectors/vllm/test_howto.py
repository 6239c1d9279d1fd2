"""How-to page on vLLM, followed without a GPU: all commands in order, with the documented output."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; make test-vllm makes an environment that has it",
    ),
]

REPOSITORY = Path(__file__).parents[4]
PAGE = (REPOSITORY / "docs" / "howto" / "engines" / "vllm.md").read_text()
START_S = 600.0
ELSEWHERE = ("pip install", "scripts/setup-vllm", "source ", "vllm serve")
"""Commands with a GPU, or run before the test."""

THIRD = 3
"""Before the third question, the page says to restart vLLM."""


def commands() -> list[tuple[str, str]]:
    """Return the page's commands for a machine without a GPU, with their documented output."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for each in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = each.splitlines(keepends=True)
            end = next(
                (n for n, line in enumerate(lines[1:], 1) if not line.startswith("      ")), len(lines)
            )
            found.append(("".join(lines[:end]).strip(), "".join(lines[end:])))
    return [(command, printed) for command, printed in found if not command.startswith(ELSEWHERE)]


class Follower:
    """Reader following the page in a new folder; use as a context manager."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._folder = folder
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
        self._running: list[subprocess.Popen[str]] = []

    def here(self, text: str) -> str:
        """Return the page's text with this run's folder and port."""
        return text.replace("/tmp/", f"{self._folder}/").replace("localhost:8000", f"localhost:{self._port}")

    def run(self, command: str) -> str:
        """Run a command and return what it prints."""
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self._environment[name] = value
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
                ["bash", "-c", f"exec {self.here(command)}"],
                cwd=self._folder,
                env=self._environment,
                stdout=subprocess.PIPE if log == "up.log" else file,
                stderr=file,
                text=True,
            )
        self._running.append(started)
        return started

    def start_vllm(self, command: str, log: str) -> subprocess.Popen[str]:
        """Start vLLM, and return when it answers."""
        started = self.start(f"{command} --port {self._port}", log)
        until_s = time.monotonic() + START_S
        while True:
            words = (self._folder / log).read_text(errors="replace")
            assert started.poll() is None, words[-4000:]
            assert time.monotonic() < until_s, words[-4000:]
            try:
                urllib.request.urlopen(f"http://localhost:{self._port}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
            else:
                return started

    def stop(self, started: subprocess.Popen[str]) -> None:
        """Press Ctrl-C, and wait."""
        started.send_signal(signal.SIGINT)
        try:
            started.wait(120)
        finally:
            started.kill()
            started.wait()
            self._running.remove(started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for started in reversed(list(self._running)):
            self.stop(started)
            if started.stdout is not None:
                started.stdout.close()


def test_the_page_is_true_from_its_first_command_to_its_last(tmp_path: Path) -> None:
    (kv_json,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (said,) = re.findall(r"^(Ostraca: uses .*?-)[0-9a-f]{16}(: .*? bytes>)", PAGE, re.MULTILINE)
    asked = 0
    with Follower(tmp_path) as user:
        # The page's deadline is for a machine that does nothing else.
        patient = kv_json.replace('"agents"', '"lookup_deadline_s": 10.0,\n        "agents"')
        (tmp_path / "kv.json").write_text(user.here(patient))
        serve = ""
        for command, printed in commands():
            if command.startswith("ostraca up"):
                up = user.start(command, "up.log")
                assert up.stdout is not None
                assert up.stdout.readline() == user.here(printed)
            elif command.startswith("python -m vllm."):
                serve = command
                vllm = user.start_vllm(serve, "first.log")
            else:
                asked += "/v1/completions" in command
                if asked == THIRD and "/v1/completions" in command:
                    user.stop(vllm)
                    vllm = user.start_vllm(serve, "second.log")
                out = user.run(command)
                assert not printed or out == user.here(printed), command
    assert asked == THIRD
    for log in ("first.log", "second.log"):
        words = (tmp_path / log).read_text(errors="replace")
        assert re.search(re.escape(said[0]) + "[0-9a-f]{16}" + re.escape(user.here(said[1])), words)
