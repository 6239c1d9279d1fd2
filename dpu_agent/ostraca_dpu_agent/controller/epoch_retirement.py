"""Retirement of earlier placement epochs, by one agent of the fabric.

Every agent measures the time since the end of each epoch, so that another agent can continue after this
agent. Time before an agent's start is not counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ostraca_dpu_agent.controller.placement_epochs import end_times, epochs_due, retiring_agent
from ostraca_fabric.errors import ConnectError, MembershipError
from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import AgentId, PlacementEpoch, ShardId
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.ports.owners import Owners
from ostraca_fabric.wire.messages import RingProgressAnswer, RingProgressQuery

log = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Time limit of other agents' answers. No caller waits, and the next turn asks again."""


class EpochRetirement:
    """Periodic check of one agent; most checks change nothing."""

    def __init__(
        self,
        agent: AgentId,
        *,
        membership: Membership,
        owners: Owners,
        clock: Callable[[], float],
        turn_s: float,
        ttl_s: float,
    ) -> None:
        """Ask through *owners* every *turn_s*.

        Epochs retire at the latest after *ttl_s*, or after the operator's override.
        """
        self._agent = agent
        self._membership = membership
        self._owners = owners
        self._clock = clock
        self._turn_s = turn_s
        self._ttl_s = ttl_s
        self._ended_at_s: dict[PlacementEpoch, float] = {}

    async def run(self) -> None:
        """Run turns until cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(self._turn_s)

    async def turn(self) -> None:
        """Retire due epochs, if this agent is in charge."""
        fabric_map = self._membership.map
        ttl_s = self._membership.overrides.live.placement_ttl_s or self._ttl_s
        self._ended_at_s = end_times(fabric_map, self._ended_at_s, self._clock())
        if not fabric_map.earlier_placements or retiring_agent(fabric_map) != self._agent:
            return
        progress = await self._ring_progress(fabric_map)
        for retire in epochs_due(fabric_map, progress, self._ended_at_s, now_s=self._clock(), ttl_s=ttl_s):
            log.info("%s retires placement epoch %d: %s", self._agent, retire.epoch, retire.why)
            try:
                await self._membership.retire_placement(retire.epoch)
            except MembershipError as error:
                log.warning("%s can't retire the placement epoch, trying again: %s", self._agent, error)

    async def _ring_progress(self, fabric_map: FabricMap) -> dict[ShardId, PlacementEpoch]:
        """Ask every owner for the ring progress of its shards."""
        owners = sorted({claim.agent for claim in fabric_map.claims.values()})
        answers = await asyncio.gather(*(self._ask(owner) for owner in owners))
        return {
            ShardId(each.shard): PlacementEpoch(each.placement_epoch)
            for owner, answer in zip(owners, answers, strict=True)
            for each in (() if answer is None else answer.shards)
            if fabric_map.owner(ShardId(each.shard)) == owner
        }

    async def _ask(self, owner: AgentId) -> RingProgressAnswer | None:
        try:
            answer = await self._owners.ask(owner, RingProgressQuery(0, _ANSWER_S))
        except (TimeoutError, ConnectError):
            return None
        return answer if isinstance(answer, RingProgressAnswer) else None
