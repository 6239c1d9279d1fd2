"""Fabric for measurements in a process of its own: ``ostraca up`` in a directory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ostraca_cli.terminal.streams import READY
from ostraca_fabric.errors import ConnectError

_PATIENT = ("--set", "health.file_overdue_s=30", "--set", "health.file_write_overdue_s=30")
"""A disk that stalls for seconds is slow: its figures are low, and no drive is given up."""

_READY_S = 60.0
_STOP_S = 30.0
_ADDRESSES = re.compile(re.escape(READY) + r"ostraca\.connect\((?P<listed>.*)\)  # ")


@dataclass(frozen=True, slots=True)
class FabricProcess:
    """Running fabric: process id and addresses of the agents."""

    pid: int
    addresses: tuple[str, ...]

    @property
    def address(self) -> str:
        """Return the address of the first agent's unix socket."""
        return self.addresses[0]


@contextlib.contextmanager
def running_fabric(
    directory: Path,
    *options: str,
    inside: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    program: str = "ostraca_cli",
) -> Iterator[FabricProcess]:
    """Run ``ostraca up --dir DIRECTORY OPTIONS`` meanwhile, with patience for slow disks.

    The log is ``up.log`` in the directory. The command begins with *inside*; *environment* extends the
    environment of this process; *program* is the module to run as ``ostraca``. Raises ConnectError, with the
    last line of the log, if the fabric does not become ready.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "up.log"
    command = [*inside, sys.executable, "-m", program, "up", "--dir", str(directory), *_PATIENT, *options]
    everything = os.environ | dict(environment or {})
    with log.open("wb") as stderr:
        # Own session: Ctrl-C at the terminal ends this process only, which then stops the fabric in order.
        process = subprocess.Popen(  # noqa: S603
            command, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True, env=everything
        )
    try:
        yield FabricProcess(process.pid, _addresses(process, log))
    finally:
        _stop(process)


def _addresses(process: subprocess.Popen[bytes], log: Path) -> tuple[str, ...]:
    assert process.stdout is not None
    said = b""
    until_s = time.monotonic() + _READY_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not said.endswith(b"\n"):
            if not selector.select(max(0.0, until_s - time.monotonic())):
                raise ConnectError(f"`ostraca up` was not ready within {_READY_S:.0f} s; {_last_words(log)}")
            part = os.read(process.stdout.fileno(), 4096)
            if not part:
                raise ConnectError(f"`ostraca up` ended before its ready line; {_last_words(log)}")
            said += part
    found = _ADDRESSES.match(said.decode())
    if found is None:
        raise ConnectError(f"`ostraca up` printed {said.decode().strip()!r} instead of a ready line")
    listed = json.loads(found["listed"])
    return (listed,) if isinstance(listed, str) else tuple(listed)


def _last_words(log: Path) -> str:
    lines = log.read_text().strip().splitlines()
    return f"the log ends: {lines[-1]}" if lines else "the log is empty"


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
