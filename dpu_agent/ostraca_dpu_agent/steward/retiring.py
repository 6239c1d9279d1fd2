"""Ends earlier placement epochs, at the one agent of the fabric that is to.

Every agent counts by itself for how long each epoch has been over, so that the next one can go on where this
one stops. What an agent saw before it started is not counted.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ostraca_dpu_agent.steward.placements import keeper, over_since, to_retire
from ostraca_fabric.errors import ConnectError, MembershipError
from ostraca_fabric.ids import PlacementEpoch, ShardId
from ostraca_fabric.wire.messages import PassedOver, ShardsPassed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.ports.membership import Membership
    from ostraca_fabric.ports.owners import Owners

log = logging.getLogger(__name__)

_ANSWER_WITHIN_S = 5.0
"""How long the others have to answer. Nobody waits for it, and there is a next time."""


class Retiring:
    """The turns of one agent, most of which find nothing to do."""

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
        """Ask through *owners* every *turn_s*; no earlier epoch is asked for longer than *ttl_s*,
        unless operators have ruled otherwise.
        """
        self._agent = agent
        self._membership = membership
        self._owners = owners
        self._clock = clock
        self._turn_s = turn_s
        self._ttl_s = ttl_s
        self._over_since_s: dict[PlacementEpoch, float] = {}

    async def run(self) -> None:
        """Take turns until cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(self._turn_s)

    async def turn(self) -> None:
        """Retire what is to be, if it is this agent's to say."""
        fabric_map = self._membership.map
        ttl_s = self._membership.rulings.live.placement_ttl_s or self._ttl_s
        self._over_since_s = over_since(fabric_map, self._over_since_s, self._clock())
        if not fabric_map.earlier_placements or keeper(fabric_map) != self._agent:
            return
        passed = await self._passed(fabric_map)
        due = to_retire(fabric_map, passed, self._over_since_s, now_s=self._clock(), ttl_s=ttl_s)
        for retire in due:
            log.info("%s retires placement epoch %d: %s", self._agent, retire.epoch, retire.why)
            try:
                await self._membership.retire_placement(retire.epoch)
            except MembershipError as error:
                log.warning("%s will try that again: %s", self._agent, error)

    async def _passed(self, fabric_map: FabricMap) -> dict[ShardId, PlacementEpoch]:
        """Ask every owner how far round its shards have gone."""
        owners = sorted({claim.agent for claim in fabric_map.claims.values()})
        answers = await asyncio.gather(*(self._ask(owner) for owner in owners))
        return {
            ShardId(each.shard): PlacementEpoch(each.placement_epoch)
            for owner, answer in zip(owners, answers, strict=True)
            for each in (() if answer is None else answer.shards)
            if fabric_map.owner(ShardId(each.shard)) == owner
        }

    async def _ask(self, owner: AgentId) -> ShardsPassed | None:
        try:
            answer = await self._owners.ask(owner, PassedOver(0, _ANSWER_WITHIN_S))
        except (TimeoutError, ConnectError):
            return None
        return answer if isinstance(answer, ShardsPassed) else None
