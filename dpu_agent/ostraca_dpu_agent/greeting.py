"""Asks one agent of the fabric after another for something small, to know whether the others let this one in.

An agent whose workers ask for nothing asks nobody, and would never hear that others refuse its token: it
would own shards that nobody can reach. What comes of it is how things stand with the peer (``Reach.peers``).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from ostraca_fabric.errors import ConnectError
from ostraca_fabric.wire.messages import PassedOver

if TYPE_CHECKING:
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.ports.membership import Membership
    from ostraca_fabric.ports.owners import Owners

_APART_S = 5.0
"""One agent refuses whom all refuse: it is enough to hear of it soon from the first that is asked."""

_ANSWER_WITHIN_S = 5.0


class Greeting:
    """One agent's, which has joined."""

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
        """Greet the next agent, if there is any other."""
        others = sorted(self._membership.map.agents.keys() - {self._agent})
        if not others:
            return
        last = self._last
        self._last = chosen = next((each for each in others if last is None or each > last), others[0])
        with contextlib.suppress(TimeoutError, ConnectError):
            await self._owners.ask(chosen, PassedOver(0, _ANSWER_WITHIN_S))
