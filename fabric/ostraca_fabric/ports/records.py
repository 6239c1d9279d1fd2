"""Records of a fabric beside the map, such as operations and reports.

The admin service keeps most of them; enclosures report their own state. Each record has the revision of its
last write. A writer compares the revision to detect changes since the read. All changes of a write are made
together, or none is.

A *hold* is a record bound to this process. A write under a hold fails after another process has taken the
hold over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

ABSENT = 0
"""Revision of an absent record."""


@dataclass(frozen=True, slots=True)
class Record:
    """Record as read."""

    key: str
    """Key below the fabric's prefix, such as ``specs/shelf-1``."""

    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class RecordChange:
    """Record to write; without a value, record to delete."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class RecordLock:
    """Record bound to the life of the process that created the record."""

    key: str
    revision: int


class Records(Protocol):
    """Records of one fabric.

    Every method may raise MembershipError; the requested change may then have been made.
    """

    async def get(self, key: str) -> Record | None:
        """Return a record, or None if absent."""

    async def get_many(self, keys: Sequence[str]) -> Mapping[str, Record]:
        """Return the existing records among *keys*, all read at one revision."""

    async def below(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[Record, ...]:
        """Return records whose keys begin with *prefix*, in key order.

        Only keys after *after* are returned, at most *limit* unless *limit* is 0.
        """

    async def write(self, changes: Sequence[RecordChange], *, unchanged: Mapping[str, int]) -> int | None:
        """Make all changes if every record in *unchanged* still has the given revision.

        ``ABSENT`` stands for a record that must not exist. Return the revision of the changes, or None if
        nothing was changed.
        """

    async def hold(self, key: str, value: bytes) -> RecordLock | None:
        """Create a record bound to this process; return None if the record exists.

        The record disappears with the process, or within seconds of its end.
        """

    async def let_go(self, hold: RecordLock) -> None:
        """End a hold; no error if the hold has already ended."""

    def changes(self, prefix: str) -> AsyncIterator[tuple[Record | str, ...]]:
        """Yield all records below a prefix, then changed records and deleted keys.

        After a gap, all records are yielded again. The iterator never ends.
        """
