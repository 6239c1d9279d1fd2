"""Adoption of blocks listed late by an earlier owner epoch, under an unretired grant.

The earlier owner may not know yet about the end of its claim, and late writes may still land. So the
summaries of withheld segments are read repeatedly, and once more when no write can land any more:

- after a newer generation than known, its blocks leave the index: the space was reused;
- entries not seen before are listed, unless the index lists the key in an equal or newer place. Generations
  of a later epoch are newer, so an own entry always wins, even one still on its way to a summary.

Each entry counts once, by its extent: a dropped block, or a block without room, does not come back.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core.answers import ShardCounters
from ostraca_dpu_agent.shards.core.catalog import BlockCatalog
from ostraca_dpu_agent.shards.core.grants import Grants
from ostraca_dpu_agent.shards.core.pins import ReservationTable
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_fabric.flash.recovery import RecoveredAreas, RecoveredSegment
from ostraca_fabric.flash.summary import Entries, offsets_of
from ostraca_fabric.tables.key_table import first_of_each


class Adoption:
    """Adoption from the withheld segments of one shard."""

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
