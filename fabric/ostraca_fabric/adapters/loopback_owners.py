"""Owners in the same process, reached as if they were not: every call is encoded, handed over as bytes, and
decoded.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from ostraca_fabric.errors import ConnectError
from ostraca_fabric.tasks import Tasks
from ostraca_fabric.wire.codec import FROM_AGENT, TO_AGENT
from ostraca_fabric.wire.frames import HEADER_BYTES, encode

if TYPE_CHECKING:
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.wire.messages import Message, OwnerAnswer, OwnerNotice, OwnerRequest


class AnswersOwners(Protocol):
    """What an agent's owner role offers to movers."""

    async def answer(self, request: OwnerRequest) -> OwnerAnswer:
        """Answer a request."""

    def notice(self, notice: OwnerNotice) -> None:
        """Take a notice."""


class LoopbackOwners:
    """Implements ``ports.owners.Owners`` for agents of one process; they share one instance and register in
    it.
    """

    def __init__(self) -> None:
        """Begin with no agent."""
        self._services: dict[AgentId, AnswersOwners] = {}
        self._numbers = itertools.count(1)
        self._answering = Tasks("loopback owners")

    def register(self, agent: AgentId, service: AnswersOwners) -> None:
        """Make an agent reachable."""
        self._services[agent] = service

    def unregister(self, agent: AgentId) -> None:
        """Make an agent unreachable, as if it had died; answers under way still come."""
        self._services.pop(agent, None)

    async def ask(self, agent: AgentId, request: OwnerRequest) -> OwnerAnswer:
        """Return the owner's answer; raises TimeoutError and ConnectError as the port says."""
        service = self._services.get(agent)
        if service is None:
            message = f"agent {agent} is not in this process"
            raise ConnectError(message)
        numbered = msgspec.structs.replace(request, request=next(self._numbers))
        answering = self._answering.spawn(_answered(service, _payload(numbered)))
        done, _ = await asyncio.wait([answering], timeout=max(0.0, request.deadline_s))
        if not done:
            message = f"agent {agent} did not answer within {request.deadline_s:.3f} s"
            raise TimeoutError(message)
        return cast("OwnerAnswer", TO_AGENT.decode(answering.result()))

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        """Hand over what needs no answer."""
        service = self._services.get(agent)
        if service is not None:
            service.notice(cast("OwnerNotice", FROM_AGENT.decode(_payload(notice))))


async def _answered(service: AnswersOwners, payload: bytes) -> bytes:
    return _payload(await service.answer(cast("OwnerRequest", FROM_AGENT.decode(payload))))


def _payload(message: Message) -> bytes:
    return bytes(memoryview(encode(message))[HEADER_BYTES:])
