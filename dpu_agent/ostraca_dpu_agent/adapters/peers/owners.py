"""Calls to shard owners at other agents, and at agents of this process.

Each peer has one connection, made on first use (``peer_connection``). Requests are not batched: a data path's
request to a shard owner is a single message already. Messages of different workers also have different
deadlines and labels (docs/adr/0022).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, cast

import msgspec

from ostraca_dpu_agent.adapters.peers.loopback_owners import LoopbackOwners
from ostraca_dpu_agent.adapters.peers.peer_connection import Dial, PeerConnection, PeerSettings
from ostraca_fabric.connection import SOCKETS, ClientConnection, ConnectionSettings, Network, connect
from ostraca_fabric.errors import (
    ConnectError,
    FrameTooLongError,
    OstracaError,
    RefusedError,
)
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.ports.owners import AgentService, PendingAnswer
from ostraca_fabric.runtime.tasks import Tasks, in_task
from ostraca_fabric.telemetry.requests import current_label
from ostraca_fabric.telemetry.status import AskCounters, PeerStatus
from ostraca_fabric.wire.handshake import AGENT, hello_for
from ostraca_fabric.wire.messages import (
    AgentRequest,
    Answer,
    AnswerToAgent,
    Failure,
    Inspect,
    OwnerNotice,
    Resolve,
)

_SLACK_S = 0.001
"""Possible earliness of a loop's timers."""


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
        if agent in self._here.services:
            return self._here.ask(agent, request)
        if self._is_closed:
            return _fail("this agent is being stopped")
        if not self._address_of(agent):
            self._drop(agent)
            return _fail(f"no address of agent {agent} is known")
        return self._link(agent).ask(request)

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        """Send a notice, which needs no answer; lost unless the agent is connected."""
        if agent in self._here.services:
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


class Slots(asyncio.Semaphore):
    """Semaphore for the requests that a peer takes at once."""

    def take(self) -> bool:
        """Take a slot if one is free and no caller waits; return success."""
        if self.locked():
            return False
        self._value -= 1
        return True


class PeerLink(PeerConnection):
    """Requests to a peer over its connection, answered in any order.

    Beyond the peer's limit, requests wait in a bounded queue.
    """

    def __init__(
        self,
        agent: AgentId,
        settings: PeerSettings,
        *,
        addresses: Callable[[], tuple[str, ...]],
        dial: Dial,
        dice: random.Random,
        tasks: Tasks,
    ) -> None:
        """Begin unconnected, as ``PeerConnection``."""
        super().__init__(agent, settings, addresses=addresses, dial=dial, dice=dice, tasks=tasks)
        self._slots = Slots(0)
        self._waiting = 0
        self.inflight = 0
        self._asks = AskCounters()

    def status(self) -> PeerStatus:
        """Return the status of the link."""
        return PeerStatus(
            self.agent,
            is_connected=self._open_connection() is not None,
            is_held_off=not self._breaker.is_shut,
            held_off=self._breaker.opened,
            failures=self._failures,
            inflight=self.inflight,
            waiting=self._waiting,
            why=self._why,
            is_refused=self._is_refused,
            asks=msgspec.structs.replace(self._asks),
        )

    def ask(self, request: AgentRequest) -> PendingAnswer:
        """Send a request to the peer; await the result for the answer.

        The request is sent before this call returns, unless a wait is necessary. The await ends within the
        request's deadline. Too many waiting requests give ``Failure(overloaded)``. The await raises
        TimeoutError and ConnectError.
        """
        until_s = self._loop.time() + max(0.0, request.deadline_s)
        connection = self._connection
        if connection is not None and connection.is_open and self._breaker.is_shut and self._slots.take():
            with suppress(OstracaError):  # the second attempt reports the error
                return PeerRequest(self, connection, self._slots, request, until_s)
        return self._ask_later(request, until_s)

    async def _ask_later(self, request: AgentRequest, until_s: float) -> AnswerToAgent:
        try:
            sent = await self._send(request, until_s)
        except (TimeoutError, ConnectError) as error:
            self._count_outcome(error)
            raise
        if isinstance(sent, Failure):
            self._count_outcome(sent)
            return sent
        return await sent

    async def _send(self, request: AgentRequest, until_s: float) -> PeerRequest | Failure:
        """Send a request once the peer is connected and has a free slot."""
        self._check_available()
        await in_task()
        try:
            async with asyncio.timeout_at(until_s):
                connection = self._open_connection() or await self._connect_unless_backing_off()
                slots = self._slots  # slots belong to this connection; the next has its own
                if not await self._take_slot(slots):
                    return Failure(
                        request.request, "overloaded", f"too many requests wait for agent {self.agent}"
                    )
        except TimeoutError as error:
            raise timeout_error(self.agent, request.deadline_s) from error
        try:
            return PeerRequest(self, connection, slots, request, until_s)
        except (FrameTooLongError, RefusedError) as error:
            return Failure(request.request, error.code, str(error))

    def tell(self, notice: OwnerNotice) -> None:
        """Send a notice, which needs no answer, if the peer is connected."""
        connection = self._connection
        if connection is not None and connection.is_open:
            connection.tell(notice)

    async def _take_slot(self, slots: Slots) -> bool:
        """Wait for a free slot of the peer; return False when too many wait."""
        if slots.locked() and self._waiting >= self.settings.waiting_max:
            return False
        self._waiting += 1
        try:
            await slots.acquire()
        finally:
            self._waiting -= 1
        return True

    def _count_outcome(self, outcome: AnswerToAgent | BaseException) -> None:
        if isinstance(outcome, TimeoutError):
            self._asks.late += 1
        elif isinstance(outcome, ConnectError):
            self._asks.unreachable += 1
        elif isinstance(outcome, Failure):
            self._asks.refused += 1
        elif not isinstance(outcome, BaseException):
            self._asks.answered += 1

    def note_slow(self, request: PeerRequest) -> None:
        """Count a slow lookup as a failure.

        The lookup continues while the circuit breaker is closed.
        """
        self._overdue[request.answered] = None
        self._fail(f"a lookup had no answer within {self.settings.patience_s} s")

    def note_missed(self, request: PeerRequest, after_s: float) -> None:
        """Note a deadline that passed without an answer."""
        if after_s < self.settings.deadline_min_s:
            return
        if not request.is_quick:
            if not self._is_pinging:
                self._is_pinging = True
                self._tasks.spawn(self._check(request.connection))
        elif request.answered not in self._overdue:
            self._fail("a lookup missed its deadline")

    def note_end(self, request: PeerRequest, outcome: AnswerToAgent | BaseException) -> None:
        """Note the end of a request; release an abandoned answer's contents."""
        self.inflight -= 1
        self._count_outcome(outcome)
        answer, is_delivered = request.answered, not isinstance(outcome, BaseException)
        if answer in self._overdue:
            del self._overdue[answer]
        elif is_delivered and (self._why or self._breaker.failures):
            self._succeed()
        if not is_delivered and answer.done() and not answer.cancelled() and not answer.exception():
            self._give_back(request.connection, answer.result())

    def _use(self, connection: ClientConnection) -> None:
        """Use a new connection, with slots of its own."""
        super()._use(connection)
        # Keep a slot free for the Ping that distinguishes a slow peer from a dead peer.
        self._slots = Slots(max(1, connection.welcome.limits.inflight_max - 1))


