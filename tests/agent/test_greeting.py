"""Agents greet each other in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.agent.assembly import FABRIC

from ostraca_dpu_agent.greeting import Greeting
from ostraca_fabric.adapters.memory_membership import MemoryMembership
from ostraca_fabric.errors import AuthenticationError
from ostraca_fabric.fabric_map import AgentRecord
from ostraca_fabric.ids import AgentId, StartId
from ostraca_fabric.wire.messages import PassedOver, ShardsPassed

if TYPE_CHECKING:
    from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, OwnerNotice


class Others:
    """Implements ``ports.owners.Owners``: one refuses, one is silent, one answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask(self, agent: AgentId, request: AgentRequest) -> AnswerToAgent:
        assert isinstance(request, PassedOver)
        self.asked.append(agent)
        if agent == "b":
            raise AuthenticationError("this token does not speak for the role agent")
        if agent == "c":
            raise TimeoutError
        return ShardsPassed(0, ())

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        raise AssertionError((agent, notice))


async def test_each_other_agent_is_greeted_in_turn_whatever_becomes_of_it() -> None:
    membership, others = MemoryMembership(FABRIC), Others()
    greeting = Greeting(AgentId("a"), membership=membership, owners=others)
    await greeting.turn()
    assert others.asked == []
    for number, name in enumerate(("a", "b", "c", "d")):
        await membership.join(AgentRecord(AgentId(name), StartId(bytes([number]) * 16), ()))
    for _ in range(4):
        await greeting.turn()
    assert others.asked == ["b", "c", "d", "b"]
    await membership.leave(AgentId("c"), StartId(bytes([2]) * 16))
    await greeting.turn()
    assert others.asked[4:] == ["d"]
