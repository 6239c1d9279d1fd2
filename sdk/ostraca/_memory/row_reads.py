"""Reads of drives into the rows of a get, from begin to the release of the rows.

A silent drive may write long after the get's end, and the caller has consented (``Client.register``). So rows
of blocks without a HIT stay claimed, and untouched here, as long as a read of the request is under way. Then
the rows are zeroed: the bytes may belong to another tenant.

Reads are whole pages, and tags cover blocks alone. So the rest of a good block's last page is zeroed too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostraca._memory.regions import RegionBlocks
from ostraca.results import LateRead


class RowReads:
    """Reads of one get. For the driver's thread, apart from the ends of late reads."""

    def __init__(self, region: RegionBlocks) -> None:
        """Begin without a read. Claim the rows before the first read."""
        self._region = region
        self._is_unverified = np.zeros(len(region.lengths), np.bool_)
        """Blocks whose rows may have unverified bytes of a drive, now or later."""

        self._requests: list[tuple[int, NDArray[np.intp]]] = []

    def begin(self, request: int, at: NDArray[np.intp]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Note reads of the blocks *at* positions; return the memory, and the blocks' places there."""
        self._requests.append((request, at))
        self._is_unverified[at] = True
        return self._region.memory.array, self._region.offsets(at)

    def has(self, blocks: NDArray[np.int64]) -> bool:
        """Tell whether blocks to verify were read into rows; other blocks are verified apart."""
        return bool(self._is_unverified[blocks].any())

    def verify(self, good: NDArray[np.int64]) -> None:
        """Note blocks with matching tags; some were read here."""
        read = good[self._is_unverified[good]]
        self._region.wipe_padding(read)
        self._is_unverified[read] = False

    def forget(self, at: NDArray[np.intp]) -> None:
        """Wipe blocks *at* positions, after failed reads: the agent delivers the blocks instead."""
        self._region.wipe_pages(at[self._is_unverified[at]])
        self._is_unverified[at] = False

    def end(self, when_read: Callable[[int, Callable[[], None]], None]) -> list[LateRead]:
        """Release the rows, at once or after the end of late reads, and return the late reads.

        *when_read* is the method of ``DirectReader``.
        """
        region, is_unverified = self._region, self._is_unverified
        late = []
        for request, at in self._requests:
            its = at[is_unverified[at]]
            if len(its):
                region.memory.withhold(region.numbers[its])
                late.append(LateRead(its.tolist()))
                when_read(request, partial(_release, region, its, late[-1]))
        region.release(np.flatnonzero(~is_unverified))
        return [read for read in late if not read.is_ended]


def _release(region: RegionBlocks, at: NDArray[np.intp], read: LateRead) -> None:
    """Wipe and release withheld rows, after the last byte."""
    region.wipe_pages(at)
    region.release(at)
    read.end()
