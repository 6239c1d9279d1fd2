"""Which earlier placement epochs need be asked no longer. Pure.

An epoch is asked from when it is over until every shard that takes blocks has been passed over since, because
what is left by it is then older than anything else there is; and at most for a time to live, because a shard
that hardly anybody writes to takes for ever. One agent decides, so that not all of them ask all the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.ids import ShardId
from ostraca_fabric.placement import ranked_agents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ids import AgentId, PlacementEpoch

_WORD = ShardId("placement")
"""Like a shard, it has one agent that rendezvous prefers."""


@dataclass(frozen=True, slots=True)
class Retire:
    """Let an epoch be asked no longer."""

    epoch: PlacementEpoch
    why: str


def keeper(fabric_map: FabricMap) -> AgentId | None:
    """Return the agent that is to decide: all agents agree. None when there is none."""
    return ranked_agents(_WORD, sorted(fabric_map.agents))[0] if fabric_map.agents else None


def over_since(
    fabric_map: FabricMap, before_s: Mapping[PlacementEpoch, float], now_s: float
) -> dict[PlacementEpoch, float]:
    """Return when each earlier epoch was first seen to be over, by the clock that *now_s* is of."""
    return {record.epoch: before_s.get(record.epoch, now_s) for record in fabric_map.earlier_placements}


def to_retire(
    fabric_map: FabricMap,
    passed: Mapping[ShardId, PlacementEpoch],
    over_since_s: Mapping[PlacementEpoch, float],
    *,
    now_s: float,
    ttl_s: float,
) -> tuple[Retire, ...]:
    """Return the epochs to retire, the newest first.

    *passed*: the epochs since which owners say that their shards have gone round; a shard of which nobody
    says anything has not.
    """
    writable = [shard.id for shard in fabric_map.shards() if shard.weight > 0]
    found = []
    for record in fabric_map.earlier_placements:
        age_s = now_s - over_since_s[record.epoch]
        if writable and all(passed.get(shard, 0) > record.epoch for shard in writable):
            found.append(Retire(record.epoch, f"all {len(writable)} shards have been written over since"))
        elif age_s >= ttl_s:
            found.append(Retire(record.epoch, f"it has been over for {age_s / 3600:.1f} hours"))
    return tuple(found)
