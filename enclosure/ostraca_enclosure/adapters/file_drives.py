"""Drives as raw files in a directory: ``drive-0.img`` and on.

A drive's NGUID is random, made at creation and kept beside the files in ``drives.json``. A recorded drive is
never created again. If the file is missing, or has other contents, the drive is reported and not exported;
the other drives are. After removal of the name from the record, the next start creates another drive: the old
contents are lost, only the name is shared.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from ostraca_enclosure.drives import FoundDrive, Obstacle
from ostraca_enclosure.files import check_room
from ostraca_enclosure.ports import InventoryError
from ostraca_enclosure.state_files import STATE_VERSION, StateRecord, read_state, write_state
from ostraca_fabric.drives.flash_files import flash_file_bytes
from ostraca_fabric.errors import DriveError, FormatError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.ids import ID_BYTES
from ostraca_fabric.model.target import check_nguid
from ostraca_fabric.runtime.atomic_files import make_private_folder, write_whole
from ostraca_fabric.runtime.os_errors import explained

DRIVES_FILE = "drives.json"
_NAME = re.compile(r"drive-(0|[1-9][0-9]{0,4})\Z")


class _DriveNames(StateRecord, frozen=True):
    nguids: dict[str, str]
    """By name of the drive."""


class FileDrives:
    """Files of a directory. Implements ``ports.Inventory``."""

    def __init__(self, directory: Path) -> None:
        """Store *directory*, an absolute path; ``prepare`` creates directory and drives."""
        self._directory = directory
        self._file = directory / DRIVES_FILE

    def prepare(self, drives: int, drive_bytes: int) -> None:
        """Ensure *drives* drives, with new drives of *drive_bytes*.

        Existing drives stay as they are; a drive without an NGUID receives a new NGUID. Raises DriveError if
        there is no room, and FormatError.
        """
        if drive_bytes <= 0 or drive_bytes % PAGE_BYTES:
            raise DriveError(f"a drive can't have {drive_bytes} bytes: choose a multiple of {PAGE_BYTES}")
        try:
            make_private_folder(self._directory)
            known = self._nguids_by_name()
            wanted = [f"drive-{number}" for number in range(drives)]
            missing = [name for name in wanted if name not in known and not os.path.lexists(self._path(name))]
            if missing:
                check_room(self._directory, len(missing), drive_bytes, "a smaller --drive-size")
            for name in missing:
                write_whole(self._path(name), b"", size_bytes=drive_bytes)
            self._assign_nguids()
        except OSError as error:
            raise DriveError(f"drives can't be created in {self._directory}: {explained(error)}") from error

    def look(self) -> tuple[FoundDrive, ...]:
        """Return all drives."""
        try:
            known = self._nguids_by_name()
            paths = {*self._paths(), *map(self._path, known)}
            return tuple(
                self._describe(path, known.get(path.stem, "")) for path in sorted(paths, key=_number)
            )
        except OSError as error:
            raise InventoryError(explained(error)) from error
        except FormatError as error:
            raise InventoryError(str(error)) from error

    def _describe(self, path: Path, nguid: str) -> FoundDrive:
        size_bytes = 0
        obstacles: tuple[Obstacle, ...] = ()
        try:  # a present but failing drive stays exported: agents notice failures themselves
            size_bytes = flash_file_bytes(path)
        except DriveError as error:
            how = f"to replace the drive, move {path} away and remove {path.stem} from {self._file}"
            obstacles = (Obstacle(f"{error}; {how}", is_final=True),)
        return FoundDrive(
            path.stem, str(path), nguid, size_bytes, PAGE_BYTES, is_file=True, obstacles=obstacles
        )

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.img"

    def _paths(self) -> list[Path]:
        found = [path for path in self._directory.glob("drive-*.img") if _NAME.match(path.stem)]
        return sorted(found, key=_number)

    def _assign_nguids(self) -> None:
        """Give an NGUID to each drive without."""
        known = self._nguids_by_name()
        names = dict.fromkeys([*known, *(path.stem for path in self._paths())])
        named = {name: known.get(name) or secrets.token_hex(ID_BYTES) for name in names}
        if named != known:
            write_state(self._file, _DriveNames(STATE_VERSION, named))

    def _nguids_by_name(self) -> dict[str, str]:
        record = read_state(
            self._file,
            _DriveNames,
            remedy="restore the file from a backup, since it names the drives",
            check=_check_names,
        )
        return record.nguids if record else {}


def _check_names(record: _DriveNames) -> None:
    for name, nguid in record.nguids.items():
        check_nguid(nguid)
        if not _NAME.match(name):
            raise ValueError(f"{name!r} is no name of a drive")


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("drive-"))
