"""Fabric of a process of its own, with every fault of ``ostraca.connectors.conformance``.

    with FaultyFabric(tmp_path / "fabric") as fabric:
        run(scenario, connector, fabric)

The process holds a ``FabricThread`` with the small plan. The process ends with its parent.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Self

from ostraca_cli.program import main
from ostraca_cli.testing import FabricThread, small_plan

_SOCKET = "agent-0.sock"
_MIB = 1 << 20
_TIMEOUT_S = 60.0
_POLL_S = 0.001
_NEEDLE_BYTES = 64

_servers = multiprocessing.get_context("forkserver")
_servers.set_forkserver_preload([__name__])


class FaultyFabric(contextlib.AbstractContextManager["FaultyFabric"]):
    """Implements ``FabricUnderTest``; a context manager that leaves no process behind."""

    def __init__(self, directory: Path) -> None:
        """Describe a fabric in *directory*, not yet started."""
        self._directory = directory
        self._process: ForkServerProcess | None = None
        self._control: Connection | None = None

    @property
    def address(self) -> str:
        """Address of the agent, also while no fabric runs."""
        return f"unix://{self._directory / _SOCKET}"

    def start(self) -> Self:
        """Start the fabric, with all blocks of earlier runs. Raises TimeoutError."""
        self._control, theirs = _servers.Pipe()
        self._process = _servers.Process(target=_serve, args=(self._directory, theirs), daemon=True)
        self._process.start()
        theirs.close()
        if not self._control.poll(_TIMEOUT_S):
            raise TimeoutError("the fabric did not start")
        self._control.recv()
        return self

    def stop(self) -> None:
        """Stop in order: stored blocks reach flash."""
        self._end(None)

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop the process's threads, until ``thaw``; connections stay open. Raises TimeoutError.

        Threads on other processors run on for a moment after the signal, so this waits for the last.
        """
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        until_s = time.monotonic() + _TIMEOUT_S
        while not _is_stopped(Path(f"/proc/{self._process.pid}/task")):
            if time.monotonic() > until_s:
                raise TimeoutError("the fabric did not stop")
            time.sleep(_POLL_S)

    def thaw(self) -> None:
        """Let the process go on."""
        self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def hang_up(self) -> Iterator[list[float]]:
        """Hang up on every caller, in place of a stopped fabric; give the times of calls."""
        path = self._directory / _SOCKET
        path.unlink(missing_ok=True)
        calls: list[float] = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen()
            thread = threading.Thread(target=_hang_up, args=(listener, calls), name="hang-up")
            thread.start()
            try:
                yield calls
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()
                path.unlink()

    def overwrite(self, before: bytes, after: bytes) -> None:
        """Replace the bytes on flash that begin like *before*, while the fabric is stopped.

        Raises LookupError if no drive has the bytes.
        """
        needle = before[:_NEEDLE_BYTES]
        for path in sorted(self._directory.glob("enclosure-*/*")):
            if path.stat().st_size < _MIB:
                continue
            with path.open("r+b") as drive:
                at = _find(drive, needle)
                if at is not None:
                    drive.seek(at)
                    drive.write(after)
                    drive.flush()
                    os.fsync(drive.fileno())
                    os.posix_fadvise(drive.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    return
        raise LookupError("no drive holds these bytes")

    def explain(self, arguments: Sequence[str]) -> str:
        """Run ``ostraca explain`` with *arguments* and this agent; return the output."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = main(["explain", *arguments, "--agent", self.address])
        return f"{printed.getvalue()}{f'exit code {code}' if code else ''}"

    def __exit__(self, *_: object) -> None:
        """End the process, if any."""
        if self._process is not None:
            self.kill()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _end(self, number: int | None) -> None:
        if self._process is None or self._control is None:
            return
        if number is not None:
            self._signal(number)
        self._control.close()
        self._process.join(_TIMEOUT_S)
        assert self._process.exitcode is not None, "the fabric did not end"
        self._process.close()
        self._process = self._control = None


def _is_stopped(threads: Path) -> bool:
    """Tell whether every thread is stopped, by the state after the command's name in its ``stat``."""
    for thread in threads.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended
            if (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T":
                return False
    return True


def _hang_up(listener: socket.socket, calls: list[float]) -> None:
    while True:
        try:
            caller, _ = listener.accept()
        except OSError:
            return
        calls.append(time.monotonic())
        caller.close()


def _find(drive: io.BufferedRandom, needle: bytes) -> int | None:
    at = 0
    while piece := drive.read(32 * _MIB):
        found = piece.find(needle)
        if found >= 0:
            return at + found
        at += len(piece)
    return None


def _serve(directory: Path, control: Connection) -> None:
    """Run a fabric until the other end of *control* closes."""
    with FabricThread(small_plan(directory)):
        control.send("ready")
        with contextlib.suppress(EOFError, OSError):
            control.recv()
