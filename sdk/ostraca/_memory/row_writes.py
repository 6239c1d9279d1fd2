"""Writes into the rows of a get by drives and agents, from begin to the release of the rows.

Such a write may land long after the get's end, and the caller has consented (``Client.register``). So rows of
blocks without a HIT stay claimed, and untouched here, as long as a write of their request may be under way.

A drive may have read bytes of another tenant. So rows of its other blocks are zeroed. Reads are whole pages,
and tags cover blocks alone: the rest of a good block's last page is zeroed too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostraca._memory.regions import RegionBlocks
from ostraca.results import LateWrite


class RowWrites:
    """Writes of one get. For the driver's thread, apart from the ends of late writes."""

    def __init__(self, region: RegionBlocks) -> None:
        """Begin without a write. Claim the rows before the first write."""
        self.region = region
        self._request_of = np.zeros(len(region.lengths), np.int64)
        """Request whose bytes may be in a block's row, now or later; 0 for none, and after a HIT."""

        self._is_read = np.zeros(len(region.lengths), np.bool_)
        """Blocks whose bytes come from a drive."""

    def begin(self, request: int, at: NDArray[np.intp]) -> None:
        """Note writes of an agent to the blocks *at* positions. Request ids are positive."""
        self._request_of[at] = request

    def begin_reads(self, request: int, at: NDArray[np.intp]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Note reads of the blocks *at* positions; return the memory, and the blocks' places there."""
        self.begin(request, at)
        self._is_read[at] = True
        return self.region.memory.array, self.region.offsets(at)

    def has(self, blocks: NDArray[np.int64]) -> bool:
        """Tell whether blocks to verify were written into rows; other blocks are verified apart."""
        return bool(self._request_of[blocks].any())

    def verify(self, good: NDArray[np.int64]) -> None:
        """Note blocks with matching tags."""
        self.region.wipe_padding(good[self._is_read[good]])
        self._clear(good)

    def settle(self, at: NDArray[np.intp]) -> None:
        """Note that no agent writes to the blocks *at* positions any more."""
        self._clear(at[~self._is_read[at]])

    def forget(self, at: NDArray[np.intp]) -> None:
        """Note that nothing writes to the blocks *at* positions any more; wipe bytes read from drives."""
        self.region.wipe_pages(at[self._is_read[at]])
        self._clear(at)

    def end(self, when_written: Callable[[int, Callable[[], None]], None]) -> list[LateWrite]:
        """Release the rows, at once or after the end of late writes, and return the late writes.

        *when_written* calls back once nothing writes for a request any more.
        """
        region, request_of = self.region, self._request_of
        late = []
        for request in sorted(set(request_of[request_of > 0].tolist())):
            its = np.flatnonzero(request_of == request)
            region.memory.withhold(region.numbers[its])
            late.append(LateWrite(its.tolist()))
            when_written(request, partial(_release, region, its, its[self._is_read[its]], late[-1]))
        region.release(np.flatnonzero(request_of == 0))
        return [write for write in late if not write.is_ended]

    def _clear(self, at: NDArray[np.intp] | NDArray[np.int64]) -> None:
        self._request_of[at], self._is_read[at] = 0, False


def _release(region: RegionBlocks, at: NDArray[np.intp], is_read: NDArray[np.intp], write: LateWrite) -> None:
    """Release withheld rows after the last byte, and wipe those with bytes of drives."""
    region.wipe_pages(is_read)
    region.release(at)
    write.end()
