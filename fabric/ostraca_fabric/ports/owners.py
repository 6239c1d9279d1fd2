"""How an agent reaches another one, wherever it is: in the same process, or on another host. Most often a
mover asks the owner of a shard.

Every call is encoded and decoded, also inside one process, so that an owner behind a network is nothing new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, OwnerNotice


class Owners(Protocol):
    """The agents of the fabric, most often as owners of shards."""

    async def ask(self, agent: AgentId, request: AgentRequest) -> AnswerToAgent:
        """Return the agent's answer.

        Raises TimeoutError when none came within the request's ``deadline_s``, and ConnectError when the
        agent can't be reached. Who asks must treat both as "its blocks are misses".
        """

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        """Send what needs no answer. Lost when the agent can't be reached."""
