"""An agent that is asked for a shard it does not own says who does, and is believed once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
from tests.support.agent.assembly import SETTINGS, SHARD, Assembly, assembled, beside

from ostraca_dpu_agent.agent import Agent
from ostraca_dpu_agent.datapath.location.routing import Routes
from ostraca_fabric.model.fabric_map import Claim
from ostraca_fabric.model.ids import AgentId, OwnerEpoch, ShardId, StartId
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.wire.messages import (
    AgentRequest,
    AnswerToAgent,
    Commit,
    Committed,
    OwnerNotice,
    Reserve,
    Reserved,
    Resolve,
    Resolved,
    ShardCommit,
    ShardExtents,
    ShardReservations,
)

OWNER, OTHER, MISLED = AgentId("agent-0"), AgentId("agent-1"), AgentId("agent-2")
CLAIM = Claim(OTHER, StartId(bytes(16)), OwnerEpoch(1))


class Counted:
    """What was asked of whom."""

    def __init__(self, fabric: Assembly) -> None:
        self.asked: list[tuple[AgentId, str]] = []
        self._ask = fabric.owners.ask
        fabric.owners.ask = self.ask  # type: ignore[method-assign]  # it listens in

    async def ask(self, agent: AgentId, request: AgentRequest) -> AnswerToAgent:
        self.asked.append((agent, type(request).__name__))
        return await self._ask(agent, request)


@dataclass
class Two:
    """A fabric of two agents; the first owns the shard and believes that the second does."""

    fabric: Assembly
    other: Agent


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with assembled() as fabric, beside(fabric, SETTINGS) as other:
        await fabric.ready()
        stale = Routes(replace(fabric.membership.map, claims={ShardId(SHARD): CLAIM}))
        fabric.context.routes = lambda: stale
        yield Two(fabric, other)


async def test_whom_the_wrong_owner_names_is_asked_in_its_place(two: Two) -> None:
    fabric = two.fabric
    counted = Counted(fabric)
    fabric.ask_by_message()
    worker = fabric.worker()
    done = await fabric.put(worker, range(4))
    assert set(done.states) == {PutState.COMMITTED}
    found = await fabric.get(worker, range(4))
    assert set(found.states) == {BlockState.HIT}
    missing = await fabric.get(worker, range(10, 12))
    assert set(missing.reasons) == {Reason.NOT_FOUND}
    assert counted.asked[:3] == [(OTHER, "Reserve"), (OWNER, "Reserve"), (OWNER, "Commit")]
    assert counted.asked[-2:] == [(OTHER, "Resolve"), (OWNER, "Resolve")]
    await fabric.at_rest()


async def test_own_shards_are_asked_for_space_without_a_message() -> None:
    async with assembled() as fabric:
        counted = Counted(fabric)
        done = await fabric.put(fabric.worker(), range(4))
        assert set(done.states) == {PutState.COMMITTED}
        assert counted.asked == [(OWNER, "Commit")]


class Misled:
    """An agent that owns nothing, and holds the other one for the owner."""

    def answer(self, request: AgentRequest) -> AnswerToAgent:
        known = {"is_owner": False, "owner_epoch": 0, "known_owner": OTHER, "known_epoch": 1}
        match request:
            case Resolve():
                extents = (ShardExtents(part.shard, **known) for part in request.shards)  # type: ignore[arg-type]
                return Resolved(request.request, tuple(extents))
            case Reserve():
                given = (ShardReservations(part.shard, **known) for part in request.shards)  # type: ignore[arg-type]
                return Reserved(request.request, tuple(given))
        raise AssertionError(request)

    def notice(self, notice: OwnerNotice) -> None:
        raise AssertionError(notice)


async def test_it_is_believed_once(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.fabric.owners.register(MISLED, Misled())
    monkeypatch.setattr(two.other._owner, "_claim_of", lambda _: replace(CLAIM, agent=MISLED))
    counted = Counted(two.fabric)
    done = await two.fabric.put(two.fabric.worker(), range(4))
    assert set(done.reasons) == {Reason.NO_OWNER}
    missing = await two.fabric.get(two.fabric.worker(), range(4))
    assert set(missing.reasons) == {Reason.NO_OWNER}
    asked = [(OTHER, "Reserve"), (MISLED, "Reserve"), (OTHER, "Resolve"), (MISLED, "Resolve")]
    assert counted.asked == asked, "each of the two names the other for ever"


async def test_a_wrong_owner_that_knows_of_nobody_is_the_end_of_it(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two.other._owner, "_claim_of", lambda _: None)
    counted = Counted(two.fabric)
    missing = await two.fabric.get(two.fabric.worker(), range(4))
    assert set(missing.reasons) == {Reason.NO_OWNER}
    assert counted.asked == [(OTHER, "Resolve")]


async def test_a_commit_that_comes_to_the_wrong_owner_is_told_who_it_is(two: Two) -> None:
    commit = Commit(0, 1.0, (ShardCommit(SHARD, 1, bytes(8), bytes(16), bytes(8)),))
    answer = await two.fabric.owners.ask(OTHER, commit)
    assert isinstance(answer, Committed)
    (told,) = answer.shards
    assert set(told.reasons) == {Reason.NO_OWNER}
    assert (told.known_owner, told.known_epoch) == (OWNER, two.fabric.shard.epoch)
