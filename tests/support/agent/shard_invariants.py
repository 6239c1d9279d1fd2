"""Invariants of a shard's state after every call of its core: each check visits all blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tests.support.invariants import check_index

from ostraca_dpu_agent.shards.core import SegmentState, ShardCore
from ostraca_dpu_agent.shards.core.grants import Grants
from ostraca_dpu_agent.shards.core.reservations import FREE, HELD, ReservationTable
from ostraca_dpu_agent.shards.core.ring.pools import Pool, Segment
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_dpu_agent.shards.core.shard_core import Pins
from ostraca_fabric.flash.index import BlockIndex
from ostraca_fabric.model.extent import PAGE_BYTES


def check_core(core: ShardCore) -> None:
    """Assert every invariant of a shard."""
    check_index(core.index)
    _check_pins(core.pins)
    _check_reservations(core.reservations)
    if not core.is_recovering:
        _check_ring(core.ring)
        _check_grants(core.grants, core.ring)
    _check_blocks(
        core.ring, core.index, core.reservations, core.pins.on_segment, is_begun=not core.is_recovering
    )


def _check_pins(pins: Pins) -> None:
    counted = np.zeros_like(pins.on_segment)
    for segments in pins._pins.values():
        counted[segments] += 1
    assert (counted == pins.on_segment).all(), "each segment counts its pins"


def _check_reservations(table: ReservationTable) -> None:
    live = np.flatnonzero(table.states != FREE)
    assert len(live) == len(table), "free slots are counted"
    assert table._held == int((table.states == HELD).sum()), "held reservations are counted"
    is_free = np.zeros(len(table.states), np.bool_)
    is_free[table._returned[: table._returned_count]] = True
    assert is_free.sum() == table._returned_count, "no slot is returned twice"
    is_free[table._first_fresh :] = True
    assert is_free.sum() == table.room, "free slots were returned, or never used"
    assert not is_free[live].any(), "no slot in use is free"
    assert table.in_flight.count == len(live), "keys in flight are counted"
    assert (table.in_flight.find(table.keys[live]) == live).all(), "each key in flight has its slot"


def _check_grants(grants: Grants, ring: Ring) -> None:
    """Assert that no open segment is outside the grant or withheld."""
    for segment in (ring.opening, *ring.ready, *(pool.current for pool in ring.pools)):
        if segment is not None:
            assert segment.number in grants.segments, "what is open is granted"
            assert grants._requested is None or segment.number in grants._requested, "and stays so"
    withheld = {segment.number for segment in ring.withheld}
    assert withheld == grants.withheld, "what is withheld is in its place"
    assert not (withheld - grants._resumed) & grants.segments, "a grant holds nothing of an unretired one"


def _check_ring(ring: Ring) -> None:
    """Assert that each segment has one place, and that pools count theirs."""
    pools = ring.pools
    in_ring: list[tuple[Segment | None, SegmentState]] = [
        *((pool.current, SegmentState.OPEN) for pool in pools),
        *((segment, SegmentState.OPEN) for segment in ring.ready),
        (ring.opening, SegmentState.OPENING),
        *((segment, SegmentState.SEALED) for pool in pools for segment in pool.sealed),
        *((segment, SegmentState.DRAINING) for segment in ring.draining),
        *((segment, SegmentState.FREE) for segment in ring.free),
        *((segment, SegmentState.WITHHELD) for segment in ring.withheld),
    ]
    placed = [(segment.number, state) for segment, state in in_ring if segment is not None]
    states = [(segment.number, segment.state) for segment in ring.segments]
    assert sorted(placed, key=lambda pair: pair[0]) == states, (
        "each segment is in one place of the ring, by its state"
    )
    for pool in pools:
        _check_pool(ring, pool)
    assert pools.by_number.keys() >= pools.in_demand.keys() | pools.changed.keys(), (
        "only pools with a share are in demand"
    )
    assert sum(pool.limits.segments_max for pool in pools) < len(ring.segments), (
        "limits add up to less than the ring, of which some is kept free"
    )
    numbers = [segment.pool for segment in ring.segments]
    assert numbers == ring.pool_numbers.tolist(), "reinsertion uses a segment's pool"
    generations = [segment.generation for segment in ring.segments]
    assert generations == ring.generations.tolist(), "readers are told a segment's generation"
    assert not any(segment.entries_used for segment in ring.ready), "a ready segment is empty"


def _check_pool(ring: Ring, pool: Pool) -> None:
    ages = [
        segment.generation
        for segment in (*pool.sealed, pool.current, *ring.ready, ring.opening)
        if segment is not None and not segment.is_kept
    ]
    assert ages == sorted(set(ages)), "segments are sealed in the order of their generations"
    examined = [segment.is_examined for segment in pool.sealed]
    assert examined == sorted(examined, reverse=True), "segments are examined in order"
    assert sum(examined) == pool.examined, "examined segments are counted"
    own = [*pool.sealed, *([pool.current] if pool.current is not None else [])]
    own += [each for each in ring.withheld if each.entries_used and ring.pools.of(each.pool) is pool]
    assert all(ring.pools.of(segment.pool) is pool for segment in own), "a pool's segments are its own"
    assert pool.segments == len(own), "a pool's segments are counted"
    assert pool.entries == sum(segment.entries_used for segment in own), "and their entries"
    assert pool.draining == sum(ring.pools.of(segment.pool) is pool for segment in ring.draining), (
        "and its draining segments"
    )
    taken = pool.segments + pool.draining
    assert not pool.has_share or taken <= pool.limits.segments_max + pool.excess, (
        "a pool takes no more than its share"
    )
    has_demand = not pool.has_share or pool.number in ring.pools.in_demand
    assert pool.has_demand == has_demand, "pools in demand are known"


def _check_blocks(
    ring: Ring, index: BlockIndex, table: ReservationTable, pins: NDArray[np.int64], *, is_begun: bool
) -> None:
    """Assert that blocks, reservations and pins agree with their segments. *pins*: by segment."""
    if not is_begun:
        assert not len(table), "nothing is stored while recovering"
        return
    rows, segments = index.all_rows()
    is_listed = index.lengths(rows) > 0
    _check_segments(ring, table, pins, segments[is_listed])
    _check_extents(ring, index, table, rows[is_listed], segments[is_listed])
    in_flight = table.keys[(table.states != FREE) & ~table.is_reinsertion & ~table.is_adopted]
    assert not (index.find(in_flight) >= 0).any(), "of listed blocks only copies and adopted ones are written"
    assert len(table) <= index.room, "room in the index is kept for everything under way"


def _check_segments(
    ring: Ring, table: ReservationTable, pins: NDArray[np.int64], of_blocks: NDArray[np.intp]
) -> None:
    """Check counts and permissions by state. *of_blocks*: the segment of each block."""
    count = len(ring.segments)
    reserved = np.bincount(table.segments[table.states != FREE], minlength=count).tolist()
    held = np.bincount(table.segments[table.states == HELD], minlength=count).tolist()
    listed = np.bincount(of_blocks, minlength=count).tolist()
    for number, segment in enumerate(ring.segments):
        assert segment.held == held[number], "a segment counts its reservations"
        assert segment.bytes_used <= ring.geometry.data_bytes, "no more bytes are allocated than there are"
        assert segment.entries_used <= ring.geometry.entries_max, "nor more entries than can be listed"
        is_in_use = segment.state in (SegmentState.OPEN, SegmentState.SEALED)
        is_withheld = segment.state is SegmentState.WITHHELD
        assert is_in_use or is_withheld or not listed[number], "only segments in use are in the index"
        assert not is_withheld or not reserved[number], "a withheld segment has no reservations"
        is_idle = segment.state in (SegmentState.FREE, SegmentState.OPENING)
        assert not is_idle or not (reserved[number] or pins[number]), "a reusable segment has no holder"
        assert is_in_use or not segment.queued, "blocks are listed in segments in use only"


def _check_extents(
    ring: Ring,
    index: BlockIndex,
    table: ReservationTable,
    rows: NDArray[np.intp],
    of_rows: NDArray[np.intp],
) -> None:
    """Check the extents of listed and reserved blocks."""
    geometry = ring.geometry
    reserved = np.flatnonzero(table.states != FREE)
    starts = np.concatenate([index.offsets(rows), table.offsets[reserved]]).astype(np.int64)
    lengths = np.concatenate([index.lengths(rows), table.lengths[reserved]]).astype(np.int64)
    ends = starts + -(-lengths // PAGE_BYTES) * PAGE_BYTES
    order = np.argsort(starts)
    assert (starts[order][1:] >= ends[order][:-1]).all(), "no two extents overlap"
    used = np.array([segment.bytes_used for segment in ring.segments])
    of_extents = np.concatenate([of_rows, table.segments[reserved]])
    begins = geometry.data_offset(0) + of_extents * geometry.segment_bytes
    assert (starts >= begins).all(), "extents lie in the data areas of their segments"
    assert (ends <= begins + used[of_extents]).all(), "and in the allocated part"
