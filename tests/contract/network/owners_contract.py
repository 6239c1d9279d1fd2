"""What every way to reach agents must do.

An adapter's test inherits this and gives one, and who is reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from ostraca_fabric.connection import ServerConnection
from ostraca_fabric.errors import ConnectError, MalformedError, RefusedError, UsageError
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.ports.owners import AgentNetwork, AgentService
from ostraca_fabric.telemetry.requests import labelled
from ostraca_fabric.wire.messages import (
    AgentRequest,
    Answer,
    AnswerToAgent,
    Commit,
    Committed,
    Damage,
    Failure,
    Hello,
    Inspect,
    Inspected,
    Notice,
    OwnerNotice,
    Release,
    Request,
    Reserve,
    Reserved,
    Resolve,
    Resolved,
    SessionEnded,
    ShardExtents,
    ShardKeys,
    ShardRelease,
    ShardReservations,
)

OWNER = AgentId("owner")
NOBODY = AgentId("nobody")
SHARD = "enclosure-0/drive-0/0"
FAR_S = 20.0

Script = Callable[[AgentRequest], Awaitable[AnswerToAgent]]


class Owner:
    """An agent that answers as its script says; without one as soon as it may."""

    def __init__(self) -> None:
        self.asked: list[AgentRequest] = []
        self.heard: list[OwnerNotice] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.answer_with: AnswerToAgent | Exception | None = None
        self.changed = asyncio.Event()

    async def answer(self, request: AgentRequest) -> AnswerToAgent:
        self.asked.append(request)
        self.changed.set()
        await self.may_answer.wait()
        if isinstance(self.answer_with, Exception):
            raise self.answer_with
        if self.answer_with is not None:
            return _numbered(self.answer_with, request)
        if isinstance(request, Resolve):
            return Resolved(request.request, ())
        if isinstance(request, Inspect):
            return Inspected(request.request, request.key)
        return Committed(request.request, ())

    def notice(self, notice: OwnerNotice) -> None:
        self.heard.append(notice)
        self.changed.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(FAR_S):
            while not is_so():
                self.changed.clear()
                await self.changed.wait()


def _numbered(answer: AnswerToAgent, request: AgentRequest) -> AnswerToAgent:
    return type(answer)(request.request, *[getattr(answer, name) for name in answer.__struct_fields__[1:]])


class Serving:
    """A connection handler that has an agent answer."""

    def __init__(self, service: AgentService) -> None:
        self._service = service
        self.connections: list[ServerConnection] = []
        self.given_up: list[asyncio.Future[None]] = []
        """For each request, done when nobody waits for it any more."""

    async def on_open(self, connection: ServerConnection, hello: Hello, peer_uid: int | None) -> None:
        self.connections.append(connection)

    def handle(self, connection: ServerConnection, request: Request) -> Answer | Awaitable[Answer]:
        self.given_up.append(connection.cancelled(request.request))
        return self._service.answer(request)  # type: ignore[arg-type]  # it serves agents only

    def on_notice(self, connection: ServerConnection, notice: Notice) -> None:
        self._service.notice(notice)  # type: ignore[arg-type]  # it serves agents only

    def on_close(self, connection: ServerConnection) -> None:
        self.connections.remove(connection)


@dataclass
class Reached:
    """Who asks, and the agent that is reached as OWNER; NOBODY is somebody who does not listen."""

    owners: AgentNetwork
    owner: Owner


PINNED = Resolved(0, (ShardExtents(SHARD, is_owner=True, owner_epoch=1, pin=7),))
RESERVED = Reserved(0, (ShardReservations(SHARD, is_owner=True, owner_epoch=1, reservations=bytes(8)),))


class OwnersContract:
    @pytest.fixture
    async def reached(self) -> Reached:
        raise NotImplementedError

    async def test_an_answer_finds_who_asked(self, reached: Reached) -> None:
        asked = [reached.owners.ask(OWNER, Inspect(0, FAR_S, SHARD, bytes([n]) * 16)) for n in range(30)]
        answers = await asyncio.gather(*asked)
        bodies = [answer.body for answer in answers if isinstance(answer, Inspected)]
        assert bodies == [bytes([number]) * 16 for number in range(30)]

    async def test_the_label_and_the_time_that_remains_go_along(self, reached: Reached) -> None:
        with labelled("worker/7"):
            await reached.owners.ask(OWNER, Resolve(0, FAR_S, 1.0, ()))
        (asked,) = reached.owner.asked
        assert asked.label == "worker/7"
        assert 0 < asked.deadline_s <= FAR_S

    async def test_unknown_agent_is_unreachable(self, reached: Reached) -> None:
        with pytest.raises(ConnectError):
            await reached.owners.ask(NOBODY, Commit(0, FAR_S, ()))
        reached.owners.tell(NOBODY, Release(()))

    async def test_no_answer_by_the_deadline_is_a_time_out(self, reached: Reached) -> None:
        reached.owner.may_answer.clear()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(TimeoutError):
            await reached.owners.ask(OWNER, Commit(0, 0.1, ()))
        assert 0.09 < loop.time() - began_s < 5.0
        reached.owner.may_answer.set()
        assert isinstance(await reached.owners.ask(OWNER, Commit(0, FAR_S, ())), Committed)

    @pytest.mark.parametrize(
        ("request_", "answer", "released"),
        [
            (Resolve(0, 0.1, 1.0, ()), PINNED, ShardRelease(SHARD, (7,))),
            (Reserve(0, 0.1, 1.0, ()), RESERVED, ShardRelease(SHARD, (), bytes(8))),
        ],
    )
    async def test_late_answer_is_released(
        self, reached: Reached, request_: AgentRequest, answer: AnswerToAgent, released: ShardRelease
    ) -> None:
        reached.owner.answer_with = answer
        reached.owner.may_answer.clear()
        while not reached.owner.asked:  # on a machine that stands still a request may not leave in its time
            with pytest.raises(TimeoutError):
                await reached.owners.ask(OWNER, request_)
        assert reached.owner.heard == []
        reached.owner.may_answer.set()
        await reached.owner.until(lambda: len(reached.owner.heard) > 0)
        assert reached.owner.heard == [Release((released,))]

    async def test_what_is_handed_out_to_who_was_cancelled_is_given_back(self, reached: Reached) -> None:
        reached.owner.answer_with = PINNED
        reached.owner.may_answer.clear()
        asking = asyncio.ensure_future(reached.owners.ask(OWNER, Resolve(0, FAR_S, 1.0, ())))
        await reached.owner.until(lambda: len(reached.owner.asked) > 0)
        asking.cancel()
        await asyncio.wait([asking])
        reached.owner.may_answer.set()
        await reached.owner.until(lambda: len(reached.owner.heard) > 0)
        assert reached.owner.heard == [Release((ShardRelease(SHARD, (7,)),))]

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (MalformedError("no column"), "malformed"),
            (RefusedError("unknown_volume", "no volume"), "unknown_volume"),
            (UsageError("not so"), "usage"),
            (KeyError("a bug"), "internal"),
        ],
    )
    async def test_exception_of_the_owner_is_an_answer(
        self, reached: Reached, error: Exception, code: str
    ) -> None:
        reached.owner.answer_with = error
        answer = await reached.owners.ask(OWNER, Commit(0, FAR_S, ()))
        assert isinstance(answer, Failure)
        assert answer.code == code

    async def test_notices_arrive_in_order(self, reached: Reached) -> None:
        await reached.owners.ask(OWNER, Resolve(0, FAR_S, 1.0, ()))
        notices: list[OwnerNotice] = [
            Release((ShardRelease(SHARD, (1,)),)),
            SessionEnded((ShardKeys(SHARD, bytes(16)),)),
            Damage(SHARD, bytes(16), 0, 1, 1, bytes(16), 0),
        ]
        for notice in notices:
            reached.owners.tell(OWNER, notice)
        await reached.owner.until(lambda: len(reached.owner.heard) == 3)
        assert reached.owner.heard == notices
