"""Reports about an owned shard: status, and the owner's view of a key."""

from __future__ import annotations

import math

import numpy as np
from msgspec.structs import replace

from ostraca_dpu_agent.shards.core import space_shortage
from ostraca_dpu_agent.shards.shard import OwnedShard
from ostraca_dpu_agent.shards.volume_copy import VolumeCopy
from ostraca_fabric.telemetry.explain import OwnerView
from ostraca_fabric.telemetry.requests import EventRing
from ostraca_fabric.telemetry.status import MembershipStatus, OwnershipStatus, ShardStatus


def shard_status(
    owned: OwnedShard,
    volumes: VolumeCopy | None,
    membership: MembershipStatus,
    *,
    retires_in_s: float | None,
    now_s: float,
    has_pools: bool = True,
) -> ShardStatus:
    """Return the status of a shard.

    *retires_in_s*: time until the last grant of an earlier owner may be retired. *has_pools*: with the bytes
    of each pool, which takes milliseconds for a large shard.
    """
    core, scrub = owned.core, owned.scrub
    counts, budget = core.counts(by_segment=has_pools), core.budget
    return ShardStatus(
        shard=owned.record.id,
        owner_epoch=owned.epoch,
        blocks=counts.blocks,
        used_bytes=counts.block_bytes,
        size_bytes=counts.capacity_bytes,
        evicted_blocks=counts.blocks_evicted,
        is_failing=owned.is_failing,
        recovered=core.recovered_share,
        reinserted_blocks=counts.blocks_reinserted,
        written_bytes=budget.written_bytes,
        written_bytes_per_day=budget.bytes_per_day,
        budget_bytes_per_day=budget.budget_bytes_per_day,
        budget_level_bytes=budget.level_bytes if budget.budget_bytes_per_day else 0.0,
        years_left=budget.years_left,
        scrubbed_bytes=scrub.read_bytes if scrub else 0,
        scrub_passes=scrub.passes if scrub else 0,
        scrubbed_ago_s=None if scrub is None or scrub.passed_s is None else now_s - scrub.passed_s,
        blocks_max=counts.blocks_max,
        is_index_full=counts.is_index_full,
        index_bytes=core.index.memory_bytes,
        beyond_limit_blocks=counts.blocks_beyond_limit,
        unreadable_segments=counts.segments_unreadable,
        volumes_recorded=volumes.recorded if volumes else 0,
        volumes_left_out=volumes.left_out if volumes else 0,
        pools=tuple(sorted(counts.pools.items())),
        ownership=_ownership(owned, counts.blocks_adopted, membership, retires_in_s, now_s),
    )


def _ownership(
    owned: OwnedShard,
    adopted_blocks: int,
    membership: MembershipStatus,
    retires_in_s: float | None,
    now_s: float,
) -> OwnershipStatus:
    grants = owned.core.grants
    left_s = max(0.0, grants.until_s - now_s) if grants.may_write(now_s) else 0.0
    shortage = space_shortage(owned.core.ring, grants, now_s, retires_in_s=retires_in_s)
    return OwnershipStatus(
        may_write_for_s=None if math.isinf(left_s) else left_s,
        why_fenced=_why_fenced(owned, membership, now_s),
        is_superseded=grants.is_fenced,
        granted_segments=len(grants.segments),
        granted_ahead_segments=grants.granted_ahead,
        withheld_segments=int(grants.is_withheld.sum()),
        retires_in_s=retires_in_s,
        adopted_blocks=adopted_blocks,
        why_no_space="" if shortage is None else shortage.why,
        space_in_s=None if shortage is None else shortage.ends_in_s,
    )


def _why_fenced(owned: OwnedShard, membership: MembershipStatus, now_s: float) -> str:
    grants = owned.core.grants
    if grants.is_recovering or grants.may_write(now_s):
        return ""
    if grants.is_fenced:
        return "another owner has a higher epoch"
    if grants.is_doubted:
        return "an agent names a higher epoch, and the membership store was not asked since"
    if membership.silent_s:
        return f"the membership store has been silent for {membership.silent_s:.0f} s"
    return "the membership store does not confirm the claim"


def owner_view(owned: OwnedShard | None, key: bytes, events: EventRing) -> OwnerView:
    """Return the owner's view of a key of 16 bytes, without counting a read.

    *owned* is None if this agent does not own the shard.
    """
    view = OwnerView(
        events.agent, is_owner=owned is not None, events=events.of(key), events_reach_s=events.reaches_back_s
    )
    if owned is None:
        return view
    core, wanted = owned.core, np.frombuffer(key, np.uint8).reshape(1, -1)
    view = replace(
        view,
        owner_epoch=owned.epoch,
        is_being_written=bool(core.reservations.in_flight.find(wanted)[0] >= 0),
    )
    row = core.index.find(wanted)
    if row[0] < 0:
        return view
    (segment,) = core.catalog.segments_of(row)
    return replace(
        view,
        is_listed=True,
        offset=int(core.index.offsets(row)[0]),
        length=int(core.index.lengths(row)[0]),
        generation=int(core.ring.generations[segment]),
        is_pinned=bool(core.pins.on_segment[segment] > 0),
        is_withheld=bool(core.grants.is_withheld[segment]),
    )
