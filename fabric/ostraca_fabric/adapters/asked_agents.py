"""Agents asked as an operator asks: implements ``admin.hands.Hands`` over the wire."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from ostraca_fabric.connection import SOCKETS, connect
from ostraca_fabric.errors import ConnectError, OstracaError, ProtocolError, RefusedError
from ostraca_fabric.status import AgentStatus
from ostraca_fabric.wire.codec import read_body
from ostraca_fabric.wire.flash_work import read_answer
from ostraca_fabric.wire.handshake import OPERATOR, WorkerHandshake
from ostraca_fabric.wire.messages import Failed, FlashWork, FlashWorked, Status, StatusDone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ostraca_fabric.connection import Network
    from ostraca_fabric.connection.client import ClientConnection
    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.wire.flash_work import FlashAnswer, FlashAsk

_MARGIN_S = 5.0
"""What an agent may take to say that it was too late."""

_STATUS_S = 5.0


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

    @asynccontextmanager
    async def _connected(self, agent: AgentId) -> AsyncIterator[ClientConnection]:
        record = self._newest_map().agents.get(agent)
        if record is None:
            raise ConnectError(f"agent {agent} is not in the fabric")
        hello = WorkerHandshake(OPERATOR, "", self._name, self._token()).hello
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
