"""Who owned shards until lately: they are asked, too, while the next owner reads what there is.

An owner that hands a shard over in order goes on answering look-ups for a while. Until somebody else claims
the shard it is the only one who can; and while the next owner recovers, it knows of blocks that the other has
not read yet. An owner that died is not in the fabric any more, and is not asked.

This agent itself is alive whatever the map says. Cut off from etcd it may hear that its lease ran out, and
not who has claimed its shards: it goes on with what it has.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ids import AgentId, ShardId


class HandedOver:
    """What the maps seen so far tell of owners before."""

    def __init__(self, own: AgentId, clock: Callable[[], float], *, lasts_s: float) -> None:
        """Remember an owner for *lasts_s* after another one has claimed its shard; *own* is this agent."""
        self._own = own
        self._clock = clock
        self._lasts_s = lasts_s
        self._before: dict[ShardId, tuple[AgentId, float]] = {}

    def on_map(self, before: FabricMap, after: FabricMap) -> None:
        """Note what has changed from one map to the next."""
        for shard in before.claims:
            owner = before.owner(shard)
            if owner is not None and after.owner(shard) != owner:
                self._before[shard] = owner, math.inf
        for shard, (owner, ends_s) in self._before.items():
            if ends_s == math.inf and after.owner(shard) is not None:  # the time begins when somebody has it
                self._before[shard] = owner, self._clock() + self._lasts_s
        self._before = {
            shard: (owner, ends_s)
            for shard, (owner, ends_s) in self._before.items()
            if (owner == self._own or owner in after.agents) and after.owner(shard) != owner
        }

    @property
    def owners(self) -> dict[ShardId, AgentId]:
        """The owners before that are still worth asking."""
        now_s = self._clock()
        return {shard: owner for shard, (owner, ends_s) in self._before.items() if now_s < ends_s}
