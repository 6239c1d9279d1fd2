"""A configfs tree, as few calls as the target needs: what is made by ``mkdir``, set by writing, joined by
links.

Attributes are files that come with their directory and go with it. Each is read and written whole.
"""

from __future__ import annotations

import os
from pathlib import Path


class Configfs:
    """The tree below one directory. Paths are relative to it; every method raises OSError."""

    def __init__(self, root: Path) -> None:
        """*root* is that of one subsystem of the kernel, as /sys/kernel/config/nvmet."""
        self.root = root

    def has(self, path: str) -> bool:
        """Say whether there is anything at *path*."""
        return os.path.lexists(self.root / path)

    def names(self, path: str) -> list[str]:
        """Return what directories and links there are in one, none where that is missing."""
        try:
            with os.scandir(self.root / path) as entries:
                return sorted(each.name for each in entries if each.is_symlink() or each.is_dir())
        except FileNotFoundError:
            return []

    def read(self, path: str) -> str:
        """Return what an attribute says."""
        return (self.root / path).read_text().strip()

    def write(self, path: str, text: str) -> None:
        """Set an attribute, in one write."""
        descriptor = os.open(self.root / path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, f"{text}\n".encode())
        finally:
            os.close(descriptor)

    def mkdir(self, path: str) -> None:
        """Make a directory, unless it is there."""
        try:
            (self.root / path).mkdir()
        except FileExistsError:
            return

    def rmdir(self, path: str) -> None:
        """Remove a directory with its attributes, if it is there."""
        try:
            (self.root / path).rmdir()
        except FileNotFoundError:
            return

    def link(self, path: str, to: str) -> None:
        """Join *to* at *path*, unless it is."""
        try:
            (self.root / path).symlink_to(self.root / to)
        except FileExistsError:
            return

    def unlink(self, path: str) -> None:
        """Take a link away, if it is there."""
        (self.root / path).unlink(missing_ok=True)
