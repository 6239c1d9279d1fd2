"""Events of a watch: a list, then changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """Key with its value, as stored in etcd."""

    key: bytes
    value: bytes
    created: int
    """Revision of the key's creation."""

    modified: int
    """Revision of the last write."""

    lease: int
    """Lease of the key; 0: none."""


@dataclass(frozen=True, slots=True)
class DeletedEntry:
    """Deleted key, with the revision of the deletion."""

    key: bytes
    modified: int


@dataclass(frozen=True, slots=True)
class EntryList:
    """All entries at a revision. Earlier events are void."""

    entries: tuple[Entry, ...]
    revision: int
    went_back: str = ""
    """Evidence that etcd has lost reported changes, or empty."""


@dataclass(frozen=True, slots=True)
class EntryChanges:
    """Changes since the previous event, in order, up to a revision."""

    changes: tuple[Entry | DeletedEntry, ...]
    revision: int
