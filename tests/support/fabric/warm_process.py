"""Processes of ``ostraca`` that begin with its modules imported: each saves half a second of processor time.

A server of ``multiprocessing`` imports the modules once for each process of pytest, and forks. A process of
its own is all the same: it can be stopped, killed and waited for, and has its own signals, files and
environment. Its arguments in ``/proc`` are the server's: tests that look at these start a Popen.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from ostraca_cli import main

_servers = multiprocessing.get_context("forkserver")
_servers.set_forkserver_preload(
    [
        "ostraca_cli.commands.serve.admin",
        "ostraca_cli.commands.serve.daemon",
        "ostraca_cli.commands.serve.enclosure",
        "ostraca_cli.commands.serve.store",
        "ostraca_cli.commands.up",
        "ostraca_cli.conformance",
        "ostraca_cli.program",
    ]
)
"""A process has one server, so this names what others that use it need too."""

PATIENCE_S = 60.0


class WarmProcess:
    """``ostraca`` with *words*; implements what tests use of ``subprocess.Popen``."""

    def __init__(self, *words: str, log: Path, is_apart: bool = True) -> None:
        """Start the process. Its errors go to *log*; one that *is_apart* has a process group of its own."""
        log.touch()
        reader, writer = _servers.Pipe(duplex=False)
        self._process = _servers.Process(
            target=_run, args=(words, dict(os.environ), Path.cwd(), writer, log, is_apart), daemon=True
        )
        self._process.start()
        writer.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("ostraca", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


StartedProcess: TypeAlias = WarmProcess | subprocess.Popen[str]


def started(*words: str, log: Path, is_warm: bool = True, is_apart: bool = True) -> StartedProcess:
    """Start ``ostraca``, warm if possible. Only a cold process shows its arguments."""
    if is_warm and not _has_moved():
        return WarmProcess(*words, log=log, is_apart=is_apart)
    with log.open("a") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "ostraca_cli", *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0 if is_apart else None,
        )


def run_ostraca(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ``ostraca`` to its end, and return what it said."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as errors:
        process = started(*words, log=Path(errors.name))
        assert process.stdout is not None
        try:
            with process.stdout as said:
                told = said.read()
            return subprocess.CompletedProcess(words, process.wait(PATIENCE_S), told, errors.read())
        finally:
            process.kill()


_NAMESPACE = Path("/proc/thread-self/ns/net")
_BORN_IN = _NAMESPACE.readlink()


def _has_moved() -> bool:
    """Tell whether this thread has left the network namespace that the server stays in."""
    return _NAMESPACE.readlink() != _BORN_IN


def _run(
    words: tuple[str, ...],
    environment: dict[str, str],
    folder: Path,
    out: Connection,
    log: Path,
    is_apart: bool,
) -> None:
    """Be the command, in the new process."""
    os.chdir(folder)
    os.dup2(out.fileno(), 1)
    out.close()
    with log.open("a") as errors:
        os.dup2(errors.fileno(), 2)
    if is_apart:
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["ostraca", *words]
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    code = main()
    atexit._run_exitfuncs()  # multiprocessing's processes end without
    sys.exit(code)
