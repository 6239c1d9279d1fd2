"""Taking in what a shard's summaries say, some segments at a time and in any order.

At every moment, of two entries of one key that were taken in, the one of the newer generation counts, and
within a segment the one listed last. Nothing is written or evicted before the end: an area not read yet may
belong to a segment that looks free, and may list a block that someone wants to put.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.flash.summary import ENTRY, offsets_of

if TYPE_CHECKING:
    from ostraca_dpu_agent.owner.core.shard import ShardCore
    from ostraca_fabric.flash.recovery import RecoveredAreas


_RAW = np.dtype((np.void, ENTRY.itemsize))


def recovered_share(core: ShardCore) -> float:
    """Return how much of the shard is known: 1 once ``begin`` was called, and below it before."""
    if not core.is_recovering:
        return 1.0
    return min(0.99, core.areas_taken_in / core.geometry.segments)


def take_in(core: ShardCore, areas: RecoveredAreas, earlier_pins_end_s: float) -> None:
    """List the blocks of some segments, none of which was taken in before."""
    core.ring.take_in(areas)
    # The newest first, and within a segment the last listed first: of two blocks of one key the index keeps
    # the first.
    newest_first = [segment for segment in reversed(areas.segments) if len(segment.entries)]
    if not newest_first:
        return
    raw = [segment.entries[::-1].view(_RAW) for segment in newest_first]  # joined without a look at fields
    listed = np.concatenate(raw).view(ENTRY)
    numbers = np.array([segment.number for segment in newest_first], np.intp)
    segments = np.repeat(numbers, [len(segment.entries) for segment in newest_first])
    rows = core.index.find(listed["key"])
    known = np.flatnonzero(rows >= 0)
    generations = core.ring.generations
    there = generations[core.ring.segment_of(core.index.offsets(rows[known]))]
    core.index.remove(np.unique(rows[known[there < generations[segments[known]]]]))
    core.index.insert(listed["key"], listed["tag"], offsets_of(listed), listed["length"], segment=segments)
    core.promises.make(numbers, earlier_pins_end_s)
