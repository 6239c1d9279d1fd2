"""Safe opening of a drive's file or block device, without waiting.

Opening a FIFO blocks until a writer appears, and other special files act on opening. So the kind is checked
before the opening, and again on the opened file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from ostraca_fabric.errors import DriveError
from ostraca_fabric.runtime.os_errors import state_and_remedy

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFLNK: "a link",
}
_ALWAYS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class FlashFileError(DriveError):
    """File at a drive's path that can't be opened as a drive.

    The message names path, state and remedy.
    """

    def __init__(self, path: str, state: str, remedy: str, *, is_missing: bool = False) -> None:
        super().__init__(f"{path} {state}{f': {remedy}' if remedy else ''}")
        self.state, self.remedy = state, remedy
        self.is_missing = is_missing
        """Whether the path does not exist, not even as a link."""


def open_flash(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file or block device; return its descriptor. Never creates, never waits.

    *flags* are those of ``os.open``. With O_DIRECT, a file system without direct I/O opens the file without
    the flag. With O_NOFOLLOW, a link is no drive. Raises FlashFileError.
    """
    name = os.fspath(path)
    try:
        _check_kind(name, Path(name).stat(follow_symlinks=not flags & os.O_NOFOLLOW).st_mode)
        descriptor = _opened(name, flags & ~os.O_CREAT | _ALWAYS)
    except OSError as error:
        raise _told(name, error) from error
    try:
        _check_kind(name, os.fstat(descriptor).st_mode)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def flash_file_bytes(path: str | os.PathLike[str]) -> int:
    """Return the size of a drive's file, or 0 for a block device, without opening.

    Raises FlashFileError if the path holds no drive.
    """
    name = os.fspath(path)
    try:
        found = Path(name).stat()
    except OSError as error:
        raise _told(name, error) from error
    _check_kind(name, found.st_mode)
    return found.st_size


def goes_direct(descriptor: int) -> bool:
    """Tell whether a descriptor bypasses the page cache."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def displacement(descriptor: int, path: str, size_bytes: int) -> str:
    """Describe how an open file differs from the file a restart would find.

    Returns the predicate of a sentence about the file, with the remedy; empty without a difference. Never
    raises.
    """
    try:
        opened = os.fstat(descriptor)
    except OSError:  # the device is gone: the next read reports this
        return ""
    if not stat.S_ISREG(opened.st_mode):
        return ""
    remedy = f"stop, and restore it or replace it (`ostraca doctor {path}` says how)"
    if not opened.st_nlink:
        return f"was deleted at {path} while it is in use, and its blocks go with the last user: {remedy}"
    if opened.st_size < size_bytes:
        return f"was cut short at {path}, from {size_bytes} to {opened.st_size} bytes: {remedy}"
    return _elsewhere(opened, path)


def _elsewhere(opened: os.stat_result, path: str) -> str:
    """Describe a path that no longer leads to the open file; empty if the path does."""
    remedy = "put it back there before the next start"
    try:
        there = Path(path).stat()
    except OSError as error:
        return f"is no longer found at {path} ({state_and_remedy(error)[0]}): {remedy}"
    is_same = (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)
    return "" if is_same else f"is not what lies at {path} any more: {remedy}"


def _opened(path: str, flags: int) -> int:
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
    return os.open(path, flags & ~os.O_DIRECT)


def _check_kind(path: str, mode: int) -> None:
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
        raise FlashFileError(
            path, f"is {kind}, not a file or a block device", "move it away, and put the drive back"
        )


def _told(path: str, error: OSError) -> FlashFileError:
    if error.errno == errno.ENOENT:
        if Path(path).is_symlink():
            return FlashFileError(
                path,
                f"is a link to {Path(path).readlink()}, where nothing is",
                "mount the disk that it leads to, or put the drive back",
            )
        return FlashFileError(
            path,
            "is missing",
            "put the drive back, or mount the disk that it lies on",
            is_missing=True,
        )
    state, remedy = state_and_remedy(error)
    return FlashFileError(path, f"can't be opened ({state})", remedy)
