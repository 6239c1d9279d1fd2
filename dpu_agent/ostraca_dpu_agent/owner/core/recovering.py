"""Taking in what a shard's summaries say, some segments at a time and in any order.

At every moment, of two entries of one key that were taken in, the one of the newer generation counts, and
within a segment the one listed last. Nothing is written or evicted before the end: an area not read yet may
belong to a segment that looks free, and may list a block that someone wants to put.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.shares import COMMON
from ostraca_fabric.flash.index import Insertion
from ostraca_fabric.flash.summary import ENTRY, offsets_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_dpu_agent.owner.core.pools import Pool
    from ostraca_dpu_agent.owner.core.shard import ShardCore
    from ostraca_fabric.flash.recovery import RecoveredAreas, RecoveredSegment


_GENERATIONS = 1 << 23
_PER_GENERATION_BITS, _PINS_PER_GENERATION_BITS = 17, 40
"""A generation of a segment has fewer reservations than this, and an owner gives fewer pins."""

_NONE_IS_NEWER = np.uint64(np.iinfo(np.uint64).max)

_RAW = np.dtype((np.void, ENTRY.itemsize))


def recovered_share(core: ShardCore) -> float:
    """Return how much of the shard is known: 1 once ``begin`` was called, and below it before."""
    if not core.is_recovering:
        return 1.0
    return min(0.99, core.areas_taken_in / core.geometry.segments)


def take_in(core: ShardCore, areas: RecoveredAreas, earlier_pins_end_s: float) -> None:
    """List the blocks of some segments, none of which was taken in before.

    Where the index has no room for all, the newest segments stay, of each pool as many as its share of the
    index lists: summaries still list what was evicted, until its segment is used again. Once a segment has
    left, no older one of its pool is listed, whatever room is left.
    """
    core.ring.take_in(areas)
    # The newest first, and within a segment the last listed first: of two blocks of one key the index keeps
    # the first.
    newest_first = [segment for segment in reversed(areas.segments) if len(segment.entries)]
    if not newest_first:
        return
    has_room = core.index.room >= sum(len(segment.entries) for segment in newest_first)
    if has_room and not any(pool.unlisted_up_to for pool in core.ring.all_pools()):
        _list(core, newest_first)
    else:
        for segment in newest_first:
            _make_room(core, segment)
            if segment.generation > core.ring.pool_of(segment.pool).unlisted_up_to:
                _list(core, [segment])
            else:
                leave_out(core, segment.entries["key"])
    core.promises.make(np.array([segment.number for segment in newest_first], np.intp), earlier_pins_end_s)


def number_above(core: ShardCore) -> None:
    """Give reservations and pins numbers that no owner before has given, under whatever epoch.

    So nobody who outlived an owner ends what the next one holds. The count of generations rises with every
    segment that is opened, over all owners.
    """
    generations = core.ring.generations_made % _GENERATIONS
    core.pins.number_from(generations << _PINS_PER_GENERATION_BITS)
    core.reservations.number_from(generations << _PER_GENERATION_BITS)


def _list(core: ShardCore, newest_first: list[RecoveredSegment]) -> None:
    raw = [segment.entries[::-1].view(_RAW) for segment in newest_first]  # joined without a look at fields
    listed = np.concatenate(raw).view(ENTRY)
    numbers = np.array([segment.number for segment in newest_first], np.intp)
    segments = np.repeat(numbers, [len(segment.entries) for segment in newest_first])
    rows = core.index.find(listed["key"])
    known = np.flatnonzero(rows >= 0)
    generations = core.ring.generations
    there = generations[core.ring.segment_of(core.index.offsets(rows[known]))]
    core.index.remove(np.unique(rows[known[there < generations[segments[known]]]]))
    taken = core.index.insert(
        listed["key"], listed["tag"], offsets_of(listed), listed["length"], segment=segments
    )
    leave_out(core, listed["key"][taken == Insertion.FULL])


def _make_room(core: ShardCore, segment: RecoveredSegment) -> None:
    """Let older segments leave the index for one that is about to be listed."""
    generations, newest = core.ring.generations, np.uint64(segment.generation)
    while core.index.room < len(segment.entries):
        pool, is_its = _most_over(core, segment)
        is_listed = is_its & (core.index.rows_taken > 0)
        oldest = int(np.where(is_listed, generations, _NONE_IS_NEWER).argmin())
        if pool is core.ring.pool_of(segment.pool) and (
            not is_listed[oldest] or generations[oldest] >= newest
        ):
            break
        pool.unlisted_up_to = max(pool.unlisted_up_to, int(generations[oldest]))
        leave_out(core, core.index.remove_segment(oldest).keys)


def _most_over(core: ShardCore, segment: RecoveredSegment) -> tuple[Pool, NDArray[np.bool_]]:
    """Return the pool that is farthest above its share of the index, with a segment that is about to be
    listed, and which segments are its.
    """
    ring, rows = core.ring, core.index.rows_taken
    if not ring.pools:
        return ring.common, np.ones(len(rows), np.bool_)
    has_share = np.isin(ring.pool_numbers, np.array(list(ring.pools), np.uint64))
    numbers = np.where(has_share, ring.pool_numbers, np.uint64(COMMON))
    its_own = ring.pool_of(segment.pool)

    def over(pool: Pool) -> int:
        listed = int(rows[numbers == pool.number].sum(dtype=np.int64))
        return listed + len(segment.entries) * (pool is its_own) - pool.part.entries_most

    chosen = max(ring.all_pools(), key=over)
    return chosen, numbers == chosen.number


def leave_out(core: ShardCore, keys: NDArray[np.uint8]) -> None:
    """Count blocks that the index has no room for, and say that they are gone."""
    if len(keys):
        core.eviction.note_evicted(np.ascontiguousarray(keys))
        core.counted["blocks_beyond_limit"] += len(keys)
