"""Agents asked as an operator asks: implements ``admin.hands.Hands`` over the wire."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ostraca_fabric.connection import SOCKETS, connect
from ostraca_fabric.errors import (
    ConnectError,
    OlderAgentError,
    OstracaError,
    ProtocolError,
    RefusedError,
)
from ostraca_fabric.status import AgentStatus
from ostraca_fabric.wire.codec import read_body
from ostraca_fabric.wire.flash_work import read_answer
from ostraca_fabric.wire.handshake import OPERATOR, WorkerHandshake
from ostraca_fabric.wire.messages import (
    Failed,
    FlashWork,
    FlashWorked,
    Place,
    Placed,
    PrefetchDone,
    PrefetchFor,
    Status,
    StatusDone,
)
from ostraca_fabric.wire.placing import PLACING, Places

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from ostraca_fabric.chain import Span
    from ostraca_fabric.connection import Network
    from ostraca_fabric.connection.client import ClientConnection
    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.volume import VolumeRecord
    from ostraca_fabric.wire.flash_work import FlashAnswer, FlashAsk

_Answer = TypeVar("_Answer", Placed, PrefetchDone)

_MARGIN_S = 5.0
"""What an agent may take to say that it was too late."""

_STATUS_S = 5.0
_PLACE_S = 5.0


class AskedAgents:
    """The agents of the newest map. Each question has a connection of its own: they are few."""

    def __init__(
        self,
        newest_map: Callable[[], FabricMap],
        *,
        name: str,
        token: Callable[[], str],
        network: Network = SOCKETS,
    ) -> None:
        """Speak as *name*, with the fabric's *token*."""
        self._newest_map = newest_map
        self._name = name
        self._token = token
        self._network = network

    async def ask(self, agent: AgentId, ask: FlashAsk, deadline_s: float) -> FlashAnswer:
        """As in the port."""
        async with self._connected(agent) as connection:
            request = FlashWork(connection.next_request_id(), deadline_s, msgspec.msgpack.encode(ask))
            answer = await connection.ask(request, deadline_s + _MARGIN_S)
        if isinstance(answer, Failed):
            raise RefusedError(answer.code, answer.message)
        if not isinstance(answer, FlashWorked):
            raise ProtocolError(f"agent {agent} answered {type(answer).__name__}: is it of an older release?")
        return read_answer(answer.body)

    async def status(self, agent: AgentId) -> AgentStatus:
        """As in the port."""
        async with self._connected(agent) as connection:
            answer = await connection.ask(Status(connection.next_request_id()), _STATUS_S)
        if not isinstance(answer, StatusDone):
            raise ProtocolError(f"agent {agent} answered {type(answer).__name__}: is it of an older release?")
        return read_body(answer.body, AgentStatus)

    async def place(self, agent: AgentId, volume: VolumeRecord, span: Span) -> Places:
        """As in the port."""

        def request(number: int) -> Place:
            return Place(number, volume.tenant, volume.name, (span,))

        return read_body((await self._asked(agent, request, Placed, _PLACE_S)).body, Places)

    async def prefetch(
        self, agent: AgentId, volume: VolumeRecord, spans: Sequence[Span], deadline_s: float
    ) -> PrefetchDone:
        """As in the port."""

        def request(number: int) -> PrefetchFor:
            of_volume = (volume.tenant, volume.name, volume.incarnation)
            return PrefetchFor(number, deadline_s, *of_volume, tuple(spans))

        return await self._asked(agent, request, PrefetchDone, deadline_s + _MARGIN_S)

    async def _asked(
        self,
        agent: AgentId,
        request: Callable[[int], Place | PrefetchFor],
        answered: type[_Answer],
        timeout_s: float,
    ) -> _Answer:
        """Ask what only agents of this release know; *request* is made of its number."""
        async with self._connected(agent) as connection:
            if PLACING not in connection.welcome.features:
                raise OlderAgentError(f"agent {agent} is of an older release, without {PLACING}: upgrade it")
            answer = await connection.ask(request(connection.next_request_id()), timeout_s)
        if isinstance(answer, Failed):
            raise RefusedError(answer.code, answer.message)
        if not isinstance(answer, answered):
            raise ProtocolError(f"agent {agent} answered {type(answer).__name__}")
        return answer

    @asynccontextmanager
    async def _connected(self, agent: AgentId) -> AsyncIterator[ClientConnection]:
        record = self._newest_map().agents.get(agent)
        if record is None:
            raise ConnectError(f"agent {agent} is not in the fabric")
        hello = WorkerHandshake(OPERATOR, "", self._name, self._token(), (PLACING,)).hello
        last: OstracaError | None = None
        for address in record.addresses:
            try:
                connection = await connect(address, hello, network=self._network)
            except (OstracaError, OSError) as error:
                last = error if isinstance(error, OstracaError) else ConnectError(str(error))
                continue
            try:
                yield connection
            finally:
                connection.close()
            return
        raise last or ConnectError(f"agent {agent} says no address")
