"""Drives that are files: ``drive-0.img`` and on, in one directory, raw.

A drive's NGUID is drawn when it is made and kept beside the files, in ``drives.json``. A file that has gone
comes back as another drive: what was on it is lost, and the name is all it shares.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

import msgspec

from ostraca_enclosure.drives import FoundDrive
from ostraca_enclosure.ports import InventoryError
from ostraca_fabric.adapters.whole_files import sync_directory, write_whole
from ostraca_fabric.errors import DriveError, FormatError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.ids import ID_BYTES
from ostraca_fabric.target import check_nguid

DRIVES_FILE = "drives.json"
_VERSION = 1
_NAME = re.compile(r"drive-(0|[1-9][0-9]{0,4})\Z")
_HEADROOM_BYTES = 64 << 20
"""Left free on the disk that the files lie on."""


class _Record(msgspec.Struct, frozen=True):
    version: int
    nguids: dict[str, str]
    """By drive's name."""


class FileDrives:
    """The files of one directory. Implements ``ports.Inventory``."""

    def __init__(self, directory: Path) -> None:
        """*directory* is an absolute path. ``prepare`` makes it, and drives in it."""
        self._directory = directory
        self._file = directory / DRIVES_FILE

    def prepare(self, drives: int, drive_bytes: int) -> None:
        """See to it that there are so many *drives*, those that are missing made of *drive_bytes*; what is
        there stays as it is, and those without an NGUID are given one.

        Raises DriveError where there is no room, and FormatError.
        """
        if drive_bytes <= 0 or drive_bytes % PAGE_BYTES:
            raise DriveError(f"a drive of {drive_bytes} bytes: take a multiple of {PAGE_BYTES}")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            wanted = [f"drive-{number}" for number in range(drives)]
            missing = [name for name in wanted if not self._path(name).exists()]
            self._check_room(len(missing), drive_bytes)
            self._name_all(missing)
            for name in missing:
                self._make(name, drive_bytes)
            self._name_all(())
        except OSError as error:
            raise DriveError(f"drives can't be made in {self._directory}: {error}") from error

    def look(self) -> tuple[FoundDrive, ...]:
        """Return every drive."""
        try:
            known = self._known()
            return tuple(self._found(path, known.get(path.stem, "")) for path in self._paths())
        except (OSError, FormatError) as error:
            raise InventoryError(str(error)) from error

    def _found(self, path: Path, nguid: str) -> FoundDrive:
        return FoundDrive(path.stem, str(path), nguid, path.stat().st_size, PAGE_BYTES, is_file=True)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.img"

    def _paths(self) -> list[Path]:
        found = [path for path in self._directory.glob("drive-*.img") if _NAME.match(path.stem)]
        return sorted(found, key=lambda path: int(path.stem.removeprefix("drive-")))

    def _check_room(self, missing: int, drive_bytes: int) -> None:
        free = shutil.disk_usage(self._directory).free - _HEADROOM_BYTES
        if missing * drive_bytes > free:
            raise DriveError(
                f"{missing} drives take {missing * drive_bytes} bytes, and {self._directory} has "
                f"{max(0, free)} to spare: take a smaller --drive-size or another directory"
            )

    def _make(self, name: str, drive_bytes: int) -> None:
        """Allocate a whole drive beside its name, then give it the name: a crash leaves no half-made one."""
        path = self._path(name)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, drive_bytes)
                os.fsync(file.fileno())
            except OSError:
                partial.unlink()
                raise
        partial.replace(path)
        sync_directory(self._directory)

    def _name_all(self, anew: Collection[str]) -> None:
        """Give each drive that has none an NGUID, and those of *anew* another."""
        known = self._known()
        names = dict.fromkeys([path.stem for path in self._paths()]) | dict.fromkeys(anew)
        named = {
            name: known[name] if name in known and name not in anew else secrets.token_hex(ID_BYTES)
            for name in names
        }
        if named != known:
            record = _Record(_VERSION, named)
            write_whole(self._file, msgspec.json.format(msgspec.json.encode(record)) + b"\n")

    def _known(self) -> dict[str, str]:
        try:
            record = msgspec.json.decode(self._file.read_bytes(), type=_Record)
            if record.version != _VERSION:
                raise FormatError(
                    f"{self._file} has version {record.version}, and this release reads {_VERSION}: "
                    "upgrade it"
                )
            for nguid in record.nguids.values():
                check_nguid(nguid)
        except FileNotFoundError:
            return {}
        except (msgspec.DecodeError, ValueError) as error:
            raise FormatError(
                f"{self._file} is damaged ({error}): it says which drive is which, so restore it"
            ) from error
        return record.nguids
