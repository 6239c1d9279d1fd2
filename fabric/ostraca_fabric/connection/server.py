"""Agent's end: accepts connections after the handshake, runs requests, answers.

A violation on one connection ends only that connection, with a Refused that gives the reason and one line in
the log. A request counts until the final answer has been handed to the socket. A request above
``inflight_max`` gets ``Failure(overloaded)`` and costs nothing more.

A request's task is never cancelled from outside: transfers may be in progress, and only the handler knows
when their memory is free. ``Cancel``, the end of the connection and the end of the server end a future for
the handler to check.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from typing import Any, Protocol

from ostraca_fabric.connection.framed import FramedConnection
from ostraca_fabric.connection.network import SOCKETS, Listening, Network, peer_process, peer_uid, secured
from ostraca_fabric.connection.streams import ConnectionSettings
from ostraca_fabric.errors import (
    ConnectError,
    FrameTooLongError,
    ProtocolError,
    RefusedError,
    TransportError,
    UsageError,
    shown,
)
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.address import Address, parse_address
from ostraca_fabric.wire.handshake import (
    AGENT,
    LEAVING,
    OPERATOR,
    ROLES,
    WORKER,
    Access,
    AgentHandshake,
    PeerCertificate,
)
from ostraca_fabric.wire.messages import (
    Answer,
    Cancel,
    Damage,
    DirectDrives,
    EndSession,
    ExtentsRead,
    Failure,
    Hello,
    Leaving,
    Notice,
    Ping,
    Pong,
    Refused,
    RegionsOffer,
    Release,
    Request,
    SessionEnded,
    Welcome,
)

log = logging.getLogger(__name__)


_ACCEPTED: dict[str, codec.MessageDecoder[Any]] = {
    WORKER: codec.FROM_WORKER,
    AGENT: codec.FROM_AGENT,
    OPERATOR: codec.FROM_OPERATOR,
}


class Handler(Protocol):
    """Agent's handling of its connections. A single handler serves all connections."""

    async def on_open(self, connection: ServerConnection, hello: Hello, peer_uid: int | None) -> None:
        """Prepare for a connection accepted by the handshake, before the Welcome is sent.

        ``connection.welcome`` is the Welcome. RefusedError and TransportError refuse the connection instead.
        """

    def handle(self, connection: ServerConnection, request: Request) -> Answer | Awaitable[Answer]:
        """Serve one request: return the final answer, or an awaitable, which takes a task.

        RefusedError, UsageError and ProtocolError become ``Failure`` with their code. Other exceptions become
        ``Failure(internal)`` with a traceback in the log. Check ``connection.cancelled(request.request)`` to
        stop early.
        """

    def on_notice(self, connection: ServerConnection, notice: Notice) -> None:
        """Process a notice, which needs no answer, or the cancellation of an answered request."""

    def on_close(self, connection: ServerConnection) -> None:
        """Handle the end of the connection, while some of its requests may still run.

        Called once after each ``on_open`` that returned.
        """


class _Phase(Enum):
    NEW = auto()
    OPENING = auto()
    OPEN = auto()


