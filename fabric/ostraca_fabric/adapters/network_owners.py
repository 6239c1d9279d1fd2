"""Agents elsewhere, reached over connections of this agent's own; those of this process as always.

One connection to each, made when it is first needed (``peer_link``). Requests are not batched: what a mover
asks one owner is one message already, and messages of different workers have different deadlines and labels
(docs/adr/0022).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.adapters.peer_link import PeerLink, PeerSettings
from ostraca_fabric.connection import SOCKETS, connect
from ostraca_fabric.errors import ConnectError
from ostraca_fabric.tasks import Tasks
from ostraca_fabric.wire.handshake import AGENT, WorkerHandshake

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from ostraca_fabric.adapters.loopback_owners import LoopbackOwners
    from ostraca_fabric.connection import ClientConnection, ConnectionSettings, Network
    from ostraca_fabric.connection.client import Answer
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.ports.owners import AnswersAgents, Asked
    from ostraca_fabric.status import PeerStatus
    from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, OwnerNotice


class NetworkOwners:
    """Implements ``ports.owners.Reach``. Who makes it closes it, after its agents have left."""

    def __init__(
        self,
        own: AgentId,
        *,
        here: LoopbackOwners,
        address_of: Callable[[AgentId], tuple[str, ...]],
        dice: random.Random,
        settings: PeerSettings | None = None,
        connections: ConnectionSettings | None = None,
        token: Callable[[], str] = str,
        network: Network = SOCKETS,
    ) -> None:
        """Reach agents registered *here* without a connection.

        *address_of* says where another one listens now, empty when nobody knows. *own* is the name that
        others hear, and *token* is asked for a fabric token for each connection, empty for none.
        """
        self._own = own
        self._here = here
        self._address_of = address_of
        self._dice = dice
        self._settings = settings or PeerSettings()
        self._connections = connections
        self._token = token
        self._network = network
        self._links: dict[AgentId, PeerLink] = {}
        self._tasks = Tasks(f"connections of {own}")
        self._is_closed = False

    def register(self, agent: AgentId, service: AnswersAgents) -> None:
        """Make an agent of this process reachable from within it."""
        self._here.register(agent, service)

    def unregister(self, agent: AgentId) -> None:
        """Make it unreachable from within this process."""
        self._here.unregister(agent)

    def peers(self) -> tuple[PeerStatus, ...]:
        """Return how things stand with each agent of the fabric that was asked for something, by id."""
        return tuple(link.status() for agent, link in sorted(self._links.items()) if self._address_of(agent))

    def ask(self, agent: AgentId, request: AgentRequest) -> Asked:
        """Ask an agent. Awaiting what this returns raises TimeoutError and ConnectError as the port says."""
        if self._here.has(agent):
            return self._here.ask(agent, request)
        if self._is_closed:
            return _not_asked("this agent is being stopped")
        if not self._address_of(agent):
            self._drop(agent)
            return _not_asked(f"no address of agent {agent} is known")
        return self._link(agent).ask(request)

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        """Send what needs no answer; lost unless the agent is connected."""
        if self._here.has(agent):
            self._here.tell(agent, notice)
        elif agent in self._links:
            self._links[agent].tell(notice)

    async def close(self) -> None:
        """End every connection."""
        self._is_closed = True
        await self._tasks.stop()
        links, self._links = self._links, {}
        for link in links.values():
            link.close()
        for link in links.values():
            await link.wait_closed()

    def _link(self, agent: AgentId) -> PeerLink:
        link = self._links.get(agent)
        if link is None:
            for gone in [each for each in self._links if not self._address_of(each)]:
                self._drop(gone)  # nobody may ever ask it again, and each new agent would add to these
            link = self._links[agent] = PeerLink(
                agent,
                self._settings,
                addresses=lambda: self._address_of(agent),
                dial=self._dial,
                dice=self._dice,
                tasks=self._tasks,
            )
        return link

    def _drop(self, agent: AgentId) -> None:
        """Forget an agent that has left the fabric."""
        link = self._links.pop(agent, None)
        if link is not None:
            link.close()

    async def _dial(self, address: str, on_late: Callable[[Answer], None]) -> ClientConnection:
        hello = WorkerHandshake(AGENT, "", self._own, self._token()).hello
        return await connect(
            address, hello, settings=self._connections, on_late=on_late, network=self._network
        )


async def _not_asked(why: str) -> AnswerToAgent:
    raise ConnectError(why)
