"""Calls to agents of the same process, encoded and decoded as over the network."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, cast

import msgspec

from ostraca_fabric.errors import (
    ConnectError,
    ProtocolError,
    RefusedError,
    UsageError,
)
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.ports.owners import AgentService
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.telemetry.requests import current_label
from ostraca_fabric.telemetry.status import PeerStatus
from ostraca_fabric.wire.codec import FROM_AGENT, TO_AGENT
from ostraca_fabric.wire.frames import HEADER_BYTES, encode
from ostraca_fabric.wire.messages import (
    AgentRequest,
    AnswerToAgent,
    Failure,
    Message,
    OwnerNotice,
    Release,
    Reserved,
    Resolved,
    ShardExtents,
    ShardRelease,
    ShardReservations,
)

log = logging.getLogger(__name__)


class LoopbackOwners:
    """``ports.owners.AgentNetwork`` for agents of a process.

    The agents share this instance and register here.
    """

    def __init__(self) -> None:
        """Begin without agents."""
        self.services: dict[AgentId, AgentService] = {}
        self._numbers = itertools.count(1)
        self._answering = Tasks("loopback owners")

    def register(self, agent: AgentId, service: AgentService) -> None:
        """Make an agent reachable."""
        self.services[agent] = service

    def unregister(self, agent: AgentId) -> None:
        """Make an agent unreachable, as if dead; pending answers still arrive."""
        self.services.pop(agent, None)

    def peers(self) -> tuple[PeerStatus, ...]:
        """Return no peers: all agents are in this process."""
        return ()

    async def finish(self) -> None:
        """Wait until every answer has arrived, also abandoned ones."""
        await self._answering.finish()

    async def ask(self, agent: AgentId, request: AgentRequest) -> AnswerToAgent:
        """Return the agent's answer.

        Raises TimeoutError and ConnectError as the port specifies.
        """
        service = self.services.get(agent)
        if service is None:
            raise ConnectError(f"agent {agent} is not in this process")
        numbered = msgspec.structs.replace(request, request=next(self._numbers), label=current_label())
        answer = _start(service, _encode(numbered))
        if isinstance(answer, bytes):
            return _decode(answer)
        answering = self._answering.spawn(answer)
        is_waited_for = False
        try:
            done, _ = await asyncio.wait([answering], timeout=max(0.0, request.deadline_s))
            is_waited_for = bool(done)
        finally:
            if not is_waited_for:
                answering.add_done_callback(lambda late: self._give_back(agent, late))
        if not done:
            raise TimeoutError(f"agent {agent} did not answer within {request.deadline_s:.3f} s")
        return _decode(answering.result())

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        """Deliver a notice, which needs no answer."""
        service = self.services.get(agent)
        if service is None:
            return
        payload = _encode(notice)
        try:
            service.notice(cast("OwnerNotice", FROM_AGENT.decode(payload)))
        except Exception:
            log.exception("A %s for agent %s failed", type(notice).__name__, agent)

    def _give_back(self, agent: AgentId, late: asyncio.Task[bytes]) -> None:
        """Release pins and reservations of an abandoned answer."""
        if late.cancelled():  # the owner was stopped
            return
        release = release_of(_decode(late.result()))
        if release is not None:
            self.tell(agent, release)


def _decode(payload: bytes) -> AnswerToAgent:
    return cast("AnswerToAgent", TO_AGENT.decode(payload))


def _start(service: AgentService, payload: bytes) -> bytes | Coroutine[Any, Any, bytes]:
    """Start a request; return the answer, or the coroutine to run.

    An immediate answer needs no task: for a lookup, the task would cost more than the work.
    """
    request = cast("AgentRequest", FROM_AGENT.decode(payload))
    try:
        answer = service.answer(request)
    except Exception as error:  # noqa: BLE001 (returned to the caller)
        return _encode_failure(request, error)
    return _await_answer(request, answer) if isinstance(answer, Awaitable) else _encode(answer)


async def _await_answer(request: AgentRequest, answer: Awaitable[AnswerToAgent]) -> bytes:
    try:
        return _encode(await answer)
    except Exception as error:  # noqa: BLE001 (returned to the caller)
        return _encode_failure(request, error)


def _encode_failure(request: AgentRequest, error: Exception) -> bytes:
    """Encode the service's exception, as a connection does."""
    if isinstance(error, ProtocolError | RefusedError):
        return _encode(Failure(request.request, error.code, str(error)))
    if isinstance(error, UsageError):
        return _encode(Failure(request.request, "usage", str(error)))
    log.error("A %s failed", type(request).__name__, exc_info=error)
    return _encode(Failure(request.request, "internal", "the agent failed: see the agent's log"))


def _encode(message: Message) -> bytes:
    return bytes(memoryview(encode(message))[HEADER_BYTES:])


def release_of(answer: Message) -> Release | None:
    """Build the Release for all pins and reservations in this answer, or None."""
    if not isinstance(answer, Resolved | Reserved):
        return None
    releases = tuple(release for part in answer.shards if (release := _of_shard(part)) is not None)
    return Release(releases) if releases else None


def _of_shard(part: ShardExtents | ShardReservations) -> ShardRelease | None:
    if isinstance(part, ShardExtents):
        return ShardRelease(part.shard, (part.pin,)) if part.pin else None
    return ShardRelease(part.shard, (), part.reservations) if part.reservations else None
