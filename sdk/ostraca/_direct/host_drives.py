"""Drives of this host for direct reads by a worker.

Paths come from the settings alone, never from an agent. Each drive is opened for reading only, past the page
cache. A link as the last component of a path is refused: another user could change its target.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import mmap
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from ostraca_fabric.drives.flash_files import FlashFileError, open_flash
from ostraca_fabric.errors import FormatError, shown
from ostraca_fabric.flash.superblock import Superblock, decode_superblock
from ostraca_fabric.model.extent import PAGE_BYTES, SUPERBLOCK_COPIES
from ostraca_fabric.model.ids import DriveId, FabricId
from ostraca_fabric.runtime.os_errors import state_and_remedy

log = logging.getLogger("ostraca")

_FLAGS = os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW
_PATH_SHOWN_MAX = 4096


@dataclass(frozen=True, slots=True)
class HostDrive:
    """Open drive with a shard at its beginning."""

    fabric: FabricId
    drive: DriveId
    path: str
    descriptor: int
    """For reading only. The holder closes the descriptor."""

    size_bytes: int


def open_host_drives(patterns: Iterable[str]) -> tuple[HostDrive, ...]:
    """Open all matching drives, in the order of *patterns*, then of paths.

    Each drive is opened once. An unusable file or block device is left out, with a line in the log. Never
    raises.
    """
    opened: dict[tuple[bytes, str], HostDrive] = {}
    places: set[tuple[int, ...]] = set()
    for pattern in patterns:
        paths = sorted(glob.glob(pattern))  # noqa: PTH207 (a path of any depth, not one below a folder)
        if not paths:
            log.warning("No drive to read directly is at %s", shown_path(pattern))
        for path in paths:
            drive = _opened(path, places)
            if drive is None:
                continue
            before = opened.setdefault((drive.fabric, drive.drive), drive)
            if before is not drive:
                os.close(drive.descriptor)
                _leave_out(path, f"drive {shown(drive.drive)} is also at {shown_path(before.path)}")
    return tuple(opened.values())


def _opened(path: str, places: set[tuple[int, ...]]) -> HostDrive | None:
    """Open a drive at a new place, and add the place; None for an unusable drive or a known place."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = open_flash(path, _FLAGS)
            stack.callback(os.close, descriptor)
            place = _place_of(descriptor)
            if place in places:
                return None
            superblock = _read_superblock(descriptor)
            size_bytes = os.lseek(descriptor, 0, os.SEEK_END)
        except FlashFileError as error:
            is_denied = isinstance(error.__cause__, PermissionError)
            _leave_out(path, error.state, logging.INFO if is_denied else logging.WARNING)
        except FormatError as error:
            _leave_out(path, str(error))
        except OSError as error:
            _leave_out(path, f"can't be read ({state_and_remedy(error)[0]})")
        else:
            stack.pop_all()
            places.add(place)
            return HostDrive(superblock.fabric, superblock.drive, path, descriptor, size_bytes)
    return None


def _leave_out(path: str, why: str, level: int = logging.WARNING) -> None:
    log.log(level, "%s is not read directly: %s", shown_path(path), why)


def shown_path(path: str) -> str:
    """Return a path for a log line."""
    return shown(path, _PATH_SHOWN_MAX)


def _place_of(descriptor: int) -> tuple[int, ...]:
    """Return the identity of a file, or of a block device by any of its names."""
    found = os.fstat(descriptor)
    return (found.st_rdev,) if stat.S_ISBLK(found.st_mode) else (found.st_dev, found.st_ino)


def _read_superblock(descriptor: int) -> Superblock:
    """Read the superblock of the shard at the drive's beginning. Raises FormatError and OSError."""
    with mmap.mmap(-1, SUPERBLOCK_COPIES * PAGE_BYTES) as pages:
        count = os.preadv(descriptor, [pages], 0)
        superblock = decode_superblock(pages[:count])
    if superblock.drive_offset:
        raise FormatError(
            f"its first shard belongs at byte {superblock.drive_offset} of a drive: the drive is a copy"
        )
    return superblock
