"""What an agent says of one shard that it owns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ostraca_dpu_agent.owner.core import lack_of_space, recovered_share
from ostraca_fabric.status import OwnershipStatus, ShardStatus

if TYPE_CHECKING:
    from ostraca_dpu_agent.owner.core import ShardCore, ShardCounts
    from ostraca_dpu_agent.owner.shard import OwnedShard
    from ostraca_dpu_agent.owner.volume_copy import VolumeCopy
    from ostraca_fabric.status import MembershipStatus


def shard_status(
    owned: OwnedShard,
    volumes: VolumeCopy | None,
    membership: MembershipStatus,
    *,
    retires_in_s: float | None,
    now_s: float,
    has_pools: bool = True,
) -> ShardStatus:
    """Put together what its parts know. *retires_in_s*: until the last grant of an earlier owner may be.
    Without what its pools have where not *has_pools*, which takes milliseconds for a large shard.
    """
    counts, spending = owned.core.counts(by_segment=has_pools), owned.core.spending
    passed_s = owned.scrub.passed_s if owned.scrub else None
    return ShardStatus(
        shard=owned.record.id,
        owner_epoch=owned.epoch,
        blocks=counts.blocks,
        used_bytes=counts.block_bytes,
        size_bytes=counts.capacity_bytes,
        evicted_blocks=counts.blocks_evicted,
        is_failing=owned.is_failing,
        recovered=recovered_share(owned.core),
        carried_blocks=counts.blocks_carried,
        written_bytes=spending.written_bytes,
        written_bytes_per_day=spending.bytes_per_day,
        budget_bytes_per_day=spending.budget_bytes_per_day,
        budget_level_bytes=spending.level_bytes if spending.budget_bytes_per_day else 0.0,
        years_left=spending.years_left,
        scrubbed_bytes=owned.scrub.read_bytes if owned.scrub else 0,
        scrub_passes=owned.scrub.passes if owned.scrub else 0,
        scrubbed_ago_s=now_s - passed_s if passed_s is not None else None,
        blocks_max=counts.blocks_max,
        index_bytes=owned.core.index.memory_bytes,
        beyond_limit_blocks=counts.blocks_beyond_limit,
        unreadable_segments=counts.segments_unreadable,
        volumes_recorded=volumes.recorded if volumes else 0,
        volumes_left_out=volumes.left_out if volumes else 0,
        pools=tuple(sorted(counts.pools.items())),
        ownership=_ownership(owned.core, counts, membership, retires_in_s, now_s),
    )


def _ownership(
    core: ShardCore,
    counts: ShardCounts,
    membership: MembershipStatus,
    retires_in_s: float | None,
    now_s: float,
) -> OwnershipStatus:
    grants = core.grants
    left_s = max(0.0, grants.until_s - now_s) if grants.may_write(now_s) else 0.0
    lack = lack_of_space(core, now_s, retires_in_s=retires_in_s)
    return OwnershipStatus(
        may_write_for_s=None if math.isinf(left_s) else left_s,
        why_fenced=_why_fenced(core, membership, now_s),
        is_superseded=grants.is_fenced,
        granted_segments=len(grants.own),
        granted_ahead_segments=grants.granted_ahead,
        withheld_segments=int(grants.is_withheld.sum()),
        retires_in_s=retires_in_s,
        adopted_blocks=counts.blocks_adopted,
        why_no_space="" if lack is None else lack.why,
        space_in_s=None if lack is None else lack.ends_in_s,
    )


def _why_fenced(core: ShardCore, membership: MembershipStatus, now_s: float) -> str:
    if core.is_recovering or core.grants.may_write(now_s):
        return ""
    if core.grants.is_fenced:
        return "another owner has a higher epoch"
    if core.grants.is_doubted:
        return "an agent names a higher epoch, and the membership store was not asked since"
    if membership.silent_s:
        return f"the membership store has been silent for {membership.silent_s:.0f} s"
    return "the membership store does not confirm the claim"
