"""A daemon's own directory: locked while it runs, so that two processes never take it for theirs.

The lock is the kernel's, not a file with a process id: it is gone when the process is, however that ended,
and a container that always is process 1 holds it as well as any other. Who holds it knows that whoever held
it before is gone. ``daemon.json`` says whose directory it is.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Annotated

import msgspec

from ostraca.cli.state import locked
from ostraca_fabric.adapters.whole_files import write_whole
from ostraca_fabric.errors import FormatError, MembershipError, UsageError
from ostraca_fabric.ids import FabricId, StartId

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

RECORD_FILE = "daemon.json"
_VERSION = 1


_Id = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    version: int
    daemon: str
    """What it is and its name, as in ``agent host-7``."""

    fabric: _Id = ""
    """The id of the fabric that it has joined, in hexadecimal; empty before it has."""

    start: _Id = ""
    """The start id of its last process, in hexadecimal."""


class StateDirectory:
    """The directory of one daemon, locked until ``close``."""

    def __init__(self, path: Path, daemon: str) -> None:
        """Lock it, made if there is none, and look whose it is.

        Raises MembershipError when another process holds it or it can't be made, UsageError when others may
        write there or it is another daemon's, and FormatError when its record is damaged.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            mode = path.stat().st_mode
            if mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UsageError(
                    f"others may write in {path}, so whoever runs there can't be trusted: chmod go-w {path}"
                )
            self._lock = locked(
                path, f"another daemon runs with {path}: stop it, or take a directory of its own"
            )
        except OSError as error:
            message = f"{path} can't be used as a state directory: {error}"
            raise MembershipError(message) from error
        try:
            self._record = self._read(daemon)
        except BaseException:
            self.close()
            raise

    @property
    def fabric(self) -> FabricId | None:
        """The fabric that its daemon has joined, None before it has."""
        return FabricId(bytes.fromhex(self._record.fabric)) if self._record.fabric else None

    @property
    def start(self) -> StartId | None:
        """The start id of the process that had it before; that one is gone. None before the first."""
        return StartId(bytes.fromhex(self._record.start)) if self._record.start else None

    def remember(self, *, fabric: FabricId, start: StartId) -> None:
        """Keep whose this is: *fabric* for good, *start* until the next one.

        Raises UsageError when it belongs to another fabric, and MembershipError when it can't be written.
        """
        self.check_fabric(fabric)
        self._keep(msgspec.structs.replace(self._record, fabric=fabric.hex(), start=start.hex()))

    def check_fabric(self, fabric: FabricId) -> None:
        """Raise UsageError when its daemon has joined another fabric than this."""
        if self.fabric not in (None, fabric):
            raise UsageError(
                f"{self.path} is the directory of {self._record.daemon} in fabric {self._record.fabric}, not "
                f"in {fabric.hex()}: take another directory if that is a new fabric, or check where etcd is "
                "and the prefix"
            )

    def close(self) -> None:
        """Unlock it."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, record: _Record) -> None:
        file = self.path / RECORD_FILE
        try:
            write_whole(file, msgspec.json.encode(record) + b"\n")
        except OSError as error:
            message = f"{file} can't be written: {error}"
            raise MembershipError(message) from error
        self._record = record

    def _read(self, daemon: str) -> _Record:
        file = self.path / RECORD_FILE
        try:
            record = msgspec.json.decode(file.read_bytes(), type=_Record)
        except FileNotFoundError:
            record = _Record(_VERSION, daemon)
            self._keep(record)
        except msgspec.DecodeError as error:
            message = f"{file} is damaged ({error}): remove it if {self.path} is the directory of {daemon}"
            raise FormatError(message) from error
        if record.version != _VERSION:
            raise FormatError(
                f"{file} has version {record.version}, and this release reads {_VERSION}: use the release "
                "that wrote it"
            )
        if record.daemon != daemon:
            raise UsageError(
                f"{self.path} is the directory of {record.daemon}, not of {daemon}: take another"
            )
        return record
