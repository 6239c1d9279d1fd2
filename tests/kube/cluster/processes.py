"""Processes of the cluster, each with a log file of its own, ended by process id."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

_END_S = 10.0
_POLL_S = 0.1


class ClusterError(Exception):
    """A part of the cluster did not do its work; the message names the part."""


class LoggedProcess:
    """A process with a log."""

    def __init__(
        self, name: str, words: list[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the process, without input."""
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """End the process in order, or by force after some seconds."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """End the process at once, with its children, which its end may not reach."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                child.kill()
        self._process.kill()
        self._process.wait(_END_S)


def run(*words: str) -> str:
    """Run a command to its end and return its output. Raises ClusterError."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"`{' '.join(words)}`: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def wait_until(condition: Callable[[], bool], within_s: float, subject: str) -> float:
    """Poll a condition; return the seconds until the condition was true. Raises ClusterError."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > within_s:
            raise ClusterError(f"{subject}: not within {within_s:.0f} s")
        time.sleep(_POLL_S)
    return time.monotonic() - began_s