class ServerConnection(FramedConnection):
    """Connection accepted by this agent."""

    welcome: Welcome
    hello: Hello

    def __init__(self, server: Server) -> None:
        super().__init__(server.settings)
        self._server = server
        self._phase = _Phase.NEW
        self._peer_uid: int | None = None
        self.peer_process = 0
        """Process of the peer on this host, according to the kernel; 0 if unknown."""

        self._secured: PeerCertificate | None = None
        self._under_way: dict[int, asyncio.Future[None]] = {}
        self._late: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> str:
        """Name and user of the peer, from Hello."""
        who = "someone"
        if self._phase is not _Phase.NEW:
            role = self.hello.role if self.hello.role in ROLES else "someone"
            who = f"{role} {shown(self.hello.name)}"
        return who if self._peer_uid is None else f"{who} (user {self._peer_uid})"

    @property
    def inflight(self) -> int:
        """Number of requests in progress."""
        return len(self._under_way)

    def cancelled(self, request: int) -> asyncio.Future[None]:
        """Return the future that ends once no caller waits for this request's answer.

        Only for the request's own handler, while the request runs.
        """
        return self._under_way[request]

    def refuse(self, code: str, message: str) -> None:
        """Send the reason to the peer, and close."""
        if not self.is_open:
            return
        log.warning("Refused %s at %s (%s): %s", self.peer, self._server.address, code, message)
        self.close_with(Refused(code, message))

    def look_again(self) -> None:
        """Refuse the peer if the current access rules no longer admit it."""
        access = self._server.handshake.access
        if self._phase is not _Phase.NEW and not access.allows(self.hello, self._peer_uid, self._secured):
            self.refuse("authentication", "credentials revoked: check the token and the client name")

    @property
    def is_to_leave(self) -> bool:
        """Whether the peer moves to another agent after the notice of leaving."""
        return self._phase is _Phase.OPEN and LEAVING in self.welcome.features

    def say_leaving(self) -> None:
        """Ask the peer to move to another agent, where supported."""
        if self.is_to_leave:
            with suppress(ConnectError):
                self.send(Leaving())

    def break_off(self, why: str, *, code: str = "transport") -> None:
        """End the connection because blocks can't pass: the worker must connect anew."""
        self.refuse(code, why)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeout of the Hello, or refuse the connection at the limit."""
        super().connection_made(transport)
        if not self.is_open:
            return
        self._peer_uid = peer_uid(transport)
        self.peer_process = peer_process(transport)
        self._secured = secured(transport)
        if not self._server.admit(self):
            self.abort()
            return
        if self._server.is_full:
            self.refuse(
                "limit", f"{self._settings.connections_max} connections are open: close some, or ask later"
            )
            return
        self._late = self._loop.call_later(self._settings.handshake_s, self._on_late)

    def on_message(self, payload: bytes) -> None:
        """Process one message."""
        if self._phase is _Phase.OPEN:
            self._on_request(_ACCEPTED[self.hello.role].decode(payload))
        elif self._phase is _Phase.NEW:
            self._on_hello(codec.HELLO.decode(payload))
        else:
            raise ProtocolError("a message before the Welcome: wait for the Welcome")

    def on_broken(self, error: ProtocolError) -> None:
        """Refuse a peer that broke the protocol."""
        self.refuse(error.code, str(error))

    def on_closed(self, error: Exception | None) -> None:  # noqa: ARG002 (the cause makes no difference here)
        """Notify requests in progress and the handler."""
        if self._late is not None:
            self._late.cancel()
        for request in self._under_way:
            self._cancel(request)
        self._server.discard(self)
        if self._phase is _Phase.OPEN:
            self._server.handler.on_close(self)

    def _on_late(self) -> None:
        self.refuse("protocol", f"the handshake took longer than {self._settings.handshake_s} s")

    def _on_hello(self, hello: Hello) -> None:
        answer = self._server.handshake.answer(hello, self._peer_uid, self._secured)
        self.hello = hello
        self._phase = _Phase.OPENING
        if isinstance(answer, Refused):
            self.refuse(answer.code, answer.message)
            return
        self.welcome = answer
        self._server.run(self._open(hello, answer))

    async def _open(self, hello: Hello, welcome: Welcome) -> None:
        handler = self._server.handler
        try:
            await handler.on_open(self, hello, self._peer_uid)
        except RefusedError as error:
            self.refuse(error.code, str(error))
            return
        except TransportError as error:
            self.refuse("transport", str(error))
            return
        except Exception:
            log.exception("Opening the connection of %s failed", self.peer)
            self.refuse("internal", "the agent failed to open the connection: see the agent's log")
            return
        if not self.is_open:
            handler.on_close(self)
            return
        self._phase = _Phase.OPEN
        assert self._late is not None
        self._late.cancel()
        self._reader.frame_bytes_max = self._sent_bytes_max = welcome.limits.frame_bytes_max
        with suppress(ConnectError):
            self.send(self.welcome)
        if self._server.is_leaving:
            self.say_leaving()

    def _on_request(self, message: Request | Notice) -> None:
        match message:
            case Ping(request):
                self._say(Pong(request))
            case Cancel(request) if request in self._under_way:
                self._cancel(request)
            case Cancel() if self.hello.role != WORKER:
                pass  # only a worker's request may have left something behind
            case (
                Release()
                | Damage()
                | SessionEnded()
                | EndSession()
                | DirectDrives()
                | RegionsOffer()
                | ExtentsRead()
                | Cancel()
            ):
                self._on_notice(message)
            case _:
                self._begin(message)

    def _cancel(self, request: int) -> None:
        """End the future of a request without waiters."""
        cancelled = self._under_way[request]
        if not cancelled.done():
            cancelled.set_result(None)

    def _on_notice(self, notice: Notice) -> None:
        try:
            self._server.handler.on_notice(self, notice)
        except ProtocolError:
            raise
        except Exception:
            log.exception("A %s of %s failed", type(notice).__name__, self.peer)

    def _begin(self, request: Request) -> None:
        if request.request in self._under_way:
            raise ProtocolError(f"request {request.request} is in progress already: use another request id")
        inflight_max = self.welcome.limits.inflight_max
        if len(self._under_way) >= inflight_max:
            self._say(
                Failure(
                    request.request,
                    "overloaded",
                    f"{inflight_max} requests are in progress: wait for an answer",
                )
            )
            return
        self._under_way[request.request] = self._loop.create_future()
        try:
            answer = self._server.handler.handle(self, request)
        except Exception as error:  # noqa: BLE001 (returned to the caller)
            answer = self._failed(request, error)
        if isinstance(answer, Awaitable):
            self._server.run(self._serve(request, answer))
        else:
            self._end(request, answer)

    async def _serve(self, request: Request, serving: Awaitable[Answer]) -> None:
        try:
            answer = await serving
        except Exception as error:  # noqa: BLE001 (returned to the caller)
            answer = self._failed(request, error)
        self._end(request, answer)

    def _end(self, request: Request, answer: Answer) -> None:
        """Send a request's final answer."""
        del self._under_way[request.request]
        try:
            self._say(answer)
        except FrameTooLongError as error:
            words = f"the answer would be {error}: ask for fewer blocks at once"
            self._say(Failure(request.request, error.code, words))

    def _say(self, answer: Answer) -> None:
        """Send an answer; a closed connection loses the answer."""
        with suppress(ConnectError):
            self.send(answer)

    def _failed(self, request: Request, error: Exception) -> Failure:
        """Convert an exception of the handler into a ``Failure``."""
        if isinstance(error, RefusedError | ProtocolError):
            return Failure(request.request, error.code, str(error))
        if isinstance(error, UsageError):
            return Failure(request.request, "usage", str(error))
        log.error("A %s of %s failed", type(request).__name__, self.peer, exc_info=error)
        return Failure(request.request, "internal", "the agent failed: see the agent's log")


