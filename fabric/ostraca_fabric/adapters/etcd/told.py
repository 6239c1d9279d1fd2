"""What a watch tells: first all there is, then what has changed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its value, as etcd keeps them."""

    key: bytes
    value: bytes
    created: int
    """The revision in which the key came to be."""

    modified: int
    """The revision in which it was last written."""

    lease: int
    """What it is bound to; 0: to nothing."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """A key that is gone, and the revision in which it went."""

    key: bytes
    modified: int


@dataclass(frozen=True, slots=True)
class Listed:
    """All there is at a revision. What was told before is void."""

    entries: tuple[Entry, ...]
    revision: int
    went_back: str = ""
    """How etcd was found to have forgotten what was told before; empty where it was not."""


@dataclass(frozen=True, slots=True)
class Changed:
    """What has changed since what was told before, in order, up to a revision."""

    changes: tuple[Entry | Deleted, ...]
    revision: int
