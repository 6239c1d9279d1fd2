"""Connection to an agent in another process, with a circuit breaker.

The connection is made on first use, and again after a loss; the pause doubles with each failed attempt.

The circuit breaker opens after consecutive failures. Failures are: connection attempts that fail or exceed
``patience_s``; lookups without an answer within this time or their deadline. Other requests may rightly
take longer: after a missed deadline of such a request, a Ping is sent, and an unanswered Ping also counts
as a failure. While the breaker is open, requests fail at once, including waiting lookups. A periodic Ping
detects the peer's return.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ostraca_dpu_agent.adapters.peers.loopback_owners import release_of
from ostraca_fabric.connection import ClientConnection
from ostraca_fabric.errors import (
    AuthenticationError,
    ConnectError,
    OstracaError,
    RefusedError,
)
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.policies.backoff import Backoff
from ostraca_fabric.policies.circuit_breaker import Breaker, BreakerSettings
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.wire.messages import (
    Answer,
    Ping,
)

Dial = Callable[[str, Callable[[Answer], None]], Awaitable[ClientConnection]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Waits for other agents, and intervals of attempts."""

    patience_s: float = 0.2
    """Longest time of a lookup before a failure of the peer is counted: owners answer from memory. Raise it
    where agents are far apart or short of processors, and misses show ``is_held_off``.
    """

    deadline_min_s: float = 0.05
    """A missed deadline shorter than this says nothing about the peer."""

    waiting_max: int = 256
    """Requests waiting for a peer; further requests fail as overloaded."""

    backoff_s: float = 0.05
    """Pause after the first failed attempt to connect; each further failure doubles the pause."""

    backoff_max_s: float = 1.0
    """The longest pause; for this time, a returned agent may still cause misses."""

    trial_s: float = 10.0
    """Longest trial of a peer with an open circuit breaker. A longer attempt to connect continues, and the
    next trial waits for the attempt. Raise this where peers have more than two addresses and each may take
    the whole ``handshake_s`` to fail.
    """

    breaker: BreakerSettings = field(default_factory=lambda: BreakerSettings(open_s=0.5, open_max_s=1.0))
    """Circuit breaker of a peer. Shorter than for a drive: an unanswered Ping delays no request, and a
    returned peer causes misses until a Ping is answered.
    """


