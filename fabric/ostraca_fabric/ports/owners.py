"""How an agent reaches another one, wherever it is: in the same process, or on another host. Most often a
mover asks the owner of a shard.

Every call is encoded and decoded, also inside one process, so that an owner behind a network is nothing new.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Generator

    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.status import PeerStatus
    from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, OwnerNotice


class UnderWay(Protocol):
    """A request that was sent. Await it, once: what it holds on both sides is held until then."""

    @property
    def answered(self) -> asyncio.Future[Any]:
        """Done once awaiting this takes no more time."""

    def __await__(self) -> Generator[Any, None, AnswerToAgent]:
        """Wait for the agent's answer."""


Asked = UnderWay | Coroutine[Any, Any, "AnswerToAgent"]
"""What comes of asking: a request that is under way, or what begins when it is awaited, or made a task."""


class Owners(Protocol):
    """The agents of the fabric, most often as owners of shards."""

    def ask(self, agent: AgentId, request: AgentRequest) -> Asked:
        """Ask an agent: awaiting what this returns gives its answer.

        Awaiting it raises TimeoutError when no answer came within the request's ``deadline_s``, and
        ConnectError when the agent can't be reached. Who asks must treat both as "its blocks are misses".
        """

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        """Send what needs no answer. Lost when the agent can't be reached."""


class AnswersAgents(Protocol):
    """What an agent offers to the movers of others, and to its own."""

    def answer(self, request: AgentRequest) -> AnswerToAgent | Awaitable[AnswerToAgent]:
        """Answer a request: at once, or with something to wait for."""

    def notice(self, notice: OwnerNotice) -> None:
        """Take a notice."""


class Reach(Owners, Protocol):
    """How the agents of one process reach each other and those elsewhere."""

    def register(self, agent: AgentId, service: AnswersAgents) -> None:
        """Make an agent of this process reachable from within it."""

    def unregister(self, agent: AgentId) -> None:
        """Make it unreachable, as if it had died; answers under way still come."""

    def peers(self) -> tuple[PeerStatus, ...]:
        """Return how things stand with each agent elsewhere that was asked for something and is in the fabric
        still.
        """
