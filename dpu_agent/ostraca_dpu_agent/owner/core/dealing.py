"""Giving the segments of a ring to the pools that have them: when shares change, and when all are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_dpu_agent.owner.core.pools import Pool
from ostraca_dpu_agent.owner.core.segments import SegmentState
from ostraca_dpu_agent.owner.core.shares import COMMON

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostraca_dpu_agent.owner.core.ring import Ring
    from ostraca_dpu_agent.owner.core.segments import Segment
    from ostraca_dpu_agent.owner.core.shares import Part
    from ostraca_fabric.extent import Generation


def deal(ring: Ring, parts: Mapping[int, Part]) -> None:
    """Let each pool have its part, and every segment the pool that it belongs to then.

    Nothing is evicted by it. A pool that has no part any more lies in the common one: the segment that it
    wrote is sealed as it is, and that of the common pool too, where it is older.
    """
    earlier, known, data_bytes = list(ring.all_pools()), ring.pools, ring.geometry.data_bytes
    ring.common.part = parts[COMMON]
    ring.pools = {
        number: known.get(number) or Pool(number, part, data_bytes)
        for number, part in parts.items()
        if number != COMMON
    }
    ring.asking = {number: pool for number, pool in ring.asking.items() if number in ring.pools}
    for number, pool in ring.pools.items():
        pool.part = parts[number]
        if number not in known:
            pool.unlisted_up_to = ring.common.unlisted_up_to
    for pool in earlier:
        _redeal(ring, pool)
    recount(ring)


def _redeal(ring: Ring, pool: Pool) -> None:
    """Hand sealed segments of a pool to those that have them now."""
    if pool.has_share and pool.number not in ring.pools:
        pool.seal_current()
        ring.common.unlisted_up_to = max(ring.common.unlisted_up_to, pool.unlisted_up_to)
        ring.common.credit_bytes += pool.credit_bytes
    leaving: dict[int, list[tuple[Generation, Segment]]] = {}
    for turn, segment in pool.in_turn():
        taker = ring.pool_of(segment.pool)
        if taker is not pool:
            segment.is_looked_through = False  # among others its turn may be far
            leaving.setdefault(taker.number, []).append((turn, segment))
    if leaving:
        pool.split(segment for segment in pool.sealed if ring.pool_of(segment.pool) is pool)
        for number, segments in leaving.items():
            taker = ring.pool_of(number)
            if taker.current is not None and max(turn for turn, _ in segments) > taker.current.generation:
                taker.seal_current()  # it has its place before them, and not behind
            taker.join(segments)


def recount(ring: Ring) -> None:
    """Count anew what each pool has, after segments came that it did not take itself."""
    for pool in ring.all_pools():
        pool.segments = pool.draining = pool.entries = 0
    for segment in ring.segments:
        is_listing = segment.state is SegmentState.WITHHELD and segment.entries_used > 0
        if segment.state is SegmentState.SEALED or is_listing:
            ring.pool_of(segment.pool).enter(segment)
    for pool in ring.all_pools():
        if pool.current is not None:
            pool.enter(pool.current)
    for segment in ring.draining:
        ring.pool_of(segment.pool).draining += 1
    for pool in ring.pools.values():
        pool.bound_excess(is_new=True)
    ring.changed = dict(ring.pools)
