"""Access to a configfs tree, with the few calls needed for the target.

Objects are created by ``mkdir``, configured by writes, joined by links. Attributes are files, present as long
as their directory. Each is read and written whole.
"""

from __future__ import annotations

import os
from pathlib import Path


class Configfs:
    """Tree below a directory. Paths are relative; every method raises OSError."""

    def __init__(self, root: Path) -> None:
        """Use *root*, a kernel subsystem's tree such as /sys/kernel/config/nvmet."""
        self.root = root

    def has(self, path: str) -> bool:
        """Return whether *path* exists."""
        return os.path.lexists(self.root / path)

    def names(self, path: str) -> list[str]:
        """Return the directories and links in a directory; empty if missing."""
        try:
            with os.scandir(self.root / path) as entries:
                return sorted(each.name for each in entries if each.is_symlink() or each.is_dir())
        except FileNotFoundError:
            return []

    def read(self, path: str) -> str:
        """Return the value of an attribute."""
        return (self.root / path).read_text().strip()

    def write(self, path: str, text: str) -> None:
        """Set an attribute, in one write."""
        descriptor = os.open(self.root / path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, f"{text}\n".encode())
        finally:
            os.close(descriptor)

    def mkdir(self, path: str) -> None:
        """Create a directory if missing."""
        try:
            (self.root / path).mkdir()
        except FileExistsError:
            return

    def rmdir(self, path: str) -> None:
        """Remove a directory with its attributes, if present."""
        try:
            (self.root / path).rmdir()
        except FileNotFoundError:
            return

    def link(self, path: str, to: str) -> None:
        """Link *path* to *to*, if not yet linked."""
        try:
            (self.root / path).symlink_to(self.root / to)
        except FileExistsError:
            return

    def unlink(self, path: str) -> None:
        """Remove a link, if present."""
        (self.root / path).unlink(missing_ok=True)
