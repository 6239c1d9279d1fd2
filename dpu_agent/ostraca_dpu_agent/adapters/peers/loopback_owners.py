"""Calls to agents of the same process.

Messages are immutable and are passed as they are. A look-up of the agent's own shard would otherwise spend
most of its time in the codec.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any

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
        answer = _start(service, numbered)
        if not isinstance(answer, Coroutine):
            return answer
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
        return answering.result()

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        """Deliver a notice, which needs no answer."""
        service = self.services.get(agent)
        if service is None:
            return
        try:
            service.notice(notice)
        except Exception:
            log.exception("A %s for agent %s failed", type(notice).__name__, agent)

    def _give_back(self, agent: AgentId, late: asyncio.Task[AnswerToAgent]) -> None:
        """Release pins and reservations of an abandoned answer."""
        if late.cancelled():  # the owner was stopped
            return
        release = release_of(late.result())
        if release is not None:
            self.tell(agent, release)


def _start(
    service: AgentService, request: AgentRequest
) -> AnswerToAgent | Coroutine[Any, Any, AnswerToAgent]:
    """Start a request; return the answer, or the coroutine to run.

    An immediate answer needs no task: for a lookup, the task would cost more than the work.
    """
    try:
        answer = service.answer(request)
    except Exception as error:  # noqa: BLE001 (returned to the caller)
        return _failure(request, error)
    return _await_answer(request, answer) if isinstance(answer, Awaitable) else answer


async def _await_answer(request: AgentRequest, answer: Awaitable[AnswerToAgent]) -> AnswerToAgent:
    try:
        return await answer
    except Exception as error:  # noqa: BLE001 (returned to the caller)
        return _failure(request, error)


def _failure(request: AgentRequest, error: Exception) -> Failure:
    """Return the service's exception as a connection does."""
    if isinstance(error, ProtocolError | RefusedError):
        return Failure(request.request, error.code, str(error))
    if isinstance(error, UsageError):
        return Failure(request.request, "usage", str(error))
    log.error("A %s failed", type(request).__name__, exc_info=error)
    return Failure(request.request, "internal", "the agent failed: see the agent's log")


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
