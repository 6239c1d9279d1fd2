"""Holding blocks in slots against their tags, a wave at a time, by a deadline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from ostraca.core.events import Verdict
from ostraca_fabric.tags import TAG_BYTES, are_good, tags_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ostraca.crew import Crew

_HASH_BYTES = 32 << 20
"""A few milliseconds of hashing: what a get may overrun its deadline by."""


VERDICT_OF_BAD = np.uint8(Verdict.DAMAGED)
"""Add this to whether a block is good, 0 or 1, as C says it."""


def no_verdicts(blocks: int) -> NDArray[np.uint8]:
    """Return the verdicts of blocks that nobody has looked at."""
    return np.zeros(blocks, np.uint8)  # Verdict.UNSEEN


def verdicts_of(good: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return the verdict of each block that was looked at."""
    return good + VERDICT_OF_BAD


def checked_until(
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
    tags: NDArray[np.uint8],
    *,
    until_s: float,
    crew: Crew,
) -> Iterator[tuple[slice, NDArray[np.bool_]]]:
    """Check blocks in order, as long as there is time; yield which ones, and of each whether it is good.

    Columns as ``ostraca_fabric.tags.are_good``, which also says what is raised.
    """
    good = np.zeros(len(lengths), np.bool_)
    for some in _slices_until(lengths, until_s):

        def check(share: slice, begin: int = some.start) -> None:
            part = slice(begin + share.start, begin + share.stop)
            good[part] = are_good(memory, offsets[part], lengths[part], seeds[part], tags[part])

        crew.share(lengths[some], check)
        yield some, good[some]


def tags_made(
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
    *,
    crew: Crew,
) -> NDArray[np.uint8]:
    """Return what ``ostraca_fabric.tags.tags_of`` does."""
    tags = np.empty((len(offsets), TAG_BYTES), np.uint8)

    def make(share: slice) -> None:
        tags[share] = tags_of(memory, offsets[share], lengths[share], seeds[share])

    crew.share(lengths, make)
    return tags


def _slices_until(lengths: NDArray[np.uint32], until_s: float) -> Iterator[slice]:
    """Cut blocks into what can be hashed between two looks at the clock, as long as there is time.

    Hashing can't be interrupted: a slice has a few milliseconds' worth of bytes, and a block at least.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    first, first_bytes = 0, 0
    while first < len(ends) and time.monotonic() < until_s:
        last = max(first + 1, int(np.searchsorted(ends, first_bytes + _HASH_BYTES, side="right")))
        yield slice(first, last)
        first, first_bytes = last, int(ends[last - 1])
