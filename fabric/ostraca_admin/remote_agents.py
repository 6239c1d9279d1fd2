"""Client of agents over the wire, in the role of an operator.

Implements ``ostraca_admin.agent_queries.BlockAgentClient``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from ostraca_fabric.connection import SOCKETS, Network, connect
from ostraca_fabric.connection.client import ClientConnection
from ostraca_fabric.errors import (
    ConnectError,
    OlderAgentError,
    OstracaError,
    ProtocolError,
    RefusedError,
)
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.telemetry.explain import BlockPlacements
from ostraca_fabric.telemetry.status import AgentStatus
from ostraca_fabric.wire.codec import read_body
from ostraca_fabric.wire.flash_work import FlashAnswer, FlashRequest, read_answer
from ostraca_fabric.wire.handshake import OPERATOR, PLACING, hello_for
from ostraca_fabric.wire.messages import (
    Failure,
    FlashWork,
    FlashWorkResult,
    PlacementAnswer,
    PlacementQuery,
    PrefetchDone,
    PrefetchFor,
    StatusDone,
    StatusRequest,
)

_Answer = TypeVar("_Answer", FlashWorkResult, StatusDone, PlacementAnswer, PrefetchDone)

_MARGIN_S = 5.0
"""Time for an agent's answer about a missed deadline."""

_STATUS_S = 5.0
_PLACE_S = 5.0


class RemoteAgents:
    """Client of the newest map's agents; each of the few requests opens a connection."""

    def __init__(
        self,
        newest_map: Callable[[], FabricMap],
        *,
        name: str,
        token: Callable[[], str],
        network: Network = SOCKETS,
    ) -> None:
        """Connect as *name*, with the fabric's *token*."""
        self._newest_map = newest_map
        self._name = name
        self._token = token
        self._network = network

    async def ask(self, agent: AgentId, ask: FlashRequest, deadline_s: float) -> FlashAnswer:
        """Request work on drives, as in the port."""
        body = msgspec.msgpack.encode(ask)
        result = await self._request(
            agent,
            lambda number: FlashWork(number, deadline_s, body),
            FlashWorkResult,
            deadline_s + _MARGIN_S,
        )
        return read_answer(result.body)

    async def status(self, agent: AgentId) -> AgentStatus:
        """Return the status, as in the port."""
        return read_body((await self._request(agent, StatusRequest, StatusDone, _STATUS_S)).body, AgentStatus)

    async def place(self, agent: AgentId, volume: VolumeRecord, span: Span) -> BlockPlacements:
        """Return the place of a block, as in the port."""
        answer = await self._request(
            agent,
            lambda number: PlacementQuery(number, volume.tenant, volume.name, (span,)),
            PlacementAnswer,
            _PLACE_S,
            PLACING,
        )
        return read_body(answer.body, BlockPlacements)

    async def prefetch(
        self, agent: AgentId, volume: VolumeRecord, spans: Sequence[Span], deadline_s: float
    ) -> PrefetchDone:
        """Request a prefetch, as in the port."""

        def request(number: int) -> PrefetchFor:
            of_volume = (volume.tenant, volume.name, volume.incarnation)
            return PrefetchFor(number, deadline_s, *of_volume, tuple(spans))

        return await self._request(agent, request, PrefetchDone, deadline_s + _MARGIN_S, PLACING)

    async def _request(
        self,
        agent: AgentId,
        request: Callable[[int], FlashWork | StatusRequest | PlacementQuery | PrefetchFor],
        answered: type[_Answer],
        timeout_s: float,
        feature: str = "",
    ) -> _Answer:
        """Send a request, made by *request* from a request number.

        Raises OlderAgentError if the agent lacks *feature*, and RefusedError on a refusal.
        """
        async with self._connected(agent) as connection:
            if feature and feature not in connection.welcome.features:
                raise OlderAgentError(f"agent {agent} lacks {feature}: upgrade the agent")
            answer = await connection.ask(request(connection.next_request_id()), timeout_s)
        if isinstance(answer, Failure):
            raise RefusedError(answer.code, answer.message)
        if not isinstance(answer, answered):
            raise ProtocolError(
                f"agent {agent} answered {type(answer).__name__} instead of {answered.__name__}: check its "
                "release"
            )
        return answer

    @asynccontextmanager
    async def _connected(self, agent: AgentId) -> AsyncIterator[ClientConnection]:
        record = self._newest_map().agents.get(agent)
        if record is None:
            raise ConnectError(f"agent {agent} is not in the fabric")
        hello = hello_for(OPERATOR, "", self._name, self._token(), (PLACING,))
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
        raise last or ConnectError(f"agent {agent} has no address: set its listen addresses")
