"""Hand-overs that nobody takes up. Pure.

An agent with too many shards leaves one to those that have room. They may be unable to open it, having no
path to its drive; then it comes back. To leave the next one would be as futile, and each costs its readers a
moment. So the agent keeps what it has for a while, longer each time; until agents come or go, or somebody
takes one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ids import AgentId, ShardId, StartId

_FIRST_S = 60.0
_LONGEST_S = 3600.0


class InVain:
    """What became of one agent's hand-overs. Times are in seconds, on the caller's clock."""

    def __init__(self, agent: AgentId) -> None:
        """Know of none."""
        self._agent = agent
        self._left: set[ShardId] = set()
        self._others: frozenset[tuple[AgentId, StartId]] = frozenset()
        self._waits_s = 0.0
        self._until_s = -math.inf

    def handed_over(self, shard: ShardId) -> None:
        """Note that a shard was left to the others."""
        self._left.add(shard)

    def taken_back(self, shard: ShardId, now_s: float) -> None:
        """Note that this agent has claimed a shard: in vain, if it is one that was left to others."""
        if shard in self._left:
            self._left.discard(shard)
            self._waits_s = min(max(_FIRST_S, 2 * self._waits_s), _LONGEST_S)
            self._until_s = now_s + self._waits_s

    def holds_back(self, fabric_map: FabricMap, now_s: float) -> bool:
        """Say whether nothing is to be handed over now, under this map."""
        others = frozenset((each.id, each.start) for each in fabric_map.agents.values())
        taken = {shard for shard in self._left if fabric_map.owner(shard) not in (None, self._agent)}
        self._left -= taken
        if taken or others != self._others:
            self._others, self._waits_s, self._until_s = others, 0.0, -math.inf
        return now_s < self._until_s
