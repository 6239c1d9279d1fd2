"""What must be true of a shard's owner after every call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.holds import FREE, HELD
from ostraca_dpu_agent.owner.core.segments import Segment, SegmentState
from ostraca_fabric.extent import PAGE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_dpu_agent.owner.core.pools import Pool
    from ostraca_dpu_agent.owner.core.shard import ShardCore


def check(core: ShardCore) -> None:
    """Assert every invariant; looks at every block and reservation."""
    core.index.check()
    core.pins.check()
    core.reservations.check()
    if core.is_recovering:
        assert not len(core.reservations), "nothing is stored while recovering"
        return
    _check_ring(core)
    rows, of_rows = core.index.all_rows()
    is_listed = core.index.lengths(rows) > 0
    _check_segments(core, of_rows[is_listed])
    _check_extents(core, rows[is_listed], of_rows[is_listed])
    core.grants.check()
    table = core.reservations
    in_flight = table.keys[(table.states != FREE) & ~table.is_carried & ~table.is_adopted]
    assert not (core.index.find(in_flight) >= 0).any(), (
        "of what can be got, only copies are written, and what was adopted meanwhile"
    )
    assert len(core.reservations) <= core.index.room, "room in the index is kept for everything under way"


def _check_ring(core: ShardCore) -> None:
    ring = core.ring
    in_ring: list[tuple[Segment | None, SegmentState]] = [
        *((pool.current, SegmentState.OPEN) for pool in ring.all_pools()),
        *((segment, SegmentState.OPEN) for segment in ring.ready),
        (ring.opening, SegmentState.OPENING),
        *((segment, SegmentState.SEALED) for pool in ring.all_pools() for segment in pool.sealed),
        *((segment, SegmentState.DRAINING) for segment in ring.draining),
        *((segment, SegmentState.FREE) for segment in ring.free),
        *((segment, SegmentState.WITHHELD) for segment in ring.withheld),
    ]
    placed = [(segment.number, state) for segment, state in in_ring if segment is not None]
    states = [(segment.number, segment.state) for segment in ring.segments]
    assert sorted(placed, key=lambda pair: pair[0]) == states, (
        "each segment is in one place of the ring, by its state"
    )
    for pool in ring.all_pools():
        _check_pool(core, pool)
    assert ring.pools.keys() >= ring.asking.keys() | ring.changed.keys(), "only pools with a share ask"
    assert sum(pool.part.segments_max for pool in ring.all_pools()) < len(ring.segments), (
        "parts add up to less than the ring, of which some is kept free"
    )
    numbers = [segment.pool for segment in ring.segments]
    assert numbers == ring.pool_numbers.tolist(), "a segment's pool is what carrying goes by"
    generations = [segment.generation for segment in ring.segments]
    assert generations == ring.generations.tolist(), "a segment's generation is what readers are told"
    assert not any(segment.entries_used for segment in ring.ready), "a segment that waits is empty"


def _check_pool(core: ShardCore, pool: Pool) -> None:
    ring = core.ring
    ages = [
        segment.generation
        for segment in (*pool.sealed, pool.current, *ring.ready, ring.opening)
        if segment is not None and not segment.is_kept
    ]
    assert ages == sorted(set(ages)), "segments are sealed in the order of their generations"
    looked = [segment.is_looked_through for segment in pool.sealed]
    assert looked == sorted(looked, reverse=True), "segments are looked through in order"
    assert sum(looked) == pool.looked_through, "those looked through are counted"
    has = [*pool.sealed, *([pool.current] if pool.current is not None else [])]
    has += [segment for segment in ring.withheld if segment.entries_used and _is_of(core, segment, pool)]
    assert all(_is_of(core, segment, pool) for segment in has), "what a pool has is of that pool"
    assert pool.segments == len(has), "a pool's segments are counted"
    assert pool.entries == sum(segment.entries_used for segment in has), "and their entries"
    assert pool.draining == sum(_is_of(core, segment, pool) for segment in ring.draining), (
        "and those that it has emptied"
    )
    taken = pool.segments + pool.draining
    assert not pool.has_share or taken <= pool.part.segments_max + pool.excess, (
        "a pool takes no more than its share"
    )
    assert pool.asks == (not pool.has_share or pool.number in ring.asking), "who asks is known"


def _is_of(core: ShardCore, segment: Segment, pool: Pool) -> bool:
    return core.ring.pool_of(segment.pool) is pool


def _check_segments(core: ShardCore, of_blocks: NDArray[np.intp]) -> None:
    """Check what segments count, and what may be on them by their states. *of_blocks*: where each lies."""
    table, geometry, segments = core.reservations, core.geometry, core.ring.segments
    reserved = np.bincount(table.segments[table.states != FREE], minlength=len(segments)).tolist()
    held = np.bincount(table.segments[table.states == HELD], minlength=len(segments)).tolist()
    listed = np.bincount(of_blocks, minlength=len(segments)).tolist()
    pinned = core.pins.on_segment
    for number, segment in enumerate(segments):
        assert segment.held == held[number], "a segment counts its reservations"
        assert segment.bytes_used <= geometry.data_bytes, "no more bytes are handed out than there are"
        assert segment.entries_used <= geometry.entries_max, "nor more entries than can be listed"
        is_in_use = segment.state in (SegmentState.OPEN, SegmentState.SEALED)
        is_withheld = segment.state is SegmentState.WITHHELD
        assert is_in_use or is_withheld or not listed[number], "only segments in use are in the index"
        assert not is_withheld or not reserved[number], "nothing is written in what another epoch may write"
        is_idle = segment.state in (SegmentState.FREE, SegmentState.OPENING)
        assert not is_idle or not (reserved[number] or pinned[number]), "nobody holds what may be reused"
        assert is_in_use or not segment.queued, "blocks are listed in segments in use only"


def _check_extents(core: ShardCore, rows: NDArray[np.intp], of_rows: NDArray[np.intp]) -> None:
    """Check where blocks lie, of these rows of the index, and where those lie that are written."""
    table, geometry = core.reservations, core.geometry
    reserved = np.flatnonzero(table.states != FREE)
    starts = np.concatenate([core.index.offsets(rows), table.offsets[reserved]]).astype(np.int64)
    lengths = np.concatenate([core.index.lengths(rows), table.lengths[reserved]]).astype(np.int64)
    ends = starts + -(-lengths // PAGE_BYTES) * PAGE_BYTES
    order = np.argsort(starts)
    assert (starts[order][1:] >= ends[order][:-1]).all(), "no two extents overlap"
    used = np.array([segment.bytes_used for segment in core.ring.segments])
    of_extents = np.concatenate([of_rows, table.segments[reserved]])
    begins = geometry.data_offset(0) + of_extents * geometry.segment_bytes
    assert (starts >= begins).all(), "extents lie in the data areas of their segments"
    assert (ends <= begins + used[of_extents]).all(), "and in what was handed out of them"
