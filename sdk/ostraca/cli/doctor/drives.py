"""Which drives a path stands for, and reading one of them.

A path is a drive (a file or a block device), or a directory with files of drives: that of `ostraca up`, an
enclosure in it, or any other with ``*.img`` files.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ostraca.cli.state import RECORD_FILE, FabricShape, is_running, read_fabric
from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.extent import PAGE_BYTES, rounded_up
from ostraca_fabric.ids import EnclosureId, FabricId, ShardId, drive_id, shard_id

if TYPE_CHECKING:
    from types import TracebackType

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Home:
    """The directory of `ostraca up` that a drive lies in."""

    directory: Path
    fabric: FabricId | None
    shape: FabricShape | None
    why: str
    """Why fabric and shape are not known, when they are not."""

    is_running: bool
    """Whether a process runs this fabric now."""

    @classmethod
    def of(cls, path: Path) -> Home | None:
        """Find the home of a drive, an enclosure or itself; None for a path that is in none."""
        places = _places(path)
        for directory in [each for place in places for each in (place, place.parent, place.parent.parent)]:
            if (directory / RECORD_FILE).exists():
                try:
                    fabric, shape = read_fabric(directory)
                except (FormatError, OSError) as error:
                    return cls(directory, None, None, str(error), is_running(directory))
                return cls(directory, fabric, shape, "", is_running(directory))
        return None

    def drives(self) -> dict[Path, ShardId]:
        """Return where each of the fabric's drives lies, and which shard is on it."""
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
        """Return which shard belongs on a drive."""
        drives = self.drives()
        return next((drives[place] for place in _places(path) if place in drives), None)


def _places(path: Path) -> tuple[Path, Path]:
    """Return where a path itself is, and where it leads: a fabric's drive may be a link to a device."""
    return path.parent.resolve() / path.name, path.resolve()


def drives_of(path: Path) -> list[Path]:
    """Return the drives that *path* stands for, those of a fabric that are missing, too.

    Raises UsageError when there are none.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise UsageError(f"there is nothing at {path}: pass a drive, or the directory of a fabric") from error
    if not stat.S_ISDIR(mode):
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise UsageError(f"{path} is neither a file nor a block device nor a directory")
        return [path]
    home = Home.of(path)
    wanted = set(home.drives()) if home is not None else set()
    inside = {drive for drive in wanted if drive.is_relative_to(path.resolve())}
    found = {_places(file)[0] for pattern in ("*.img", "*/*.img") for file in path.glob(pattern)}
    if not inside | found:
        raise UsageError(f"{path} holds no drives (*.img): pass a drive, or the --dir of `ostraca up`")
    return sorted(inside | found)


class DriveFile:
    """A drive, open for reading alone, past the page cache where the file system allows.

    So what is read is what lies on flash. Raises OSError when it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if isinstance(error, PermissionError):
                raise
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._memory = mmap.mmap(-1, _READ_BYTES)
        self.size_bytes = os.lseek(self._descriptor, 0, os.SEEK_END)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory.close()
        os.close(self._descriptor)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return what lies at *offset*, a multiple of the page size; less at the end. Raises OSError."""
        if rounded_up(size_bytes) > len(self._memory):
            self._memory.close()
            self._memory = mmap.mmap(-1, rounded_up(size_bytes))
        wanted, got = rounded_up(size_bytes), 0
        with memoryview(self._memory) as view:
            # Only the end of the drive cuts a read inside of a page.
            while got < wanted and got % PAGE_BYTES == 0:
                with view[got:wanted] as rest:
                    count = os.preadv(self._descriptor, [rest], offset + got)
                if not count:
                    break
                got += count
            return bytes(view[: min(got, size_bytes)])
