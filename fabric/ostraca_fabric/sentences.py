"""Sentences that count things, or name some of many. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

_NAMED = 4
"""Of many things so many are named: a sentence is read by people."""


def counted(count: int, noun: str) -> str:
    """Return how many there are: ``1 shard``, ``3 shards``. *noun* in the singular, with a regular plural."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def named(names: Sequence[str], count: int | None = None) -> str:
    """Return the first few of these, and how many more there are, in all or of *count*; ``none`` of none."""
    more = (len(names) if count is None else count) - _NAMED
    return f"{', '.join(islice(names, _NAMED)) or 'none'}{f' and {more} more' if more > 0 else ''}"
