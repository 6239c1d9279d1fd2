"""Recovery of blocks from summaries, and adoption of blocks listed late.

Recovery takes some segments at a time, in any order.

At every moment, the entry of a key in the newest generation counts, and within a segment the last entry.
Nothing is written or evicted before the end of recovery: an unread area may belong to a seemingly free
segment, and may list a block of a new put.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core.answers import ShardCounters
from ostraca_dpu_agent.shards.core.catalog import BlockCatalog
from ostraca_dpu_agent.shards.core.grants import Grants
from ostraca_dpu_agent.shards.core.reservations import ReservationTable
from ostraca_dpu_agent.shards.core.ring.pool_limits import COMMON
from ostraca_dpu_agent.shards.core.ring.pools import Pool
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_fabric.flash.index import Insertion
from ostraca_fabric.flash.recovery import RecoveredAreas, RecoveredSegment
from ostraca_fabric.flash.summary import ENTRY, Entries, offsets_of
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.tables.key_table import first_of_each

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


class Adoption:
    """Adoption from the withheld segments of one shard.

    The earlier owner may not know yet about the end of its claim, and late writes may still land. So the
    summaries of withheld segments are read repeatedly, and once more when no write can land any more:

    - after a newer generation than known, its blocks leave the index: the space was reused;
    - entries not seen before are listed, unless the index lists the key in an equal or newer place.
      Generations of a later epoch are newer, so an own entry always wins, even one still on its way to a
      summary.

    Each entry counts once, by its extent: a dropped block, or a block without room, does not come back.
    """

    def __init__(
        self,
        ring: Ring,
        catalog: BlockCatalog,
        grants: Grants,
        reservations: ReservationTable,
        counters: ShardCounters,
    ) -> None:
        self._ring = ring
        self._catalog = catalog
        self._grants = grants
        self._reservations = reservations
        self._counters = counters
        self._seen: dict[int, NDArray[np.uint64]] = {}
        """Offsets of the entries seen so far, by segment."""

    def begin(self) -> None:
        """Mark the blocks listed in withheld segments as seen."""
        index = self._catalog.index
        for number in self._grants.withheld:
            self._seen[number] = index.offsets(index.rows_of(number))

    def adopt(self, areas: RecoveredAreas) -> int:
        """List new blocks of withheld segments; return their number. Drop blocks of reused segments.

        A higher epoch on flash is a final fence.
        """
        index, new, removed = self._catalog.index, 0, []
        if areas.highest_epoch > self._grants.epoch:
            self._grants.fence()
        for found in areas.segments:
            known = self._ring.segments[found.number].generation
            if not self._grants.is_withheld[found.number] or found.generation < known:
                continue
            if found.generation > known:
                removed.append(self._catalog.remove_segment(found.number).keys)
                self._seen.pop(found.number, None)
            self._ring.renew(found)
            new += self._list(found)
        self._ring.note_unreadable(areas)
        for keys in removed:
            lost = np.ascontiguousarray(keys[index.find(keys) < 0])
            if len(lost):
                self._catalog.note_evicted(lost)
                self._counters.blocks_evicted += len(lost)
        self._counters.blocks_adopted += new
        return new

    def retire(self, segments: Iterable[int]) -> None:
        """End the withholding of segments, and sort them by generation among the others."""
        numbers = [number for number in segments if self._grants.is_withheld[number]]
        self._grants.retire(numbers)
        self._ring.retire({number: bool(self._catalog.index.rows_taken[number]) for number in numbers})
        for number in numbers:
            self._seen.pop(number, None)

    def _list(self, found: RecoveredSegment) -> int:
        index = self._catalog.index
        entries = self._unseen(found)
        if not len(entries):
            return 0
        entries = entries[~self._are_outranked(found, entries)]
        room = max(0, index.room - len(self._reservations))
        if found.generation <= self._ring.pools.of(found.pool).unlisted_up_to:
            room = 0
        left, entries = entries[room:], entries[:room]
        keys = np.ascontiguousarray(entries["key"])
        self._catalog.supersede(keys, segment=found.number)
        tags, lengths = np.ascontiguousarray(entries["tag"]), entries["length"].astype(np.uint32)
        index.insert(keys, tags, offsets_of(entries), lengths, segment=found.number)
        self._reservations.mark_adopted(keys)
        left_keys = np.ascontiguousarray(left["key"])
        self._catalog.leave_out(left_keys[index.find(left_keys) < 0])
        return len(entries)

    def _unseen(self, found: RecoveredSegment) -> Entries:
        """Return the new entries, the last listed of each key, and mark all as seen."""
        offsets, nothing = offsets_of(found.entries), np.zeros(0, np.uint64)
        seen = self._seen.get(found.number, nothing)
        self._seen[found.number] = np.union1d(seen, offsets)
        is_new = ~np.isin(offsets, seen)
        # Space is allocated in rising order, so the last put lies highest.
        new = found.entries[is_new][np.argsort(offsets[is_new])[::-1]]
        return new[first_of_each(np.ascontiguousarray(new["key"]))]

    def _are_outranked(self, found: RecoveredSegment, entries: Entries) -> NDArray[np.bool_]:
        """Return whether the index lists each entry's key in a newer place.

        A newer place is in a newer generation, or higher in the same one.
        """
        rows = self._catalog.index.find(np.ascontiguousarray(entries["key"]))
        known = np.flatnonzero(rows >= 0)
        listed = self._catalog.index.offsets(rows[known])
        generations = self._ring.generations[self._catalog.segments_of(rows[known])]
        is_same = generations == np.uint64(found.generation)
        outranked = np.zeros(len(entries), np.bool_)
        outranked[known] = generations > np.uint64(found.generation)
        outranked[known] |= is_same & (listed > offsets_of(entries)[known])
        return outranked
