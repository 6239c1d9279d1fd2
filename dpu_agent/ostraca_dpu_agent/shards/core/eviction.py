"""Eviction of segments, and reinsertion of hot blocks.

Whole segments are evicted, in the order of sealing. Each is examined once, some time before the eviction.
Blocks read after the first part of the round through the ring are *hot*. A read bit per block is cleared at
the end of the first part, and not copied with the block. So recent reads count, and reads soon after a write
do not.

A segment of mostly hot blocks stays in place for another round. This writes nothing, but the segment's cold
blocks take up flash for a round. Otherwise the hot blocks are copied to the write position. Copies make room,
but wear the flash: they are limited to a share of committed bytes, saved up to a few segments' worth, and to
the drive's write budget. If these do not pay for all hot blocks, fewer hot blocks let a segment stay.

Reinsertion never delays writers: when they need the space, the first segment is evicted with the blocks not
copied yet. A segment with writers at work is skipped, and a younger one is evicted: the writers would fail,
and no room would come before they end. Blocks past the lifetime, or not read since the end of the session,
are never kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core.answers import ShardCounters
from ostraca_dpu_agent.shards.core.catalog import BlockCatalog
from ostraca_dpu_agent.shards.core.grants import Grants
from ostraca_dpu_agent.shards.core.reservations import ReservationTable
from ostraca_dpu_agent.shards.core.ring.pools import Pool, Segment
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_dpu_agent.shards.core.write_budget import ShardWriteBudget
from ostraca_fabric.model.extent import Generation, whole_pages

_KEPT_AT = 0.75
"""Share of hot blocks for a segment to stay: copies would make little room."""

_KEPT_UNPAID_AT = 0.1
"""The same share if the hot blocks exceed the bytes that may be copied now."""

_EXAMINED_AT_ONCE = 8
"""Segments examined in one call: each takes about ten microseconds."""

_CREDIT_SEGMENTS = 16
"""Limit of saved credit for copies, in segments; also ``1 / _CREDIT_SEGMENTS`` of the shard."""


class Eviction:
    """Evicts segments of one shard ahead of need."""

    def __init__(
        self,
        ring: Ring,
        catalog: BlockCatalog,
        grants: Grants,
        pins: NDArray[np.int64],
        reservations: ReservationTable,
        counters: ShardCounters,
        *,
        pin_max_s: float,
    ) -> None:
        self._ring = ring
        self._catalog = catalog
        self._grants = grants
        self._pins = pins
        self._reservations = reservations
        self._counters = counters
        self._pin_max_s = pin_max_s
        self.is_for_index = False
        """Whether the last eviction was for room in the index, with room on flash."""

    def advance(self, now_s: float) -> None:
        """Evict segments until enough are free, or no more can be evicted."""
        pools = self._ring.pools
        for pool in list(pools.in_demand.values()):
            self._make_all_room(now_s, pool)
            if not (pool.lacks_room or pool.needs_next):
                pools.satisfy(pool)
        while (victims := self._victims()) is not None:
            if not any(self._evict(now_s, pool) for pool in victims):
                return
        if not any(pool.lacks_room for pool in pools.in_demand.values()):
            self._catalog.promises.lift_bounds()

    def request(self, now_s: float, pool: Pool) -> None:
        """Make room for new blocks of a pool, out of its own segments if necessary."""
        if pool.has_share:
            self._ring.pools.request(pool)
            self._make_all_room(now_s, pool)

    def _make_all_room(self, now_s: float, pool: Pool) -> None:
        while self.make_room(now_s, pool):
            pass

    def make_room(self, now_s: float, pool: Pool) -> bool:
        """Evict the oldest segment of a pool that needs more at its limit; return success.

        A segment with writers at work stays: in a small pool the writers have only just begun.
        """
        if not pool.lacks_room or (pool.sealed and pool.sealed[0].held):
            return False
        return self._evict(now_s, pool, for_itself=True)

    def _victims(self) -> list[Pool] | None:
        """Return the pools to evict a segment from, in order of preference, or None."""
        ring = self._ring
        if ring.lacks_free:
            return ring.pools.most_over(by_entries=False)
        if self._catalog.index.room - len(self._reservations) >= ring.headroom:
            return None
        # The eviction of a segment with writers at work would make room, and fail the writers.
        over = ring.pools.most_over(by_entries=True)
        return [pool for pool in over if pool.sealed and not pool.sealed[0].held] or None

    def _evict(self, now_s: float, pool: Pool, *, for_itself: bool = False) -> bool:
        """Evict the oldest evictable segment of a pool; return success."""
        granted = self._grants.oldest_sealed(pool, for_itself=for_itself)
        evictable = (each for each in granted if not each.held and not self._is_promised(each, now_s))
        is_for_index = not (pool.lacks_segments if for_itself else self._ring.lacks_free)
        segment = self._ring.begin_draining(pool, evictable)
        if segment is None:
            return False
        self.is_for_index = is_for_index
        removed = self._catalog.remove_segment(segment.number)
        self._catalog.note_evicted(removed.keys)
        self._counters.segments_evicted += 1
        self._counters.blocks_evicted += removed.blocks
        self._counters.blocks_evicted_unread += removed.unread
        self._ring.end_draining(now_s, self._pins)
        return True

    def _is_promised(self, segment: Segment, now_s: float) -> bool:
        return self._catalog.promises.bound(segment.number, now_s, latest_s=now_s + self._pin_max_s)


@dataclass(frozen=True, slots=True, eq=False)
class ReinsertionBatch:
    """Blocks to copy out of a segment before its eviction, in the order on flash."""

    segment: int
    generation: Generation
    keys: NDArray[np.uint8]
    """Shape (n, 16)."""

    tags: NDArray[np.uint8]
    """Shape (n, 16)."""

    offsets: NDArray[np.uint64]
    """In the shard, in bytes."""

    lengths: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.lengths)


class Reinsertion:
    """Examines segments ahead of their eviction: keeps some in place, and chooses blocks to copy."""

    def __init__(
        self,
        share: float,
        ring: Ring,
        catalog: BlockCatalog,
        grants: Grants,
        budget: ShardWriteBudget,
        counters: ShardCounters,
    ) -> None:
        """Copy at most *share* bytes for each byte committed."""
        self._share = share
        self._ring = ring
        self._catalog = catalog
        self._grants = grants
        self._budget = budget
        self._counters = counters
        self._no_stay_up_to = 0
        self._due: ReinsertionBatch | None = None
        self._active: ReinsertionBatch | None = None

    @property
    def is_due(self) -> bool:
        """Whether ``take`` would return a batch."""
        return self._due is not None

    @property
    def is_active(self) -> bool:
        """Whether a batch was taken and has not ended."""
        return self._active is not None

    def take(self) -> ReinsertionBatch | None:
        """Take the batch to copy now. The caller ends it with ``ShardCore.end_reinsertion``."""
        if self._due is None:
            return None
        self._due, self._active = None, self._due
        return self._active

    def end(self) -> None:
        """End the batch taken: look for another."""
        self._active = None

    def is_current(self, batch: ReinsertionBatch) -> bool:
        """Return whether a batch's segment is still there. If not, the rest of the batch is void."""
        return self._ring.is_sealed(batch.segment, batch.generation)

    def earn(self, stored_bytes: int, pool: Pool) -> None:
        """Count bytes committed for callers: a share may be copied, from blocks of the same pool."""
        geometry = self._ring.geometry
        segments = max(1, min(_CREDIT_SEGMENTS, geometry.segments // _CREDIT_SEGMENTS))
        earned = pool.credit_bytes + self._share * stored_bytes
        pool.credit_bytes = min(earned, float(segments * geometry.data_bytes))

    def end_stays(self, up_to: int) -> None:
        """Let no segment up to this generation stay for another round; only copy its hot blocks.

        Some blocks of such a segment are placed elsewhere from now on, and must not stay with the others.
        """
        self._no_stay_up_to = up_to

    def advance(self, now_s: float) -> None:
        """Examine the next segments in line for eviction."""
        pools = self._ring.pools
        self._examine(now_s, pools.common)
        for pool in list(pools.changed.values()):
            if self._examine(now_s, pool):
                del pools.changed[pool.number]

    def _examine(self, now_s: float, pool: Pool) -> bool:
        """Examine a pool's next segments; return whether none is left for now."""
        index = self._catalog.index
        for _ in range(_EXAMINED_AT_ONCE):
            while (aged := pool.next_to_age()) is not None:
                aged.is_aged = True
                index.forget_reads(index.rows_of(aged.number))
            if self._due is not None or self._active is not None:
                return False
            segment = pool.take_for_examination(len(self._ring.free))
            if segment is None:
                return True
            self._due = self._keep_or_copy(now_s, segment, pool)
        return False

    def _keep_or_copy(self, now_s: float, segment: Segment, pool: Pool) -> ReinsertionBatch | None:
        """Let a segment stay for another round, or choose the blocks to copy within the limits."""
        index = self._catalog.index
        rows = index.read_rows_of(segment.number)
        rows = rows[self._catalog.lifetimes.ends_s(segment.number, index.marks(rows)) > now_s]
        rows = rows[np.argsort(index.offsets(rows))]
        ends_bytes = np.cumsum(whole_pages(index.lengths(rows)), dtype=np.int64)
        is_paid = ends_bytes <= min(pool.credit_bytes, self._budget.level_of(pool.number))
        # The share of the room that an eviction makes: bytes, or entries where blocks are small.
        hot_bytes = int(ends_bytes[-1]) if len(rows) else 0
        share = max(hot_bytes / self._ring.geometry.data_bytes, len(rows) / pool.limits.entries_max)
        if share >= (_KEPT_AT if is_paid.all() else _KEPT_UNPAID_AT) and self._may_stay(segment):
            pool.keep(segment)
            index.forget_reads(rows)
            self._counters.segments_kept += 1
            return None
        count = int(np.count_nonzero(is_paid))
        if not count:
            return None
        rows = rows[:count]  # ends rise, so the first blocks are paid for
        pool.credit_bytes -= int(ends_bytes[count - 1])
        lengths, keys, tags = index.lengths(rows), index.keys(rows), index.tags(rows)
        return ReinsertionBatch(segment.number, segment.generation, keys, tags, index.offsets(rows), lengths)

    def _may_stay(self, segment: Segment) -> bool:
        return segment.generation > self._no_stay_up_to and self._grants.may_spare(segment.number)
