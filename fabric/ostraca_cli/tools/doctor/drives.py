"""Drives named by a path, and direct reads of a drive.

A path is a drive (a file or a block device), or a directory with files of drives. Such a directory belongs to
`ostraca up` or to an enclosure, or holds other ``*.img`` files.
"""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ostraca_cli.composition.state import RECORD_FILE, FabricShape, is_running, read_fabric
from ostraca_fabric.drives.flash_files import open_flash
from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.model.extent import PAGE_BYTES, rounded_up
from ostraca_fabric.model.ids import EnclosureId, FabricId, ShardId, drive_id, shard_id
from ostraca_fabric.runtime.os_errors import explained

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FabricDirectory:
    """Directory of `ostraca up` around a drive."""

    directory: Path
    fabric: FabricId | None
    shape: FabricShape | None
    problem: str
    """Reason for unknown fabric and shape; empty if known."""

    is_running: bool
    """Whether a process runs this fabric now."""

    @classmethod
    def of(cls, path: Path) -> FabricDirectory | None:
        """Find the directory of a drive or an enclosure, or the directory itself.

        Returns None for a path outside such a directory.
        """
        places = _places(path)
        for directory in [each for place in places for each in (place, place.parent, place.parent.parent)]:
            if os.path.lexists(directory / RECORD_FILE):
                try:
                    fabric, shape = read_fabric(directory)
                except FormatError as error:
                    return cls(directory, None, None, str(error), is_running(directory))
                except OSError as error:
                    return cls(directory, None, None, explained(error), is_running(directory))
                return cls(directory, fabric, shape, "", is_running(directory))
        return None

    def drives(self) -> dict[Path, ShardId]:
        """Return the shard of each of the fabric's drives, by path."""
        if self.shape is None:
            return {}
        return {
            self.directory / f"enclosure-{enclosure}" / f"drive-{drive}.img": shard_id(
                drive_id(EnclosureId(f"enclosure-{enclosure}"), f"drive-{drive}"), 0
            )
            for enclosure in range(self.shape.enclosures)
            for drive in range(self.shape.drives)
        }

    def shard_at(self, path: Path) -> ShardId | None:
        """Return the shard expected on a drive."""
        drives = self.drives()
        return next((drives[place] for place in _places(path) if place in drives), None)


def _places(path: Path) -> tuple[Path, Path]:
    """Return the path itself and its target, because a drive may be a link to a device."""
    return path.parent.resolve() / path.name, path.resolve()


def list_drives(path: Path) -> list[Path]:
    """Return the drives named by *path*, including missing drives of a fabric.

    Raises UsageError if there are none.
    """
    home = FabricDirectory.of(path)
    if home is not None and home.shard_at(path) is not None:  # explain the place in any state, even empty
        return [path]
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist: pass a drive, or the directory of a fabric") from error
    except OSError as error:
        raise UsageError(f"{path} can't be examined: {explained(error)}") from error
    if not stat.S_ISDIR(mode):
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise UsageError(f"{path} is neither a file nor a block device nor a directory")
        return [path]
    if not os.access(path, os.R_OK | os.X_OK):  # glob would silently find nothing
        raise UsageError(f"{path} can't be listed: run the command as the owner, or give this user access")
    wanted = set(home.drives()) if home is not None else set()
    inside = {drive for drive in wanted if drive.is_relative_to(path.resolve())}
    found = {_places(file)[0] for pattern in ("*.img", "*/*.img") for file in path.glob(pattern)}
    if not inside | found:
        raise UsageError(f"{path} holds no drives (*.img): pass a drive, or the --dir of `ostraca up`")
    return sorted(inside | found)


class DriveFile(AbstractContextManager["DriveFile"]):
    """Drive, open for reads only, without the page cache if the file system allows.

    Reads therefore show the content of flash. Raises FlashFileError if the drive cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = open_flash(path, os.O_RDONLY | os.O_DIRECT)
        self._memory = mmap.mmap(-1, _READ_BYTES)
        self.size_bytes = os.lseek(self._descriptor, 0, os.SEEK_END)

    def __exit__(self, *_: object) -> None:
        self._memory.close()
        os.close(self._descriptor)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Read at *offset*, a multiple of the page size; short at the end of the drive.

        Raises OSError.
        """
        if rounded_up(size_bytes) > len(self._memory):
            self._memory.close()
            self._memory = mmap.mmap(-1, rounded_up(size_bytes))
        wanted, got = rounded_up(size_bytes), 0
        with memoryview(self._memory) as view:
            # Only the end of the drive cuts a read inside a page.
            while got < wanted and got % PAGE_BYTES == 0:
                with view[got:wanted] as rest:
                    count = os.preadv(self._descriptor, [rest], offset + got)
                if not count:
                    break
                got += count
            return bytes(view[: min(got, size_bytes)])
