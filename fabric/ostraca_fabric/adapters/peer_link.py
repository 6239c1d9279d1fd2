"""One agent elsewhere: the connection to it, and whether it is worth asking.

Requests share one connection and are answered in any order. It is made when it is first needed, and again
when it is lost, after pauses that double with each attempt that fails. Beyond what the peer takes at once,
requests wait in a bounded queue.

A breaker holds the peer off after failures in a row: attempts to reach it that fail or take longer than
``patience_s``; look-ups that are not answered by then or by their deadline; and, as other requests may
rightly take longer, a Ping that is sent when one of those misses its deadline. While it is open, requests
fail at once, look-ups that wait with them, and a Ping now and then tells whether the peer is back.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ostraca_fabric.adapters.handed_out import release_of
from ostraca_fabric.adapters.peer_request import PeerRequest, Slots, late
from ostraca_fabric.breaker import Breaker, BreakerSettings
from ostraca_fabric.errors import (
    AuthenticationError,
    ConnectError,
    FrameTooLongError,
    OstracaError,
    RefusedError,
)
from ostraca_fabric.status import AskCounters, PeerStatus
from ostraca_fabric.wire.messages import Failed, Ping

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from ostraca_fabric.connection import ClientConnection
    from ostraca_fabric.connection.client import Answer
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.ports.owners import Asked
    from ostraca_fabric.tasks import Tasks
    from ostraca_fabric.wire.messages import AgentRequest, AnswerToAgent, OwnerNotice

    Dial = Callable[[str, Callable[[Answer], None]], Awaitable[ClientConnection]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """How long an agent waits for others, and how often it tries."""

    patience_s: float = 0.2
    """A look-up that has not been answered for so long is held against the peer: owners answer from memory.
    Raise it where agents are far apart or short of processors, and misses show ``is_held_off``."""

    deadline_least_s: float = 0.05
    """Missing a deadline shorter than this says nothing of the peer."""

    waiting_max: int = 256
    """Requests to one peer that wait until it takes more; one more fails as overloaded."""

    backoff_s: float = 0.05
    """Pause after the first attempt to connect that failed; each further one doubles it."""

    backoff_max_s: float = 1.0
    """The longest pause. What an agent that comes back may go unnoticed for, in misses."""

    trial_s: float = 10.0
    """How long it may take to find out that a peer that is held off is back. An attempt to connect that takes
    longer goes on, and the next trial waits for it. Raise it where peers have more than two addresses and
    each may take the whole ``handshake_s`` to fail."""

    breaker: BreakerSettings = field(default_factory=lambda: BreakerSettings(open_s=0.5, open_max_s=1.0))
    """When a peer is held off. Not for as long as a drive: a Ping that is not answered holds nothing up, and
    whoever comes back is missed until one is."""


class PeerLink:
    """One peer. ``close`` it when it is not needed any more."""

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
        """Begin unconnected. *dial* connects to an address and is told what takes late answers; *tasks* are
        stopped by who made this.
        """
        self.agent = agent
        self._settings = settings
        self._addresses = addresses
        self._dial_one = dial
        self._dice = dice
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._breaker = Breaker(settings.breaker)
        self._connection: ClientConnection | None = None
        self._slots = Slots(0)
        self._connecting: asyncio.Task[None] | None = None
        self._slow: asyncio.TimerHandle
        self._arrivals: dict[
            asyncio.Future[ClientConnection], None
        ] = {}  # waiting for the connection, in order
        self._overdue: set[asyncio.Future[Answer]] = set()
        self._is_pinging = False
        self._waiting = 0
        self._inflight = 0
        self._failed_attempts = 0
        self._failures = 0
        self._asks = AskCounters()
        self._not_before_s = 0.0
        self._why = ""
        self._is_closed = False
        self._is_refused = False

    def status(self) -> PeerStatus:
        """Return how things stand."""
        return PeerStatus(
            self.agent,
            is_connected=self._open_connection() is not None,
            is_held_off=not self._breaker.is_shut,
            held_off=self._breaker.opened,
            failures=self._failures,
            inflight=self._inflight,
            waiting=self._waiting,
            why=self._why,
            is_refused=self._is_refused,
            asks=msgspec.structs.replace(self._asks),
        )

    def ask(self, request: AgentRequest) -> Asked:
        """Ask the peer; awaiting what this returns gives its answer, within the request's deadline.

        The request is sent before this returns, unless something must be waited for. ``Failed(overloaded)``
        when too many wait already. Awaiting it raises TimeoutError and ConnectError.
        """
        until_s = self._loop.time() + max(0.0, request.deadline_s)
        connection = self._open_connection()
        if connection is not None and self._breaker.is_shut and self._slots.take():
            with suppress(OstracaError):  # the second try says what it is
                return PeerRequest(self, connection, self._slots, request, until_s)
        return self._asked(request, until_s)

    async def _asked(self, request: AgentRequest, until_s: float) -> AnswerToAgent:
        try:
            sent = await self._sent(request, until_s)
        except (TimeoutError, ConnectError) as error:
            self._count(error)
            raise
        if isinstance(sent, Failed):
            self._count(sent)
            return sent
        return await sent

    async def _sent(self, request: AgentRequest, until_s: float) -> PeerRequest | Failed:
        """Send a request once the peer is connected, and takes one more."""
        self._pass()
        try:
            async with asyncio.timeout_at(until_s):
                connection = self._open_connection() or await self._connected()
                slots = self._slots  # the connection's own: the next one has others
                if not await self._got_one(slots):
                    return Failed(request.request, "overloaded", f"too much waits for agent {self.agent}")
        except TimeoutError as error:
            raise late(self.agent, request.deadline_s) from error
        try:
            return PeerRequest(self, connection, slots, request, until_s)
        except (FrameTooLongError, RefusedError) as error:
            return Failed(request.request, error.code, str(error))

    def tell(self, notice: OwnerNotice) -> None:
        """Send what needs no answer, if the peer is connected."""
        connection = self._open_connection()
        if connection is not None:
            connection.tell(notice)

    def close(self) -> None:
        """End the connection; who waits for it, or for an answer, is told."""
        self._is_closed = True
        self._end_arrivals(ConnectError("closed here"))
        if self._connection is not None:
            self._connection.close()

    async def wait_closed(self) -> None:
        """Wait until the connection is gone."""
        if self._connection is not None:
            await self._connection.wait_closed()

    # One request.

    def _pass(self) -> None:
        if self._is_closed:
            raise ConnectError("closed here")
        if self._breaker.is_shut:
            return
        if self._breaker.is_trial_due(self._loop.time()):
            self._breaker.begin_trial()
            self._tasks.spawn(self._try_again())
        raise ConnectError(f"agent {self.agent} is held off: {self._why}")

    async def _got_one(self, slots: Slots) -> bool:
        """Wait until the peer takes one more request; False when too many wait."""
        if slots.locked() and self._waiting >= self._settings.waiting_max:
            return False
        self._waiting += 1
        try:
            await slots.acquire()
        finally:
            self._waiting -= 1
        return True

    def _count(self, how: AnswerToAgent | BaseException) -> None:
        if isinstance(how, TimeoutError):
            self._asks.late += 1
        elif isinstance(how, ConnectError):
            self._asks.unreachable += 1
        elif isinstance(how, Failed):
            self._asks.refused += 1
        elif not isinstance(how, BaseException):
            self._asks.answered += 1

    # What requests that were sent tell.

    @property
    def patience_s(self) -> float:
        """How long a look-up may take before it is held against the peer."""
        return self._settings.patience_s

    def begun(self) -> None:
        """Count a request that was sent."""
        self._inflight += 1

    def slow(self, request: PeerRequest) -> None:
        """Count a look-up that takes too long as a failure; it goes on while the peer is not held off."""
        self._overdue.add(request.answered)
        self._fail(f"a look-up was not answered within {self._settings.patience_s} s")

    def missed(self, request: PeerRequest, after_s: float) -> None:
        """Note that a deadline passed without an answer."""
        if after_s < self._settings.deadline_least_s:
            return
        if not request.is_quick:
            if not self._is_pinging:
                self._is_pinging = True
                self._tasks.spawn(self._check(request.connection))
        elif request.answered not in self._overdue:
            self._fail("a look-up's deadline was missed")

    def ended(self, request: PeerRequest, how: AnswerToAgent | BaseException) -> None:
        """Note what became of a request; give back what nobody took."""
        self._inflight -= 1
        self._count(how)
        answer, is_taken = request.answered, not isinstance(how, BaseException)
        if answer in self._overdue:
            self._overdue.discard(answer)
        elif is_taken:
            self._succeed()
        if not is_taken and answer.done() and not answer.cancelled() and not answer.exception():
            self._give_back(request.connection, answer.result())

    def _give_back(self, connection: ClientConnection, answer: Answer) -> None:
        """Release what an answer hands out that nobody waits for any more."""
        release = release_of(answer)
        if release is not None:
            connection.tell(release)

    # Whether it is worth asking.

    def _succeed(self) -> None:
        self._breaker.succeed(self._loop.time())
        if self._breaker.is_shut:
            self._why = ""

    def _fail(self, why: str) -> None:
        self._failures += 1
        self._why = why
        if self._breaker.fail(self._loop.time()):
            log.warning("Agent %s is held off: %s", self.agent, why)
        if not self._breaker.is_shut:
            error = ConnectError(f"agent {self.agent} is held off: {why}")
            self._end_arrivals(error)
            for answer in self._overdue:
                if not answer.done():
                    answer.set_exception(error)

    async def _check(self, connection: ClientConnection) -> None:
        """Find out whether a peer that took long for something answers at all."""
        try:
            await self._ping(connection)
        except TimeoutError:
            self._fail(f"a Ping was not answered within {self._settings.patience_s} s")
        except (ConnectError, RefusedError):
            pass  # it is lost, and the next attempt tells; or it is so busy that it is there
        else:
            self._succeed()
        finally:
            self._is_pinging = False

    async def _try_again(self) -> None:
        """Find out whether a peer that is held off is back."""
        is_good = False
        connection = self._open_connection()
        try:
            async with asyncio.timeout(self._settings.trial_s):
                if connection is None:
                    connection = await self._arrived()
                await self._ping(connection)
            is_good = True
        except TimeoutError as error:
            self._failures += 1
            self._why = str(error) or f"it could not be reached within {self._settings.trial_s} s"
        except OstracaError as error:
            if connection is not None:  # the attempt to connect that fails counts itself, and says why
                self._why = str(error)
        finally:
            self._breaker.end_trial(self._loop.time(), is_good=is_good)
        if is_good:
            self._why = ""
            log.info("Agent %s is back", self.agent)

    async def _ping(self, connection: ClientConnection) -> None:
        await connection.ask(Ping(connection.next_request_id()), self._settings.patience_s)

    # The connection.

    def _open_connection(self) -> ClientConnection | None:
        connection = self._connection
        return connection if connection is not None and connection.is_open else None

    async def _connected(self) -> ClientConnection:
        """Wait for the connection; raises ConnectError."""
        left_s = self._not_before_s - self._loop.time()
        if left_s > 0:
            raise ConnectError(f"agent {self.agent} is tried again in {left_s:.3f} s: {self._why}")
        return await self._arrived()

    async def _arrived(self) -> ClientConnection:
        """Wait for the attempt to connect that is under way, or a new one."""
        if self._connecting is None or self._connecting.done():
            self._connecting = self._tasks.spawn(self._connect())
        arrival: asyncio.Future[ClientConnection] = self._loop.create_future()
        self._arrivals[arrival] = None
        try:
            return await arrival
        finally:
            self._arrivals.pop(arrival, None)

    async def _connect(self) -> None:
        """Connect for all who wait, and hold it against the peer when that fails or takes long.

        However it ends, nobody waits for it any more then.
        """
        why = "closed here"
        self._slow = self._loop.call_later(self._settings.patience_s, self._connects_slowly)
        try:
            connection = await self._dialled()
        except (OstracaError, OSError) as error:
            self._is_refused = isinstance(error, AuthenticationError)
            why = str(error)
            self._fail_attempt(why)
        except Exception:
            why = f"trying to reach agent {self.agent} crashed, and the log says where"
            self._fail_attempt(why)
            raise
        else:
            for arrival in self._arrivals:
                if not arrival.done():
                    arrival.set_result(connection)
        finally:
            self._slow.cancel()
            self._end_arrivals(ConnectError(why))

    def _connects_slowly(self) -> None:
        self._fail(f"it could not be reached within {self._settings.patience_s} s")
        if self._breaker.is_shut:
            self._slow = self._loop.call_later(self._settings.patience_s, self._connects_slowly)

    def _end_arrivals(self, error: ConnectError) -> None:
        for arrival in self._arrivals:
            if not arrival.done():
                arrival.set_exception(error)

    async def _dialled(self) -> ClientConnection:
        """Connect to the first address that leads to this agent. Raises OstracaError and OSError.

        One that can't be dialled here, as it wants a CA that is not set, is one that failed like any other.
        """
        error: OstracaError | OSError = ConnectError(f"no address of agent {self.agent} is known")
        for address in self._addresses():
            try:
                return await self._take(address)
            except (OstracaError, OSError) as problem:
                error = problem
        raise error

    def _fail_attempt(self, why: str) -> None:
        """Hold an attempt to connect against the peer, and put off the next one."""
        self._failed_attempts += 1
        pause_s = self._settings.backoff_s * 2 ** min(self._failed_attempts - 1, 32)
        pause_s = min(pause_s, self._settings.backoff_max_s) * self._dice.uniform(0.5, 1.0)
        self._not_before_s = self._loop.time() + pause_s
        self._fail(why)

    async def _take(self, address: str) -> ClientConnection:
        connection = await self._dial_one(address, lambda late: self._give_back(connection, late))
        if connection.welcome.agent != self.agent:
            connection.close()
            raise ConnectError(f"{address} is agent {connection.welcome.agent}, not {self.agent}")
        if self._is_closed:
            connection.close()
            raise ConnectError("closed here")
        # One is left for the Ping that tells a peer that is slow from one that is gone.
        self._slots = Slots(max(1, connection.welcome.limits.inflight_max - 1))
        self._connection = connection
        self._failed_attempts = 0
        self._is_refused = False
        return connection
