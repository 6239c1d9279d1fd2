"""Records of a fabric beside its map: what the admin service keeps, and what enclosures say of themselves.

Each has the revision in which it was last written, by which whoever changes it knows that it is still what
was read. Changes are made together or not at all. A *hold* is a record of this process that goes with it:
whoever writes under one can't do so after another has taken it over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

ABSENT = 0
"""The revision of a record that is not there."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it was read."""

    key: str
    """Below the fabric's prefix, as ``specs/shelf-1``."""

    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Written:
    """A record as it is to be; without a value, gone."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Hold:
    """A record that lives as long as the process that made it, and no longer than it says."""

    key: str
    revision: int


class Records(Protocol):
    """One fabric's. Every method may raise MembershipError: then what was asked for may have been done."""

    async def get(self, key: str) -> Record | None:
        """Return a record, None when it is not there."""

    async def get_many(self, keys: Sequence[str]) -> Mapping[str, Record]:
        """Return those of some records that are there, all as they were at one moment."""

    async def below(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[Record, ...]:
        """Return the records whose keys begin with *prefix*, in order of their keys: those behind *after*, up
        to *limit* of them unless that is 0.
        """

    async def write(self, changes: Sequence[Written], *, unchanged: Mapping[str, int]) -> int | None:
        """Make all changes if each record named in *unchanged* has that revision still, ``ABSENT`` for one
        that must not be there. Return the revision they were made in, None when they were not.
        """

    async def hold(self, key: str, value: bytes) -> Hold | None:
        """Make a record that goes with this process, or within seconds of its end; None when it is there."""

    async def let_go(self, hold: Hold) -> None:
        """End a hold. Not an error when it has ended."""

    def changes(self, prefix: str) -> AsyncIterator[tuple[Record | str, ...]]:
        """Yield all records below a prefix, then what has changed: records, and the keys of those that went.
        Where some of that was missed, all records come again. Without end.
        """
