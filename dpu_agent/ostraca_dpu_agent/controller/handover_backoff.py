"""Backoff of handovers that no other agent takes up. Pure.

An agent with too many shards hands one over to agents with room. If no other agent can open the shard, for
example without a path to the drive, this agent claims the shard again. Further handovers would fail alike,
and each costs readers a moment. So handovers pause, longer after each failure. The pause ends when an agent
joins, restarts or leaves, or when an agent takes a shard.
"""

from __future__ import annotations

import math

from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import AgentId, ShardId, StartId

_FIRST_S = 60.0
_LONGEST_S = 3600.0


class HandoverBackoff:
    """Handovers of one agent. Times are in seconds, on the caller's clock."""

    def __init__(self, agent: AgentId) -> None:
        """Begin without handovers."""
        self._agent = agent
        self._handed_over: set[ShardId] = set()
        self._others: frozenset[tuple[AgentId, StartId]] = frozenset()
        self._waits_s = 0.0
        self._until_s = -math.inf

    def note_handover(self, shard: ShardId) -> None:
        """Note the handover of a shard."""
        self._handed_over.add(shard)

    def note_claim(self, shard: ShardId, now_s: float) -> None:
        """Note a claim by this agent; a handover of the same shard has then failed."""
        if shard in self._handed_over:
            self._handed_over.discard(shard)
            self._waits_s = min(max(_FIRST_S, 2 * self._waits_s), _LONGEST_S)
            self._until_s = now_s + self._waits_s

    def is_active(self, fabric_map: FabricMap, now_s: float) -> bool:
        """Return whether handovers pause now, under this map."""
        others = frozenset((each.id, each.start) for each in fabric_map.agents.values())
        accepted = {
            shard for shard in self._handed_over if fabric_map.owner(shard) not in (None, self._agent)
        }
        self._handed_over -= accepted
        if accepted or others != self._others:
            self._others, self._waits_s, self._until_s = others, 0.0, -math.inf
        return now_s < self._until_s
