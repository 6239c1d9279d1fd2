"""Small requests to other agents, to detect a refusal of this agent.

An agent with idle workers asks no other agent. Such an agent would not learn of a refused token, and would
own unreachable shards. The result appears in the status of peers (``AgentNetwork.peers``).
"""

from __future__ import annotations

import asyncio
import contextlib

from ostraca_fabric.errors import ConnectError
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.ports.owners import Owners
from ostraca_fabric.wire.messages import RingProgressQuery

_APART_S = 5.0
"""A wrong token is refused by all agents, so the first answer shows it soon enough."""

_ANSWER_WITHIN_S = 5.0


class PeerHealthCheck:
    """Greeting by an agent after its join."""

    def __init__(self, agent: AgentId, *, membership: Membership, owners: Owners) -> None:
        """Greet the agents of the map through *owners*."""
        self._agent = agent
        self._membership = membership
        self._owners = owners
        self._last: AgentId | None = None

    async def run(self) -> None:
        """Greet until cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(_APART_S)

    async def turn(self) -> None:
        """Greet the next agent, if the map has another."""
        others = sorted(self._membership.map.agents.keys() - {self._agent})
        if not others:
            return
        last = self._last
        self._last = chosen = next((each for each in others if last is None or each > last), others[0])
        with contextlib.suppress(TimeoutError, ConnectError):
            await self._owners.ask(chosen, RingProgressQuery(0, _ANSWER_WITHIN_S))