class PeerRequest:
    """A request to await exactly once, to the end.

    The request is under way from its creation, without a task of its own. A caller can thus send requests to
    several agents before waiting for the first. An answer that no caller takes is given back:
    its pins and reservations would otherwise last until their timeouts.

    The request holds a slot of the peer until then. The await returns the answer, or raises TimeoutError
    and ConnectError.
    """

    def __init__(
        self,
        link: PeerLink,
        connection: ClientConnection,
        slots: Slots,
        request: AgentRequest,
        until_s: float,
    ) -> None:
        """Send the request; the caller has taken a slot.

        Raises as ``ClientConnection.submit``, after freeing the slot.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self.connection = connection
        self.is_quick = isinstance(request, Resolve | Inspect)
        """Whether the shard owner answers from memory."""

        self._deadline_s = request.deadline_s
        self._request = msgspec.structs.replace(
            request,
            request=connection.next_request_id(),
            deadline_s=max(0.0, until_s - began_s),
            label=current_label(),
        )
        try:
            self.answered: asyncio.Future[Answer] = connection.submit(self._request)
        except BaseException:
            slots.release()
            raise
        self._loop = loop
        self._link = link
        self._slots = slots
        self._began_s = began_s
        self._until_s = until_s
        first_s = min(until_s, began_s + link.settings.patience_s) if self.is_quick else until_s
        self._timer = loop.call_at(first_s, self._on_time)
        link.inflight += 1

    def __await__(self) -> Generator[Any, None, AnswerToAgent]:
        """Wait for the answer."""
        return self._wait().__await__()

    async def _wait(self) -> AnswerToAgent:
        outcome: AnswerToAgent | BaseException
        try:
            outcome = cast("AnswerToAgent", await self.answered)
        except BaseException as error:
            outcome = error
            now_s = self._loop.time()
            if now_s >= self._until_s - _SLACK_S and isinstance(error, TimeoutError | asyncio.CancelledError):
                self._link.note_missed(self, now_s - self._began_s)
            raise
        else:
            return outcome
        finally:
            self._timer.cancel()
            self.connection.forget(self._request.request)
            self._link.note_end(self, outcome)
            self._slots.release()

    def _on_time(self) -> None:
        if not self.answered.done() and self._loop.time() < self._until_s - _SLACK_S:
            self._timer = self._loop.call_at(self._until_s, self._on_time)
            self._link.note_slow(self)
        elif not self.answered.done():
            self.answered.set_exception(timeout_error(self._link.agent, self._deadline_s))


def timeout_error(agent: AgentId, deadline_s: float) -> TimeoutError:
    """Build the error for a missing answer."""
    return TimeoutError(f"agent {agent} did not answer within {deadline_s:.3f} s")