class Server:
    """Server at one address. Created by ``serve``; the creator closes the server."""

    def __init__(
        self, address: Address, handler: Handler, handshake: AgentHandshake, settings: ConnectionSettings
    ) -> None:
        self.handler = handler
        self.handshake = handshake
        self.settings = settings
        self._asked = address
        self._listening: Listening | None = None
        self.is_leaving = False
        """Whether workers should move to other agents."""

        self._is_closed = False
        self._connections: set[ServerConnection] = set()
        self._one_is_gone = asyncio.Event()
        self._tasks = Tasks(f"connections at {address}")

    @property
    def address(self) -> str:
        """Address with the real port, for ``connect``."""
        return str(self._asked if self._listening is None else self._listening.address)

    @property
    def connections(self) -> frozenset[ServerConnection]:
        """Connections open or opening now."""
        return frozenset(self._connections)

    async def start(self, network: Network) -> None:
        """Begin to accept. Raises as ``serve``."""
        self._listening = await network.listen(self._asked, lambda: ServerConnection(self))

    def announce_leaving(self) -> None:
        """Ask current and later workers that know another agent to move there.

        Workers are served meanwhile. Call ``release`` next, then ``close``.
        """
        self.is_leaving = True
        for connection in list(self._connections):
            connection.say_leaving()

    async def release(self, *, within_s: float) -> None:
        """Wait, for at most *within_s*, until all moving workers have left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while any(connection.is_to_leave for connection in self._connections):
                    self._one_is_gone.clear()
                    await self._one_is_gone.wait()

    async def close(self) -> bool:
        """Stop accepting, close all connections, and wait up to ``drain_s`` for requests.

        Return whether all requests have ended; the others go on and keep their memory in use until they end.
        """
        assert self._listening is not None, "start comes before close"
        self._is_closed = True
        self._listening.close()
        open_now = list(self._connections)
        for connection in open_now:
            connection.close()
        for connection in open_now:
            await connection.wait_closed()
        return await self._tasks.finish(within_s=self.settings.drain_s)

    def readmit(self, access: Access) -> None:
        """Apply new access rules, also to connected peers.

        Connections that the new rules exclude are refused now.
        """
        self.handshake = replace(self.handshake, access=access)
        for connection in list(self._connections):
            connection.look_again()

    # For ServerConnection.

    def admit(self, connection: ServerConnection) -> bool:
        """Count a connection; return False for a connection beyond all limits.

        A closed server, or a full one with ``refusing_max`` refusals in progress, admits none. A connection
        may reach a closed server if accepted before the close.
        """
        if (
            self._is_closed
            or len(self._connections) >= self.settings.connections_max + self.settings.refusing_max
        ):
            return False
        self._connections.add(connection)
        return True

    @property
    def is_full(self) -> bool:
        """Whether more connections are open or closing than ``connections_max``."""
        return len(self._connections) > self.settings.connections_max

    def discard(self, connection: ServerConnection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        self._one_is_gone.set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a connection's task to its end."""
        self._tasks.spawn(work)


async def serve(
    address: str,
    handler: Handler,
    handshake: AgentHandshake,
    settings: ConnectionSettings | None = None,
    *,
    network: Network = SOCKETS,
) -> Server:
    """Listen at *address* and serve connections.

    *address*: ``unix:///path``, ``tcp://host:port`` or ``tls://host:port``; port 0 is any free port. Raises
    UsageError for an invalid address, and ConnectError for an unavailable one.
    """
    server = Server(parse_address(address), handler, handshake, settings or ConnectionSettings())
    await server.start(network)
    return server
