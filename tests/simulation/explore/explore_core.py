"""An owner's core from outside: what it lists, what tells its states apart, and where a copy's memory is."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from ostraca_dpu_agent.shards.core import ShardCore
from ostraca_fabric.native import at


def rehouse(core: ShardCore) -> None:
    """Tell the parts of a copy that remember where their arrays lie."""
    core.index.locate()
    table = core.reservations.in_flight
    table._at = at(table._places), len(table._places) - 1, at(table._keys)


def listed(core: ShardCore) -> dict[int, tuple[int, int]]:
    """Return the tag and the offset of each block in the index, by its key."""
    rows = np.flatnonzero(core.index._lengths)
    keys, tags = core.index._keys[rows, 0].tolist(), core.index._tags[rows, 0].tolist()
    return dict(zip(keys, zip(tags, core.index.offsets(rows).tolist(), strict=True), strict=True))


def core_digest(core: ShardCore, now: int, late: int) -> Hashable:
    """Return what states share that go on alike."""
    ring, table, grants = core.ring, core.reservations, core.grants
    live = np.flatnonzero(table.states)
    held = zip(
        table.keys[live, 0].tolist(),
        table.offsets[live].tolist(),
        table.states[live].tolist(),
        table.ends_s[live].tolist(),
        table.is_adopted[live].tolist(),
        strict=True,
    )
    segments = tuple(
        (
            segment.generation,
            segment.state.value,
            segment.bytes_used,
            segment.entries_used,
            segment.held,
            max(now, segment.quiet_at_s),
            max(now - late, segment.touched_s),
            sum(len(queued) for queued in segment.queued),
            segment.is_writing,
            segment.is_broken,
            segment.is_short,
            segment.log.listed if segment.log is not None else -1,
        )
        for segment in ring.segments
    )
    sealed = tuple(tuple(each.number for each in pool.sealed) for pool in ring.pools)
    order = sealed, tuple(each.number for each in ring.free), tuple(ring.pools.in_demand)
    current = [pool.current for pool in ring.pools]
    opening = core.commits._opening_due
    return (
        segments,
        order,
        tuple(each and each.number for each in (*current, None, *ring.ready, None, ring.opening, opening)),
        tuple(sorted(listed(core).items())),
        tuple(sorted(held)),
        (
            grants.segments,
            grants._requested,
            grants.withheld,
            max(now, grants.until_s),
            grants.is_fenced,
            grants.is_doubted,
        ),
        max(now, core.commits._open_after_s),
        tuple((number, seen.tobytes()) for number, seen in sorted(core.adoption._seen.items())),
    )
