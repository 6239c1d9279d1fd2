"""Sentences with counts and short lists. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

_NAMED = 4
"""Maximum number of listed names, for readable sentences."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 shard``, ``3 shards``.

    *noun* is singular, with a regular plural.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def named(names: Sequence[str], count: int | None = None) -> str:
    """Return the first few names and the number of the others; ``none`` without names.

    *count* is the total, if *names* is not complete.
    """
    more = (len(names) if count is None else count) - _NAMED
    return f"{', '.join(islice(names, _NAMED)) or 'none'}{f' and {more} more' if more > 0 else ''}"
