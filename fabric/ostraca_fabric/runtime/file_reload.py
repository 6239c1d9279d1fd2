"""Hot reload of objects made from files, such as renewed certificates.

If changed files are unusable, the previous object stays in use and a warning is logged. A file replaced in
the wrong order, or written in part, must not end a fabric. Each later call tries again, since the cause may
lie elsewhere, such as a missing file descriptor. The warning is logged once.
"""

from __future__ import annotations

import hashlib
import logging
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from ostraca_fabric.errors import UsageError

log = logging.getLogger(__name__)

_Made = TypeVar("_Made")

_Identity = tuple[int, int, int, bytes]


class ReloadedFiles(Generic[_Made]):
    """Object made from files, made again after a change. Thread-safe."""

    def __init__(self, files: Sequence[Path], make: Callable[[], _Made]) -> None:
        """Make the object; *make* reads the files. Raises UsageError from *make*."""
        self._files = tuple(files)
        self._make = make
        self._seen: tuple[_Identity | None, ...] | None = identities(self._files)
        """Identities of the files in use; None while the current files are unusable."""

        self._lock = threading.Lock()  # held while making, so that an older object never replaces a newer one
        self._refused: tuple[_Identity | None, ...] | None = None
        self._made = make()

    def current(self) -> _Made:
        """Return the object for the current files, identical while the files are unchanged."""
        with self._lock:
            self._look()
            return self._made

    def _look(self) -> None:
        found = identities(self._files)
        if found != self._seen:
            self._seen = found
            files = ", ".join(map(str, self._files))
            try:
                self._made = self._make()
            except UsageError as error:
                self._seen = None
                if found != self._refused:
                    log.warning("Continuing with the previous content of %s: %s", files, error)
                self._refused = found
            else:
                self._refused = None
                log.info("Reloaded changed files: %s", files)


def identities(files: Sequence[Path]) -> tuple[_Identity | None, ...]:
    """Return permissions and content of each file, following links; None for an unreadable file."""
    return tuple(map(_identity, files))


def _identity(file: Path) -> _Identity | None:
    try:
        found = file.stat()
        content = file.read_bytes() if stat.S_ISREG(found.st_mode) else b""
    except OSError:
        return None
    # Neither times nor the inode: the kubelet sets owners of mounted files again and again.
    return found.st_mode, found.st_uid, found.st_gid, hashlib.sha256(content).digest()
