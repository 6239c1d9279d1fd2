"""Agents greet each other in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.agent.assembly import FABRIC

from ostraca_dpu_agent.server.peer_health_check import PeerHealthCheck
from ostraca_fabric.errors import AuthenticationError
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model.fabric_map import AgentRecord
from ostraca_fabric.model.ids import AgentId, StartId
from ostraca_fabric.wire.messages import RingProgressAnswer, RingProgressQuery

if TYPE_CHECKING:
    from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, OwnerNotice


class Others:
    """Implements ``ports.owners.Owners``: one refuses, one is silent, one answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask(self, agent: AgentId, request: AgentRequest) -> AnswerToAgent:
        assert isinstance(request, RingProgressQuery)
        self.asked.append(agent)
        if agent == "b":
            raise AuthenticationError("the token is not valid for the role agent")
        if agent == "c":
            raise TimeoutError
        return RingProgressAnswer(0, ())

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        raise AssertionError((agent, notice))


async def test_each_other_agent_is_greeted_in_turn_whatever_becomes_of_it() -> None:
    membership, others = MemoryMembership(FABRIC), Others()
    health_check = PeerHealthCheck(AgentId("a"), membership=membership, owners=others)
    await health_check.turn()
    assert others.asked == []
    for number, name in enumerate(("a", "b", "c", "d")):
        await membership.join(AgentRecord(AgentId(name), StartId(bytes([number]) * 16), ()))
    for _ in range(4):
        await health_check.turn()
    assert others.asked == ["b", "c", "d", "b"]
    await membership.leave(AgentId("c"), StartId(bytes([2]) * 16))
    await health_check.turn()
    assert others.asked[4:] == ["d"]
