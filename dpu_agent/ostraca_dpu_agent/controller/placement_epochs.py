"""Selection of earlier placement epochs to retire. Pure.

Lookups include an ended epoch until every writable shard has been written over since. Its blocks are then
older than all others. A time to live limits the wait, since shards with few writes take long. A single agent
decides, to avoid queries from all agents to all agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import AgentId, PlacementEpoch, ShardId
from ostraca_fabric.policies.placement import ranked_agents

_DUTY = ShardId("placement")
"""Ranked like a shard: rendezvous hashing prefers one agent."""


@dataclass(frozen=True, slots=True)
class EpochRetirementDue:
    """Epoch to retire, with the reason."""

    epoch: PlacementEpoch
    why: str


def retiring_agent(fabric_map: FabricMap) -> AgentId | None:
    """Return the agent in charge, the same for all agents; None without agents."""
    return ranked_agents(_DUTY, sorted(fabric_map.agents))[0] if fabric_map.agents else None


def end_times(
    fabric_map: FabricMap, before_s: Mapping[PlacementEpoch, float], now_s: float
) -> dict[PlacementEpoch, float]:
    """Return the time at which each earlier epoch was first seen, by the clock of *now_s*."""
    return {record.epoch: before_s.get(record.epoch, now_s) for record in fabric_map.earlier_placements}


def epochs_due(
    fabric_map: FabricMap,
    progress: Mapping[ShardId, PlacementEpoch],
    ended_at_s: Mapping[PlacementEpoch, float],
    *,
    now_s: float,
    ttl_s: float,
) -> tuple[EpochRetirementDue, ...]:
    """Return the epochs to retire, the newest first.

    *progress*: the epoch since which each shard has been written over, from the owners. A shard without an
    answer counts as not written over.
    """
    writable = [shard.id for shard in fabric_map.shards() if shard.weight > 0]
    due = []
    for record in fabric_map.earlier_placements:
        age_s = now_s - ended_at_s[record.epoch]
        if writable and all(progress.get(shard, 0) > record.epoch for shard in writable):
            due.append(
                EpochRetirementDue(
                    record.epoch, f"all {len(writable)} shards have been written over since its end"
                )
            )
        elif age_s >= ttl_s:
            due.append(EpochRetirementDue(record.epoch, f"{age_s / 3600:.1f} hours since its end"))
    return tuple(due)
