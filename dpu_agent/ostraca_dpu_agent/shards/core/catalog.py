"""Catalog of a shard's blocks: index, lifetimes, promises to lookups, and keys that left the index."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core.answers import ShardCounters
from ostraca_fabric.flash.index import MARKS, BlockIndex, Removed
from ostraca_fabric.model.extent import Geometry

NO_END_S = math.inf

_ROUNDED_BITS = 3
"""An end is rounded up by at most ``2**-_ROUNDED_BITS`` of the time to live."""

_STEP_S_MIN = 2.0**-10


def end_of(now_s: float, ttl_s: float) -> float:
    """Return the end of the lifetime of a block put now; NO_END_S without an end."""
    if not ttl_s < NO_END_S:
        return NO_END_S
    step_s = max(_STEP_S_MIN, 2.0 ** (math.frexp(ttl_s)[1] - 1 - _ROUNDED_BITS))
    return math.ceil((now_s + ttl_s) / step_s) * step_s


class Lifetimes:
    """Ends of the lifetimes of blocks whose writers gave a time to live.

    The end of a lifetime only excludes a block from reinsertion: the block is readable until its segment is
    evicted. The index has three bits per block, a *mark*: 0 for no end, else one of seven ends shared by the
    segment's blocks. Ends are rounded up by at most an eighth of the time to live, so that similar puts share
    an end. When all seven ends are taken, a block gets the next later end, or the latest end is extended. So
    blocks are kept longer than requested, never shorter.

    A segment takes 64 bytes, untouched without lifetimes. Lifetimes are not on flash: after a restart no
    block has an end.
    """

    def __init__(self, segments: int) -> None:
        self._ends_s = np.zeros((segments, MARKS))  # 0: none

    def marks(self, segment: int, ends_s: NDArray[np.float64]) -> NDArray[np.uint32]:
        """Return marks for ends, or for later ends, in a segment. *ends_s*: above 0."""
        marks = np.zeros(len(ends_s), np.uint32)
        has_end = ends_s < NO_END_S
        if has_end.any():
            for end_s in np.unique(ends_s[has_end]).tolist():
                marks[ends_s == end_s] = self._mark(segment, end_s)
        return marks

    def ends_s(self, segments: int | NDArray[np.intp], marks: NDArray[np.uint32]) -> NDArray[np.float64]:
        """Return the ends of blocks with *marks*. *segments*: a single one, or one for each."""
        ends_s = self._ends_s[segments, marks]
        return np.where(ends_s > 0, ends_s, NO_END_S)

    def forget(self, segment: int) -> None:
        """Forget the ends of a segment that left the index."""
        if self._ends_s[segment].any():
            self._ends_s[segment] = 0

    def _mark(self, segment: int, end_s: float) -> int:
        known = self._ends_s[segment, 1:]
        for fits in (known == end_s, known == 0):
            if fits.any():
                known[fits.argmax()] = end_s
                return 1 + int(fits.argmax())
        later = np.flatnonzero(known > end_s)
        chosen = later[known[later].argmin()] if len(later) else known.argmax()
        known[chosen] = max(float(known[chosen]), end_s)
        return 1 + int(chosen)


class Promises:
    """Promises to lookups, by segment: the blocks stay listed until a time.

    Once a segment is due for eviction, its promises end within the longest pin, so the eviction comes. After
    a fence no promise exceeds the time granted by the successor to earlier readers.
    """

    def __init__(self, segments: int) -> None:
        self._until_s = np.full(segments, -np.inf)
        self._latest_s = np.full(segments, np.inf)
        self._end_max_s = np.inf

    def may_promise(self, segments: NDArray[np.intp], end_s: float) -> NDArray[np.bool_]:
        """Return whether the blocks of each segment may be promised until *end_s*."""
        return (end_s <= self._end_max_s) & (end_s <= self._latest_s[segments])

    def make(self, segments: NDArray[np.intp], end_s: float) -> None:
        """Promise the blocks of *segments* until *end_s*."""
        self._until_s[segments] = np.maximum(self._until_s[segments], end_s)

    def inherit(self, segment: int, earlier: NDArray[np.intp]) -> None:
        """Extend a segment's promise to those of *earlier* segments, the former place of its blocks."""
        self._until_s[segment] = max(self._until_s[segment], float(self._until_s[earlier].max()))

    def bound(self, segment: int, now_s: float, *, latest_s: float) -> bool:
        """Return whether a segment due for eviction is promised; if so, end its promises by *latest_s*.

        The first call counts, until ``lift_bounds``.
        """
        if now_s >= self._until_s[segment]:
            return False
        self._latest_s[segment] = min(self._latest_s[segment], latest_s)
        return True

    def end_by(self, latest_s: float) -> None:
        """Make no promise beyond *latest_s* any more. The first call counts."""
        self._end_max_s = min(self._end_max_s, latest_s)

    def lift_bounds(self) -> None:
        """Remove the bounds of all segments: none is due for eviction any more."""
        self._latest_s[:] = np.inf


class BlockCatalog:
    """Blocks listed by a shard."""

    def __init__(self, geometry: Geometry, *, blocks_max: int, counters: ShardCounters) -> None:
        self._geometry = geometry
        self._counters = counters
        self.index = BlockIndex(
            blocks_max=min(blocks_max, geometry.segments * geometry.entries_max), segments=geometry.segments
        )
        self.lifetimes = Lifetimes(geometry.segments)
        self.promises = Promises(geometry.segments)
        self._evicted: list[NDArray[np.uint8]] = []

    def segments_of(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the segment of the block in each row of the index."""
        return self._geometry.segment_of(self.index.offsets(rows))

    def remove_segment(self, segment: int) -> Removed:
        """Remove all blocks of a segment. The caller reports them with ``note_evicted``."""
        self.lifetimes.forget(segment)
        return self.index.remove_segment(segment)

    def supersede(self, keys: NDArray[np.uint8], *, segment: int) -> None:
        """Remove older entries of *keys*; *segment*, with the new blocks, inherits the promises."""
        rows = self.index.find(keys)
        rows = rows[rows >= 0]
        if len(rows):
            self.promises.inherit(segment, self.segments_of(rows))
            self.index.remove(rows)

    def note_evicted(self, keys: NDArray[np.uint8]) -> None:
        """Report blocks that left the index. *keys*: shape (n, 16)."""
        self._evicted.append(keys)

    def leave_out(self, keys: NDArray[np.uint8]) -> None:
        """Report blocks found on flash without room in the index."""
        if len(keys):
            self.note_evicted(keys)
            self._counters.blocks_beyond_limit += len(keys)

    def take_evicted(self) -> list[NDArray[np.uint8]]:
        """Return the keys evicted since the last call, segment by segment."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def end_session(self, keys: NDArray[np.uint8]) -> None:
        """Forget reads of blocks after the end of a session: the reader will not come back.

        The blocks stay until the eviction of the segment. A later read makes a block hot again.
        """
        rows = self.index.find(keys)
        self.index.forget_reads(rows[rows >= 0])
