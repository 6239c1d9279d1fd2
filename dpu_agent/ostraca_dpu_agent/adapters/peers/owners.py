"""Calls to shard owners: agents of this process, and of others over the network.

Calls within the process are encoded and decoded too, as over the network. Each peer has one connection, made
on first use (``peer_link``). Requests are not batched: a data path's request to a shard owner is a single
message already. Messages of different workers also have different deadlines and labels (docs/adr/0022).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import msgspec

from ostraca_dpu_agent.adapters.peers.peer_link import PeerLink, PeerSettings
from ostraca_dpu_agent.adapters.peers.peer_request import release_of
from ostraca_fabric.connection import SOCKETS, ClientConnection, ConnectionSettings, Network, connect
from ostraca_fabric.errors import ConnectError, ProtocolError, RefusedError, UsageError
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.ports.owners import AgentService, PendingAnswer
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.telemetry.requests import current_label
from ostraca_fabric.telemetry.status import PeerStatus
from ostraca_fabric.wire.codec import FROM_AGENT, TO_AGENT
from ostraca_fabric.wire.frames import HEADER_BYTES, encode
from ostraca_fabric.wire.handshake import AGENT, hello_for
from ostraca_fabric.wire.messages import AgentRequest, Answer, AnswerToAgent, Failure, Message, OwnerNotice


class NetworkOwners:
    """Implementation of ``ports.owners.AgentNetwork``.

    The creator closes the instance after the agents have left.
    """

    def __init__(
        self,
        own: AgentId,
        *,
        here: LoopbackOwners,
        address_of: Callable[[AgentId], tuple[str, ...] | None],
        dice: random.Random,
        settings: PeerSettings | None = None,
        connections: ConnectionSettings | None = None,
        token: Callable[[], str] = str,
        network: Network = SOCKETS,
    ) -> None:
        """Reach agents registered *here* without a connection.

        *address_of* returns the current addresses of any other agent, if known. *own* is this
        agent's name for others. *token* provides the fabric token of each connection, empty for none.
        """
        self._own = own
        self._here = here
        self._address_of = address_of
        self._dice = dice
        self._settings = settings or PeerSettings()
        self._connections = connections
        self._token = token
        self._network = network
        self._links: dict[AgentId, PeerLink] = {}
        self._tasks = Tasks(f"connections of {own}")
        self._is_closed = False

    def register(self, agent: AgentId, service: AgentService) -> None:
        """Make an agent of this process reachable within the process."""
        self._here.register(agent, service)

    def unregister(self, agent: AgentId) -> None:
        """Make an agent of this process unreachable within the process."""
        self._here.unregister(agent)

    def peers(self) -> tuple[PeerStatus, ...]:
        """Return the status of each called agent in the fabric, by id."""
        return tuple(link.status() for agent, link in sorted(self._links.items()) if self._address_of(agent))

    def ask(self, agent: AgentId, request: AgentRequest) -> PendingAnswer:
        """Ask an agent. Await the result for the answer.

        The await raises TimeoutError and ConnectError as the port specifies.
        """
        if self._here.has(agent):
            return self._here.ask(agent, request)
        if self._is_closed:
            return _fail("this agent is being stopped")
        if not self._address_of(agent):
            self._drop(agent)
            return _fail(f"no address of agent {agent} is known")
        return self._link(agent).ask(request)

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        """Send a notice, which needs no answer; lost unless the agent is connected."""
        if self._here.has(agent):
            self._here.tell(agent, notice)
        elif agent in self._links:
            self._links[agent].tell(notice)

    async def close(self) -> None:
        """End every connection."""
        self._is_closed = True
        await self._tasks.stop()
        links, self._links = self._links, {}
        for link in links.values():
            link.close()
        for link in links.values():
            await link.wait_closed()

    def _link(self, agent: AgentId) -> PeerLink:
        link = self._links.get(agent)
        if link is None:
            for gone in [each for each in self._links if not self._address_of(each)]:
                self._drop(gone)  # such links may never be used again, and would accumulate
            link = self._links[agent] = PeerLink(
                agent,
                self._settings,
                addresses=lambda: self._address_of(agent) or (),
                dial=self._dial,
                dice=self._dice,
                tasks=self._tasks,
            )
        return link

    def _drop(self, agent: AgentId) -> None:
        """Forget an agent that has left the fabric."""
        link = self._links.pop(agent, None)
        if link is not None:
            link.close()

    async def _dial(self, address: str, on_late: Callable[[Answer], None]) -> ClientConnection:
        hello = hello_for(AGENT, "", self._own, self._token())
        return await connect(
            address, hello, settings=self._connections, on_late=on_late, network=self._network
        )


async def _fail(why: str) -> AnswerToAgent:
    raise ConnectError(why)


log = logging.getLogger(__name__)


class LoopbackOwners:
    """``ports.owners.AgentNetwork`` for agents of a process.

    The agents share this instance and register here.
    """

    def __init__(self) -> None:
        """Begin without agents."""
        self._services: dict[AgentId, AgentService] = {}
        self._numbers = itertools.count(1)
        self._answering = Tasks("loopback owners")

    def register(self, agent: AgentId, service: AgentService) -> None:
        """Make an agent reachable."""
        self._services[agent] = service

    def unregister(self, agent: AgentId) -> None:
        """Make an agent unreachable, as if dead; pending answers still arrive."""
        self._services.pop(agent, None)

    def has(self, agent: AgentId) -> bool:
        """Return whether an agent is registered."""
        return agent in self._services

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
        service = self._services.get(agent)
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
        service = self._services.get(agent)
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