class PeerConnection:
    """Connection to a peer. ``close`` after use."""

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
        """Begin unconnected.

        *dial* connects to an address and receives the handler of late answers. The creator stops *tasks*.
        """
        self.agent = agent
        self.settings = settings
        self._addresses = addresses
        self._dialer = dial
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._breaker = Breaker(settings.breaker)
        self._connection: ClientConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._slow: asyncio.TimerHandle
        self._arrivals: dict[
            asyncio.Future[ClientConnection], None
        ] = {}  # waiting for the connection, in order
        self._overdue: dict[asyncio.Future[Answer], None] = {}  # answers that are late, in order
        self._is_pinging = False
        first_s = min(settings.backoff_s, settings.backoff_max_s)
        self._backoff = Backoff(first_s, settings.backoff_max_s, dice)
        self._failures = 0
        self._not_before_s = 0.0
        self._why = ""
        self._is_closed = False
        self._is_refused = False

    def close(self) -> None:
        """Close the connection; waiting callers get an error."""
        self._is_closed = True
        self._end_arrivals(ConnectError("closed by this agent"))
        if self._connection is not None:
            self._connection.close()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""
        if self._connection is not None:
            await self._connection.wait_closed()

    def _check_available(self) -> None:
        if self._is_closed:
            raise ConnectError("closed by this agent")
        if self._breaker.is_shut:
            return
        if self._breaker.is_trial_due(self._loop.time()):
            self._breaker.begin_trial()
            self._tasks.spawn(self._try_again())
        raise ConnectError(f"circuit breaker of agent {self.agent} is open: {self._why}")

    def _succeed(self) -> None:
        if self._breaker.failures or not self._breaker.is_shut:
            self._breaker.succeed(self._loop.time())
        if self._breaker.is_shut:
            self._why = ""

    def _fail(self, why: str) -> None:
        self._failures += 1
        self._why = why
        if self._breaker.fail(self._loop.time()):
            log.warning("Circuit breaker of agent %s opens: %s", self.agent, why)
        if not self._breaker.is_shut:
            error = ConnectError(f"circuit breaker of agent {self.agent} is open: {why}")
            self._end_arrivals(error)
            for answer in self._overdue:
                if not answer.done():
                    answer.set_exception(error)

    async def _check(self, connection: ClientConnection) -> None:
        """Check by Ping that a slow peer answers at all."""
        try:
            await self._ping(connection)
        except TimeoutError:
            self._fail(f"a Ping had no answer within {self.settings.patience_s} s")
        except (ConnectError, RefusedError):
            pass  # a lost connection: the next attempt tells; refused as busy: the peer is alive
        else:
            self._succeed()
        finally:
            self._is_pinging = False

    async def _try_again(self) -> None:
        """Probe whether the peer is back while the circuit breaker is open."""
        is_good = False
        connection = self._open_connection()
        try:
            async with asyncio.timeout(self.settings.trial_s):
                if connection is None:
                    connection = await self._next_connection()
                await self._ping(connection)
            is_good = True
        except TimeoutError as error:
            self._failures += 1
            self._why = str(error) or f"unreachable for {self.settings.trial_s} s"
        except OstracaError as error:
            if connection is not None:  # a failed attempt reports itself
                self._why = str(error)
        finally:
            self._breaker.end_trial(self._loop.time(), is_good=is_good)
        if is_good:
            self._why = ""
            log.info("Agent %s answers again", self.agent)

    async def _ping(self, connection: ClientConnection) -> None:
        await connection.ask(Ping(connection.next_request_id()), self.settings.patience_s)

    def _open_connection(self) -> ClientConnection | None:
        connection = self._connection
        return connection if connection is not None and connection.is_open else None

    async def _connect_unless_backing_off(self) -> ClientConnection:
        """Wait for the connection. Raises ConnectError."""
        left_s = self._not_before_s - self._loop.time()
        if left_s > 0:
            raise ConnectError(f"next attempt to reach agent {self.agent} in {left_s:.3f} s: {self._why}")
        return await self._next_connection()

    async def _next_connection(self) -> ClientConnection:
        """Wait for the current attempt to connect, or a new attempt."""
        if self._connecting is None or self._connecting.done():
            self._connecting = self._tasks.spawn(self._connect())
        arrival: asyncio.Future[ClientConnection] = self._loop.create_future()
        self._arrivals[arrival] = None
        try:
            return await arrival
        finally:
            self._arrivals.pop(arrival, None)

    async def _connect(self) -> None:
        """Connect for all waiting callers.

        A failed or slow attempt counts against the peer. At the end, no caller waits any more.
        """
        why = "closed by this agent"
        self._slow = self._loop.call_later(self.settings.patience_s, self._connects_slowly)
        try:
            connection = await self._dial()
        except (OstracaError, OSError) as error:
            self._is_refused = isinstance(error, AuthenticationError)
            why = str(error)
            self._fail_attempt(why)
        except Exception:
            why = f"connecting to agent {self.agent} crashed: see the log"
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
        self._fail(f"unreachable for {self.settings.patience_s} s")
        if self._breaker.is_shut:
            self._slow = self._loop.call_later(self.settings.patience_s, self._connects_slowly)

    def _end_arrivals(self, error: ConnectError) -> None:
        for arrival in self._arrivals:
            if not arrival.done():
                arrival.set_exception(error)

    async def _dial(self) -> ClientConnection:
        """Connect to the first address that leads to this agent.

        An address that can't be dialled, for example without the required CA, counts as a failed attempt.
        Raises OstracaError and OSError.
        """
        error: OstracaError | OSError = ConnectError(f"no address of agent {self.agent} is known")
        for address in self._addresses():
            try:
                return await self._dial_address(address)
            except (OstracaError, OSError) as problem:
                error = problem
        raise error

    def _fail_attempt(self, why: str) -> None:
        """Count a failed attempt to connect, and delay the next."""
        self._not_before_s = self._loop.time() + self._backoff.next_s()
        self._fail(why)

    async def _dial_address(self, address: str) -> ClientConnection:
        connection = await self._dialer(address, lambda late: self._give_back(connection, late))
        if connection.welcome.agent != self.agent:
            connection.close()
            raise ConnectError(f"{address} is agent {connection.welcome.agent}, not {self.agent}")
        if self._is_closed:
            connection.close()
            raise ConnectError("closed by this agent")
        self._use(connection)
        return connection

    def _give_back(self, connection: ClientConnection, answer: Answer) -> None:
        """Release pins and reservations of an abandoned answer."""
        release = release_of(answer)
        if release is not None:
            connection.tell(release)

    def _use(self, connection: ClientConnection) -> None:
        """Use a new connection from now on."""
        self._connection = connection
        self._backoff.reset()
        self._is_refused = False
