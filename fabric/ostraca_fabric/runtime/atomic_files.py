"""Small files that a crash or a power cut leaves in the old or the new state.

Content is made durable before the name, and the name before any use. Files and folders are private to their
user, whatever the umask and the parent folder allow.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import IO

PRIVATE = 0o600
PRIVATE_FOLDER = 0o700


def write_whole(path: Path, data: bytes, *, size_bytes: int = 0) -> None:
    """Replace the content of *path* durably, readable only by its user. Raises OSError.

    With *size_bytes*, the disk space of the whole file is allocated first.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with private_file(partial) as file:
            if size_bytes:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def private_file(path: Path) -> IO[bytes]:
    """Open a new file for writing, readable only by its user. Raises OSError.

    Replaces a leftover file.
    """
    path.unlink(missing_ok=True)  # the old file may be a link, or open for another user
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
    with contextlib.suppress(PermissionError):  # file systems without modes
        os.fchmod(descriptor, PRIVATE)  # a umask may have taken the user's own bits
    return os.fdopen(descriptor, "wb")


def make_private_folder(directory: Path) -> None:
    """Create a folder and missing parents, each private to its user.

    An existing folder stays unchanged. Raises OSError.
    """
    missing: list[Path] = []
    place = directory
    while not place.exists() and place != place.parent:
        missing.append(place)
        place = place.parent
    for each in reversed(missing):
        try:
            each.mkdir(PRIVATE_FOLDER)
        except FileExistsError:  # a concurrent creation, or a broken link
            continue
        with contextlib.suppress(PermissionError):  # as above
            each.chmod(PRIVATE_FOLDER)
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
