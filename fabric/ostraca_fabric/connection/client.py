"""Connecting end: sends requests and matches answers to requests by id.

For agents that query other shard owners, and for asyncio programs. The blocking SDK has a front end of its
own over the same wire.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import typing
from collections.abc import Callable
from contextlib import suppress

from ostraca_fabric.connection.framed import FramedConnection
from ostraca_fabric.connection.network import SOCKETS, Network
from ostraca_fabric.connection.streams import ConnectionSettings
from ostraca_fabric.errors import ConnectError, ProtocolError, RefusedError, UsageError
from ostraca_fabric.sockets.tls import HUNG_UP, in_words
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.address import TlsAddress, parse_address
from ostraca_fabric.wire.handshake import AGENT, OPERATOR, WORKER, accepted
from ostraca_fabric.wire.messages import (
    Answer,
    Cancel,
    Fetch,
    GetExtents,
    GetProgress,
    Hello,
    Leaving,
    OwnerNotice,
    Refused,
    Request,
    Settled,
    Welcome,
    WorkerNotice,
)

log = logging.getLogger(__name__)

Aside = GetProgress | GetExtents | Settled | Fetch | Leaving
"""Messages of an agent besides its answers."""

_ACCEPTED: dict[str, codec.MessageDecoder[typing.Any]] = {
    WORKER: codec.TO_WORKER,
    AGENT: codec.TO_AGENT,
    OPERATOR: codec.TO_OPERATOR,
}


class ClientConnection(FramedConnection):
    """Connection to an agent after the Welcome. Created by ``connect``."""

    def __init__(
        self,
        settings: ConnectionSettings,
        address: str,
        hello: Hello,
        on_aside: Callable[[Aside], None] | None,
        on_late: Callable[[Answer], None] | None,
    ) -> None:
        super().__init__(settings)
        self._address = address
        self._hello = hello
        self._on_aside = on_aside
        self._on_late = on_late
        self._welcome: asyncio.Future[Welcome] = self._loop.create_future()
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count(1)
        self._end = ""

    @property
    def peer(self) -> str:
        """Name of the connected agent, for messages."""
        return f"the agent at {self._address}"

    @property
    def welcome(self) -> Welcome:
        """The agent's Welcome: identity and limits."""
        return self._welcome.result()

    @property
    def is_welcome(self) -> bool:
        """Whether the handshake has succeeded."""
        return self._welcome.done() and not self._welcome.cancelled() and self._welcome.exception() is None

    def next_request_id(self) -> int:
        """Return an id unused by earlier requests of this connection.

        For callers without ids of their own.
        """
        return next(self._numbers)

    async def ask(self, request: Request, timeout_s: float) -> Answer:
        """Send a request and return the final answer, which may be a ``Failure``.

        Request ids must differ for as long as an answer may still arrive, also after a timeout. Raises
        TimeoutError; ConnectError if the connection is closed or closes. Without sending, raises RefusedError
        at the agent's limit of requests in progress, and FrameTooLongError for a request above the agent's
        limit.
        """
        answer = self.submit(request)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise TimeoutError(f"{self.peer} did not answer within {timeout_s:.3f} s") from error
        finally:
            self.forget(request.request)

    def submit(self, request: Request) -> asyncio.Future[Answer]:
        """Send a request and return the future of the final answer; raises as ``ask`` does.

        Call ``forget`` after the answer has arrived, or if no caller waits for the answer any more.
        """
        if request.request in self._pending:
            raise UsageError(
                f"request {request.request} is in progress already: take ids from next_request_id()"
            )
        inflight_max = self.welcome.limits.inflight_max
        if len(self._pending) >= inflight_max:
            raise RefusedError(
                "overloaded", f"{inflight_max} requests to {self.peer} are in progress: wait for an answer"
            )
        self.send(request)
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._pending[request.request] = answer
        return answer

    def forget(self, request: int) -> None:
        """Stop waiting for a request; cancel the request unless the agent has answered."""
        answer = self._pending.pop(request)
        if not answer.done() or answer.cancelled() or answer.exception() is not None:
            self.tell(Cancel(request))

    def tell(self, notice: WorkerNotice | OwnerNotice) -> None:
        """Send a notice, which needs no answer; a closed connection loses the notice."""
        with suppress(ConnectError):
            self.send(notice)

    async def opened(self) -> None:
        """Wait for the Welcome. Raises as ``connect`` does."""
        await self._welcome

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send Hello."""
        super().connection_made(transport)
        with suppress(ConnectError):  # ``on_closed`` reports a missing line
            self.send(self._hello)

    def on_message(self, payload: bytes) -> None:
        """Process one message."""
        if not self._welcome.done():
            self._on_hello_answer(codec.HELLO_ANSWER.decode(payload))
            return
        message = _ACCEPTED[self._hello.role].decode(payload)
        match message:
            case Refused(code, words):
                self._end = f"the peer ended the connection ({code}): {words}"
                self.close()
            case GetProgress() | GetExtents() | Settled() | Fetch() | Leaving():
                if self._on_aside is not None:
                    self._on_aside(message)
            case _:
                waiting = self._pending.get(message.request)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
                elif self._on_late is not None:
                    self._on_late(message)

    def on_broken(self, error: ProtocolError) -> None:
        """Close a connection to a peer that breaks the wire protocol."""
        log.warning("Closed the connection to %s (%s): %s", self.peer, error.code, error)
        self._end = f"the peer broke the wire protocol: {error}"
        if not self._welcome.done():
            self._welcome.set_exception(error)
        self.close()

    def on_closed(self, error: Exception | None) -> None:
        """Fail the handshake and all pending requests."""
        if error is not None and not self._end:
            self._end = in_words(error) if isinstance(error, OSError) else str(error)
        if not self._welcome.done():
            is_tls = isinstance(parse_address(self._address), TlsAddress)
            self._end = self._end or (HUNG_UP if is_tls else "")
            self._welcome.set_exception(self._closed_error())
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._closed_error())

    def _on_hello_answer(self, answer: Welcome | Refused) -> None:
        try:
            welcome = accepted(self._hello, answer)
        except ConnectError as error:
            self._welcome.set_exception(error)
            self.close()
            return
        self._reader.frame_bytes_max = self._sent_bytes_max = welcome.limits.frame_bytes_max
        self._welcome.set_result(welcome)

    def _closed_error(self) -> ConnectError:
        return ConnectError(f"the connection to {self.peer} is closed" + (self._end and f": {self._end}"))


async def connect(
    address: str,
    hello: Hello,
    *,
    settings: ConnectionSettings | None = None,
    on_aside: Callable[[Aside], None] | None = None,
    on_late: Callable[[Answer], None] | None = None,
    network: Network = SOCKETS,
) -> ClientConnection:
    """Connect to an agent and complete the handshake within ``handshake_s``.

    *on_aside* receives the agent's other messages, in order with the answers. *on_late* receives answers that
    no caller waits for. Raises UsageError for an invalid address; AuthenticationError, VersionError or
    ConnectError after the agent's refusal; ConnectError for an unreachable agent; ProtocolError for a peer
    that is no agent.
    """
    chosen = settings or ConnectionSettings()
    where = parse_address(address)
    connection = ClientConnection(chosen, address, hello, on_aside, on_late)
    try:
        async with asyncio.timeout(chosen.handshake_s):
            await network.dial(where, connection)
            await connection.opened()
    except TimeoutError as error:
        raise ConnectError(
            f"no Welcome from {address} within {chosen.handshake_s} s: check that an agent listens there, "
            "and is neither stopped nor overloaded"
        ) from error
    except ConnectError:
        raise
    except OSError as error:
        raise ConnectError(f"can't reach an agent at {address}: {in_words(error)}") from error
    finally:
        if not connection.is_welcome:
            connection.abort()
    return connection
