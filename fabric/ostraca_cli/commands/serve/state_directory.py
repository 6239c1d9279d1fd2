"""State directory of a daemon, locked against a second process.

The lock is a kernel lock, not a file with a process id. The lock vanishes with its process, and works in
containers where every process has id 1. The holder of the lock knows that all earlier holders are gone.
``daemon.json`` names the daemon of the directory.
"""

from __future__ import annotations

import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import msgspec

from ostraca_cli.composition.state import lock_directory
from ostraca_fabric.errors import FormatError, MembershipError, UsageError
from ostraca_fabric.model.ids import FabricId, StartId
from ostraca_fabric.runtime.atomic_files import make_private_folder, write_whole
from ostraca_fabric.runtime.os_errors import explained

RECORD_FILE = "daemon.json"
_VERSION = 1


_Id = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    version: int
    daemon: str
    """Kind and name of the daemon, as in ``agent host-7``."""

    fabric: _Id = ""
    """Id of the joined fabric, in hexadecimal; empty before the first join."""

    start: _Id = ""
    """Start id of the last process, in hexadecimal."""


class StateDirectory(AbstractContextManager["StateDirectory"]):
    """State directory of a daemon, locked until ``close``."""

    def __init__(self, path: Path, daemon: str) -> None:
        """Create and lock the directory, and check its daemon.

        Raises MembershipError if another process holds the directory, or on failure to create the directory.
        Raises UsageError if other users may write there, or for another daemon's directory; FormatError for a
        damaged record.
        """
        self.path = path
        try:
            make_private_folder(path)
            if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UsageError(
                    f"other users may write to {path}, so its content is not trustworthy: chmod go-w {path}"
                )
            self._lock = lock_directory(
                path, f"another daemon uses {path}: stop the daemon, or give another state directory"
            )
        except OSError as error:
            raise MembershipError(f"unusable state directory {path}: {explained(error)}") from error
        try:
            self._record = self._read(daemon)
        except BaseException:
            self.close()
            raise

    @property
    def fabric(self) -> FabricId | None:
        """Return the joined fabric, None before the first join."""
        return FabricId(bytes.fromhex(self._record.fabric)) if self._record.fabric else None

    @property
    def start(self) -> StartId | None:
        """Return the start id of the previous process, which is gone; None at the first start."""
        return StartId(bytes.fromhex(self._record.start)) if self._record.start else None

    def remember(self, *, fabric: FabricId, start: StartId) -> None:
        """Record *fabric* for good, and *start* until the next start.

        Raises UsageError for a second fabric, and MembershipError if the record is not writable.
        """
        self.check_fabric(fabric)
        self._keep(msgspec.structs.replace(self._record, fabric=fabric.hex(), start=start.hex()))

    def check_fabric(self, fabric: FabricId) -> None:
        """Raise UsageError if the daemon has joined another fabric."""
        if self.fabric not in (None, fabric):
            raise UsageError(
                f"{self.path} belongs to {self._record.daemon} in fabric {self._record.fabric}, not in "
                f"{fabric.hex()}: give another directory for a new fabric, or check etcd's address and the "
                "prefix"
            )

    def close(self) -> None:
        """Unlock the directory."""
        self._lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, record: _Record) -> None:
        file = self.path / RECORD_FILE
        try:
            write_whole(file, msgspec.json.encode(record) + b"\n")
        except OSError as error:
            raise MembershipError(f"cannot write {file}: {explained(error)}") from error
        self._record = record

    def _read(self, daemon: str) -> _Record:
        file = self.path / RECORD_FILE
        try:
            record = msgspec.json.decode(file.read_bytes(), type=_Record)
        except FileNotFoundError:
            record = _Record(_VERSION, daemon)
            self._keep(record)
        except OSError as error:
            raise MembershipError(f"cannot read the record of {daemon}: {explained(error)}") from error
        except msgspec.DecodeError as error:
            raise FormatError(
                f"{file} is damaged ({error}): remove the file if {self.path} belongs to {daemon}"
            ) from error
        if record.version != _VERSION:
            raise FormatError(
                f"{file} has version {record.version}, and this release reads {_VERSION}: use the release of "
                "the writer"
            )
        if record.daemon != daemon:
            raise UsageError(
                f"{self.path} belongs to {record.daemon}, not to {daemon}: give another state directory"
            )
        return record
