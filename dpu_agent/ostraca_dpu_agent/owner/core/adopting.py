"""Adopting what an earlier owner epoch still lists in segments under its unretired grant.

It may not know yet that its claim has ended, and writes of its own may still land. So the summaries of its
segments are read again and again, and a last time when no write can land any more. Of a segment:

- in a newer generation than is known, its blocks leave the index: the space was used again;
- entries not seen before are listed, unless the index lists the key in an equal or newer place. Generations
  of a later epoch are newer, so an own entry always wins, also one that is still on its way to a summary.

Each entry counts once, by its extent: what was dropped, or found no room, does not come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.recovering import leave_out
from ostraca_fabric.flash.summary import offsets_of
from ostraca_fabric.key_table import first_of_each

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ostraca_dpu_agent.owner.core.shard import ShardCore
    from ostraca_fabric.flash.recovery import RecoveredAreas, RecoveredSegment
    from ostraca_fabric.flash.summary import Entries


class Adoption:
    """What was seen so far of segments that are withheld: the places of their entries."""

    def __init__(self, core: ShardCore) -> None:
        """Have seen nothing."""
        self._core = core
        self._seen: dict[int, NDArray[np.uint64]] = {}

    def begin(self) -> None:
        """Take what the index lists in withheld segments for seen."""
        index = self._core.index
        for number in self._core.grants.withheld:
            self._seen[number] = index.offsets(index.rows_of(number))

    def adopt(self, areas: RecoveredAreas) -> int:
        """List what is new in withheld segments, and drop what was used again; return how many are new."""
        core, new, gone = self._core, 0, []
        if areas.highest_epoch > core.epoch:
            core.grants.fence()
        for found in areas.segments:
            known = core.ring.segments[found.number].generation
            if not core.grants.is_withheld[found.number] or found.generation < known:
                continue
            if found.generation > known:
                gone.append(core.index.remove_segment(found.number).keys)
                core.lifetimes.forget(found.number)
                self._seen.pop(found.number, None)
            core.ring.renew(found)
            new += self._list(found)
        core.ring.unreadable.difference_update(found.number for found in areas.segments)
        core.ring.unreadable.update(areas.unreadable)
        for keys in gone:
            lost = np.ascontiguousarray(keys[core.index.find(keys) < 0])
            if len(lost):
                core.eviction.note_evicted(lost)
                core.counted["blocks_evicted"] += len(lost)
        core.counted["blocks_adopted"] += new
        return new

    def retire(self, segments: Iterable[int]) -> None:
        """Withhold segments no more: they stand among the others then, by their generations."""
        core = self._core
        numbers = [number for number in segments if core.grants.is_withheld[number]]
        core.grants.retire(numbers)
        core.ring.retire({number: bool(core.index.rows_taken[number]) for number in numbers})
        for number in numbers:
            self._seen.pop(number, None)

    def _list(self, found: RecoveredSegment) -> int:
        core, index = self._core, self._core.index
        entries = self._unseen(found)
        if not len(entries):
            return 0
        entries = entries[~outranked(core, found, entries)]
        room = max(0, index.room - len(core.reservations))
        if found.generation <= core.ring.pool_of(found.pool).unlisted_up_to:
            room = 0
        left, entries = entries[room:], entries[:room]
        keys = np.ascontiguousarray(entries["key"])
        rows = index.find(keys)
        rows = rows[rows >= 0]
        if len(rows):
            core.promises.inherit(found.number, core.ring.segment_of(index.offsets(rows)))
            index.remove(rows)
        tags, lengths = np.ascontiguousarray(entries["tag"]), entries["length"].astype(np.uint32)
        index.insert(keys, tags, offsets_of(entries), lengths, segment=found.number)
        writing = core.reservations.in_flight.find(keys)
        core.reservations.is_adopted[writing[writing >= 0]] = True
        left_keys = np.ascontiguousarray(left["key"])
        leave_out(core, left_keys[index.find(left_keys) < 0])
        return len(entries)

    def _unseen(self, found: RecoveredSegment) -> Entries:
        """Return the entries that are new, of each key the one listed last, and take all for seen."""
        offsets, nothing = offsets_of(found.entries), np.zeros(0, np.uint64)
        seen = self._seen.get(found.number, nothing)
        self._seen[found.number] = np.union1d(seen, offsets)
        is_new = ~np.isin(offsets, seen)
        # Space is handed out in rising order, so the last that was put lies highest.
        new = found.entries[is_new][np.argsort(offsets[is_new])[::-1]]
        return new[first_of_each(np.ascontiguousarray(new["key"]))]


def outranked(core: ShardCore, found: RecoveredSegment, entries: Entries) -> NDArray[np.bool_]:
    """Say of which of these entries the index lists the key in a newer place: of a newer generation, or
    higher in the same.
    """
    rows = core.index.find(np.ascontiguousarray(entries["key"]))
    known = np.flatnonzero(rows >= 0)
    there = core.index.offsets(rows[known])
    generations = core.ring.generations[core.ring.segment_of(there)]
    is_same = generations == np.uint64(found.generation)
    loses = np.zeros(len(entries), np.bool_)
    loses[known] = generations > np.uint64(found.generation)
    loses[known] |= is_same & (there > offsets_of(entries)[known])
    return loses
