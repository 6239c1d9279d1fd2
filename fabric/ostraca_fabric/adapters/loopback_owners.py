"""Agents in the same process, reached as if they were not: every call is encoded, handed over as bytes, and
decoded.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ostraca_fabric.adapters.handed_out import release_of
from ostraca_fabric.errors import ConnectError, ProtocolError, RefusedError, UsageError
from ostraca_fabric.labels import current_label
from ostraca_fabric.tasks import Tasks
from ostraca_fabric.wire.codec import FROM_AGENT, TO_AGENT
from ostraca_fabric.wire.frames import HEADER_BYTES, encode
from ostraca_fabric.wire.messages import Failed

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.ports.owners import AnswersAgents
    from ostraca_fabric.status import PeerStatus
    from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, Message, OwnerNotice

log = logging.getLogger(__name__)


class LoopbackOwners:
    """Implements ``ports.owners.Reach`` for agents of one process; they share one instance and register in
    it.
    """

    def __init__(self) -> None:
        """Begin with no agent."""
        self._services: dict[AgentId, AnswersAgents] = {}
        self._numbers = itertools.count(1)
        self._answering = Tasks("loopback owners")

    def register(self, agent: AgentId, service: AnswersAgents) -> None:
        """Make an agent reachable."""
        self._services[agent] = service

    def unregister(self, agent: AgentId) -> None:
        """Make an agent unreachable, as if it had died; answers under way still come."""
        self._services.pop(agent, None)

    def has(self, agent: AgentId) -> bool:
        """Tell whether an agent is registered."""
        return agent in self._services

    def peers(self) -> tuple[PeerStatus, ...]:
        """Return nothing: nobody is elsewhere."""
        return ()

    async def finish(self) -> None:
        """Wait until every answer has come, also those that nobody waits for any more."""
        await self._answering.finish()

    async def ask(self, agent: AgentId, request: AgentRequest) -> AnswerToAgent:
        """Return the agent's answer; raises TimeoutError and ConnectError as the port says."""
        service = self._services.get(agent)
        if service is None:
            message = f"agent {agent} is not in this process"
            raise ConnectError(message)
        numbered = msgspec.structs.replace(request, request=next(self._numbers), label=current_label())
        answer = _begun(service, _payload(numbered))
        if isinstance(answer, bytes):
            return _decoded(answer)
        answering = self._answering.spawn(answer)
        is_waited_for = False
        try:
            done, _ = await asyncio.wait([answering], timeout=max(0.0, request.deadline_s))
            is_waited_for = bool(done)
        finally:
            if not is_waited_for:
                answering.add_done_callback(lambda late: self._give_back(agent, late))
        if not done:
            message = f"agent {agent} did not answer within {request.deadline_s:.3f} s"
            raise TimeoutError(message)
        return _decoded(answering.result())

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        """Hand over what needs no answer."""
        service = self._services.get(agent)
        if service is None:
            return
        payload = _payload(notice)
        try:
            service.notice(cast("OwnerNotice", FROM_AGENT.decode(payload)))
        except Exception:
            log.exception("A %s for agent %s failed", type(notice).__name__, agent)

    def _give_back(self, agent: AgentId, late: asyncio.Task[bytes]) -> None:
        """Release what an answer hands out that nobody waits for any more."""
        if late.cancelled():  # the owner was stopped
            return
        release = release_of(_decoded(late.result()))
        if release is not None:
            self.tell(agent, release)


def _decoded(payload: bytes) -> AnswerToAgent:
    return cast("AnswerToAgent", TO_AGENT.decode(payload))


def _begun(service: AnswersAgents, payload: bytes) -> bytes | Coroutine[Any, Any, bytes]:
    """Have a request served; return the answer, or what to run for it.

    An answer that needs no waiting takes no task: a look-up would spend more on that than on looking.
    """
    request = cast("AgentRequest", FROM_AGENT.decode(payload))
    try:
        answer = service.answer(request)
    except Exception as error:  # noqa: BLE001 (told to who asked)
        return _failed(request, error)
    return _answered(request, answer) if isinstance(answer, Awaitable) else _payload(answer)


async def _answered(request: AgentRequest, answer: Awaitable[AnswerToAgent]) -> bytes:
    try:
        return _payload(await answer)
    except Exception as error:  # noqa: BLE001 (told to who asked)
        return _failed(request, error)


def _failed(request: AgentRequest, error: Exception) -> bytes:
    """Tell what the service raised, as a connection does."""
    if isinstance(error, ProtocolError | RefusedError):
        return _payload(Failed(request.request, error.code, str(error)))
    if isinstance(error, UsageError):
        return _payload(Failed(request.request, "usage", str(error)))
    log.error("A %s failed", type(request).__name__, exc_info=error)
    return _payload(Failed(request.request, "internal", "the agent failed; its log says why"))


def _payload(message: Message) -> bytes:
    return bytes(memoryview(encode(message))[HEADER_BYTES:])
