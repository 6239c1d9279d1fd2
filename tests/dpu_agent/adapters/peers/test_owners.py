"""Owners of the same process behave as owners elsewhere would."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.agent.assembly import SHARD

from ostraca_dpu_agent.adapters.peers.loopback_owners import LoopbackOwners
from ostraca_fabric.errors import ConnectError, MalformedError
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.wire.messages import (
    AgentRequest,
    AnswerToAgent,
    Commit,
    Committed,
    Damage,
    Failure,
    OwnerNotice,
    Release,
    Reserve,
    Reserved,
    Resolve,
    Resolved,
    ShardExtents,
    ShardRelease,
    ShardReservations,
)

OWNER = AgentId("owner")


class Scripted:
    """An owner that answers when it is told to, and takes notices as it is told to."""

    def __init__(self, answer: AnswerToAgent | Exception) -> None:
        self._answer = answer
        self.may_answer = asyncio.Event()
        self.heard: list[OwnerNotice] = []

    async def answer(self, request: AgentRequest) -> AnswerToAgent:
        await self.may_answer.wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def notice(self, notice: OwnerNotice) -> None:
        self.heard.append(notice)
        if isinstance(self._answer, Exception):
            raise self._answer


class AtOnce(Scripted):
    """An owner that answers at once."""

    def answer(self, request: AgentRequest) -> AnswerToAgent:  # type: ignore[override]  # either is an answer
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def registered_now(answer: AnswerToAgent | Exception) -> tuple[LoopbackOwners, Scripted]:
    owners, owner = LoopbackOwners(), AtOnce(answer)
    owners.register(OWNER, owner)
    return owners, owner


def registered(answer: AnswerToAgent | Exception) -> tuple[LoopbackOwners, Scripted]:
    owners, owner = LoopbackOwners(), Scripted(answer)
    owners.register(OWNER, owner)
    return owners, owner


async def test_unknown_agent_is_unreachable() -> None:
    owners, _ = registered(Committed(1, ()))
    owners.unregister(OWNER)
    with pytest.raises(ConnectError):
        await owners.ask(OWNER, Commit(0, 1.0, ()))
    owners.tell(OWNER, Release(()))


@pytest.mark.parametrize(
    ("request_", "answer", "released"),
    [
        (
            Resolve(0, 0.01, 1.0, ()),
            Resolved(1, (ShardExtents(SHARD, is_owner=True, owner_epoch=1, pin=7),)),
            ShardRelease(SHARD, (7,)),
        ),
        (
            Reserve(0, 0.01, 1.0, ()),
            Reserved(1, (ShardReservations(SHARD, is_owner=True, owner_epoch=1, reservations=bytes(8)),)),
            ShardRelease(SHARD, (), bytes(8)),
        ),
    ],
)
async def test_late_answer_is_released(
    request_: AgentRequest, answer: AnswerToAgent, released: ShardRelease
) -> None:
    owners, owner = registered(answer)
    with pytest.raises(TimeoutError):
        await owners.ask(OWNER, request_)
    assert owner.heard == []
    owner.may_answer.set()
    assert await owners._answering.finish(within_s=1)
    await asyncio.sleep(0)
    assert owner.heard == [Release((released,))]


async def test_cancelled_abandoned_answer_causes_no_error() -> None:
    owners, _ = registered(Resolved(1, ()))
    troubles: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, trouble: troubles.append(trouble))
    with pytest.raises(TimeoutError):
        await owners.ask(OWNER, Resolve(0, 0.01, 1.0, ()))
    await owners._answering.stop()
    await asyncio.sleep(0)
    assert troubles == []


async def test_immediate_answer_needs_no_task() -> None:
    owners, _ = registered_now(Resolved(1, ()))
    answer = await owners.ask(OWNER, Resolve(0, 1.0, 1.0, ()))
    assert isinstance(answer, Resolved)
    assert len(owners._answering) == 0


async def test_immediate_exception_is_an_answer() -> None:
    owners, _ = registered_now(KeyError("a bug"))
    answer = await owners.ask(OWNER, Resolve(0, 1.0, 1.0, ()))
    assert isinstance(answer, Failure)
    assert answer.code == "internal"


@pytest.mark.parametrize(
    ("error", "code"), [(MalformedError("no column"), "malformed"), (KeyError("a bug"), "internal")]
)
async def test_exception_of_the_owner_is_an_answer(error: Exception, code: str) -> None:
    owners, owner = registered(error)
    owner.may_answer.set()
    answer = await owners.ask(OWNER, Commit(0, 1.0, ()))
    assert isinstance(answer, Failure)
    assert answer.code == code
    owners.tell(OWNER, Damage(SHARD, bytes(16), 0, 1, 1, bytes(16), 0))
    assert len(owner.heard) == 1
