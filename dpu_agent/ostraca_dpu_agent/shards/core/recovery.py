"""Recovery of blocks from summaries, some segments at a time and in any order.

At every moment, the entry of a key in the newest generation counts, and within a segment the last entry.
Nothing is written or evicted before the end of recovery: an unread area may belong to a seemingly free
segment, and may list a block of a new put.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core.catalog import BlockCatalog
from ostraca_dpu_agent.shards.core.ring.pool_limits import COMMON
from ostraca_dpu_agent.shards.core.ring.pools import Pool
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_fabric.flash.index import Insertion
from ostraca_fabric.flash.recovery import RecoveredAreas, RecoveredSegment
from ostraca_fabric.flash.summary import ENTRY, offsets_of
from ostraca_fabric.model.ids import OwnerEpoch

_NONE_IS_NEWER = np.uint64(np.iinfo(np.uint64).max)

_RAW = np.dtype((np.void, ENTRY.itemsize))


class IndexRecovery:
    """Recovery of one shard's index."""

    def __init__(self, ring: Ring, catalog: BlockCatalog, *, earlier_pins_end_s: float) -> None:
        self._ring = ring
        self._catalog = catalog
        self._earlier_pins_end_s = earlier_pins_end_s
        self.highest_epoch = OwnerEpoch(0)
        """Highest owner epoch found on flash so far."""

        self.areas = 0
        """Number of summary areas taken in."""

    def take_in(self, areas: RecoveredAreas) -> None:
        """List the blocks of some segments, each taken in for the first time.

        If the index has no room for all, the newest segments of each pool stay, within its share of the
        index: summaries still list evicted blocks until the reuse of a segment. Once a segment has left the
        index, no older segment of the pool is listed, even into free room.
        """
        self.highest_epoch = max(self.highest_epoch, areas.highest_epoch)
        self.areas += areas.areas
        self._ring.take_in(areas)
        # The newest first, and within a segment the last listed first: of two blocks of one key the index
        # keeps the first.
        newest_first = [segment for segment in reversed(areas.segments) if len(segment.entries)]
        if not newest_first:
            return
        has_room = self._catalog.index.room >= sum(len(segment.entries) for segment in newest_first)
        if has_room and not any(pool.unlisted_up_to for pool in self._ring.pools):
            self._list(newest_first)
        else:
            for segment in newest_first:
                self._make_room(segment)
                if segment.generation > self._ring.pools.of(segment.pool).unlisted_up_to:
                    self._list([segment])
                else:
                    self._leave_out(segment.entries["key"])
        numbers = np.array([segment.number for segment in newest_first], np.intp)
        self._catalog.promises.make(numbers, self._earlier_pins_end_s)

    def _list(self, newest_first: list[RecoveredSegment]) -> None:
        index, generations = self._catalog.index, self._ring.generations
        raw = [
            segment.entries[::-1].view(_RAW) for segment in newest_first
        ]  # joined without a look at fields
        listed = np.concatenate(raw).view(ENTRY)
        numbers = np.array([segment.number for segment in newest_first], np.intp)
        segments = np.repeat(numbers, [len(segment.entries) for segment in newest_first])
        rows = index.find(listed["key"])
        known = np.flatnonzero(rows >= 0)
        present = generations[self._catalog.segments_of(rows[known])]
        index.remove(np.unique(rows[known[present < generations[segments[known]]]]))
        insertions = index.insert(
            listed["key"], listed["tag"], offsets_of(listed), listed["length"], segment=segments
        )
        self._leave_out(listed["key"][insertions == Insertion.FULL])

    def _leave_out(self, keys: NDArray[np.uint8]) -> None:
        self._catalog.leave_out(np.ascontiguousarray(keys))

    def _make_room(self, segment: RecoveredSegment) -> None:
        """Remove older segments from the index to make room for *segment*."""
        generations, newest = self._ring.generations, np.uint64(segment.generation)
        while self._catalog.index.room < len(segment.entries):
            pool, is_its = self._most_over(segment)
            is_listed = is_its & (self._catalog.index.rows_taken > 0)
            oldest = int(np.where(is_listed, generations, _NONE_IS_NEWER).argmin())
            if pool is self._ring.pools.of(segment.pool) and (
                not is_listed[oldest] or generations[oldest] >= newest
            ):
                break
            pool.unlisted_up_to = max(pool.unlisted_up_to, int(generations[oldest]))
            self._leave_out(self._catalog.remove_segment(oldest).keys)

    def _most_over(self, segment: RecoveredSegment) -> tuple[Pool, NDArray[np.bool_]]:
        """Return the pool farthest above its share of the index, and a mask of its segments.

        *segment*, about to be listed, counts as well.
        """
        pools, numbers, rows = self._ring.pools, self._ring.pool_numbers, self._catalog.index.rows_taken
        if not pools.by_number:
            return pools.common, np.ones(len(rows), np.bool_)
        has_share = np.isin(numbers, np.array(list(pools.by_number), np.uint64))
        numbers = np.where(has_share, numbers, np.uint64(COMMON))
        its_own = pools.of(segment.pool)

        def over(pool: Pool) -> int:
            listed = int(rows[numbers == pool.number].sum(dtype=np.int64))
            return listed + len(segment.entries) * (pool is its_own) - pool.limits.index_entries_max

        chosen = max(pools, key=over)
        return chosen, numbers == chosen.number
