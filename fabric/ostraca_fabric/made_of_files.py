"""What is made of files, and made anew once they have changed: certificates that are renewed while we run.

Files that can't be used leave in use what was made of the last ones that could, with a word in the log: one
that is replaced in the wrong order, or half written, must not end a fabric.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Generic, TypeVar

from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

_Made = TypeVar("_Made")

_Identity = tuple[int, int, int, int]


class MadeOfFiles(Generic[_Made]):
    """Something made of files, as they are now. For one thread."""

    def __init__(self, files: Sequence[Path], make: Callable[[], _Made]) -> None:
        """Make it; *make* reads the files. Raises UsageError, as *make* does, when they can't be used."""
        self._files = tuple(files)
        self._make = make
        self._seen = identities(self._files)
        self._made = make()

    def current(self) -> _Made:
        """Return what the files make: the same object for as long as they have not changed."""
        found = identities(self._files)
        if found != self._seen:
            self._seen = found
            files = ", ".join(map(str, self._files))
            try:
                self._made = self._make()
            except UsageError as error:
                log.warning("Going on with what was in %s before: %s", files, error)
            else:
                log.info("Took what has changed in %s", files)
        return self._made


def identities(files: Sequence[Path]) -> tuple[_Identity | None, ...]:
    """Tell files from what they were before, also where a link leads elsewhere; None where none is."""
    return tuple(map(_identity, files))


def _identity(file: Path) -> _Identity | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
