"""An agent's end: lets in whom the handshake accepts, runs a task per request, answers.

What one connection does wrong ends that connection, with a Refused that says why and one sentence in the log,
and touches no other. A request is counted until its final answer has been handed to the socket; one above
``inflight_max`` is answered ``Failed(overloaded)`` and costs nothing more.

A request's task is never cancelled from outside: transfers may be under way, and only its handler knows when
their memory is free. ``Cancel``, the end of the connection and the end of the server end a future that the
handler looks at.
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
from ostraca_fabric.connection.listening import peer_uid, secured
from ostraca_fabric.connection.network import SOCKETS, Listening, Network
from ostraca_fabric.connection.settings import ConnectionSettings
from ostraca_fabric.errors import (
    ConnectError,
    FrameTooLongError,
    ProtocolError,
    RefusedError,
    TransportError,
    UsageError,
    shown,
)
from ostraca_fabric.tasks import Tasks
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
    Secured,
)
from ostraca_fabric.wire.messages import (
    AgentAnswer,
    AgentRequest,
    AnswerToAgent,
    AnswerToOperator,
    Cancel,
    Damage,
    EndSession,
    Failed,
    Hello,
    Leaving,
    OperatorRequest,
    OwnerNotice,
    Ping,
    Pong,
    Refused,
    Release,
    SessionEnded,
    Welcome,
    WorkerNotice,
    WorkerRequest,
)

log = logging.getLogger(__name__)

Request = WorkerRequest | AgentRequest | OperatorRequest
Notice = WorkerNotice | OwnerNotice
Answer = AgentAnswer | AnswerToAgent | AnswerToOperator

_ACCEPTED: dict[str, codec.MessageDecoder[Any]] = {
    WORKER: codec.FROM_WORKER,
    AGENT: codec.FROM_AGENT,
    OPERATOR: codec.FROM_OPERATOR,
}


class Handler(Protocol):
    """What an agent does with its connections. One handler serves all of them."""

    async def on_open(self, connection: ServerConnection, hello: Hello, peer_uid: int | None) -> None:
        """Get ready for a connection that the handshake accepts, before its Welcome is sent.

        ``connection.welcome`` is what will be sent. RefusedError and TransportError refuse the connection
        instead.
        """

    def handle(self, connection: ServerConnection, request: Request) -> Answer | Awaitable[Answer]:
        """Serve one request: return its final answer, or something to wait for, which takes a task.

        RefusedError, UsageError and ProtocolError become ``Failed`` with their code, anything else
        ``Failed(internal)`` and a traceback in the log. Look at ``connection.cancelled(request.request)`` to
        stop early.
        """

    def on_notice(self, connection: ServerConnection, notice: Notice) -> None:
        """Take what needs no answer."""

    def on_close(self, connection: ServerConnection) -> None:
        """Note that the connection is gone, while some of its requests may still run.

        Called once after each ``on_open`` that returned.
        """


class _Phase(Enum):
    NEW = auto()
    OPENING = auto()
    OPEN = auto()


class ServerConnection(FramedConnection):
    """A connection that someone made to this agent."""

    welcome: Welcome
    hello: Hello

    def __init__(self, server: Server) -> None:
        super().__init__(server.settings)
        self._server = server
        self._phase = _Phase.NEW
        self._peer_uid: int | None = None
        self._secured: Secured | None = None
        self._under_way: dict[int, asyncio.Future[None]] = {}
        self._late: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> str:
        """Who said Hello, and as which user."""
        who = "someone"
        if self._phase is not _Phase.NEW:
            role = self.hello.role if self.hello.role in ROLES else "someone"
            who = f"{role} {shown(self.hello.name)}"
        return who if self._peer_uid is None else f"{who} (user {self._peer_uid})"

    @property
    def inflight(self) -> int:
        """How many requests are under way."""
        return len(self._under_way)

    def cancelled(self, request: int) -> asyncio.Future[None]:
        """Return the future that is done when nobody waits for this request's answer any more.

        To be asked by the request's own handler, while it runs.
        """
        return self._under_way[request]

    def refuse(self, code: str, message: str) -> None:
        """Tell the other end why, and close."""
        if not self.is_open:
            return
        log.warning("Refused %s at %s (%s): %s", self.peer, self._server.address, code, message)
        self.close_with(Refused(code, message))

    def look_again(self) -> None:
        """Refuse who said Hello and would not be let in any more."""
        access = self._server.handshake.access
        if self._phase is not _Phase.NEW and not access.allows(self.hello, self._peer_uid, self._secured):
            self.refuse("authentication", "what let you in was taken back: check token and name")

    @property
    def is_to_leave(self) -> bool:
        """Whether who is at the other end goes to another agent when this one says that it ends."""
        return self._phase is _Phase.OPEN and LEAVING in self.welcome.features

    def say_leaving(self) -> None:
        """Have the other end go to another agent, if it does that."""
        if self.is_to_leave:
            with suppress(ConnectError):
                self.send(Leaving())

    def break_off(self, why: str) -> None:
        """End the connection, because blocks can't cross any more: the worker is to make a new one."""
        self.refuse("transport", why)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the Hello."""
        super().connection_made(transport)
        self._peer_uid = peer_uid(transport)
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
        """Take one message."""
        if self._phase is _Phase.OPEN:
            self._on_request(_ACCEPTED[self.hello.role].decode(payload))
        elif self._phase is _Phase.NEW:
            self._on_hello(codec.HELLO.decode(payload))
        else:
            raise ProtocolError("a message before the Welcome: wait for it")

    def on_broken(self, error: ProtocolError) -> None:
        """Refuse who broke the rules."""
        self.refuse(error.code, str(error))

    def on_closed(self, error: Exception | None) -> None:  # noqa: ARG002 (why it went makes no difference here)
        """Let requests under way know, and the handler."""
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
            self.refuse("internal", "the agent failed to open the connection; its log says why")
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

    def _on_request(self, message: Request | Notice | Cancel) -> None:
        match message:
            case Ping(request):
                self._say(Pong(request))
            case Cancel(request):
                self._cancel(request)
            case Release() | Damage() | SessionEnded() | EndSession():
                self._on_notice(message)
            case _:
                self._begin(message)

    def _cancel(self, request: int) -> None:
        """Let a request know that nobody waits for it; not an error when it is answered already."""
        cancelled = self._under_way.get(request)
        if cancelled is not None and not cancelled.done():
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
            raise ProtocolError(f"request {request.request} is under way already: number requests apart")
        inflight_max = self.welcome.limits.inflight_max
        if len(self._under_way) >= inflight_max:
            self._say(
                Failed(request.request, "overloaded", f"{inflight_max} requests are under way: wait for one")
            )
            return
        self._under_way[request.request] = self._loop.create_future()
        try:
            answer = self._server.handler.handle(self, request)
        except Exception as error:  # noqa: BLE001 (told to who asked)
            answer = self._failed(request, error)
        if isinstance(answer, Awaitable):
            self._server.run(self._serve(request, answer))
        else:
            self._end(request, answer)

    async def _serve(self, request: Request, serving: Awaitable[Answer]) -> None:
        try:
            answer = await serving
        except Exception as error:  # noqa: BLE001 (told to who asked)
            answer = self._failed(request, error)
        self._end(request, answer)

    def _end(self, request: Request, answer: Answer) -> None:
        """Send a request's final answer."""
        del self._under_way[request.request]
        try:
            self._say(answer)
        except FrameTooLongError as error:
            words = f"the answer would be {error}: ask for fewer blocks at once"
            self._say(Failed(request.request, error.code, words))

    def _say(self, answer: Answer) -> None:
        """Send what nobody misses when the connection is gone."""
        with suppress(ConnectError):
            self.send(answer)

    def _failed(self, request: Request, error: Exception) -> Failed:
        """Tell what the handler raised."""
        if isinstance(error, RefusedError | ProtocolError):
            return Failed(request.request, error.code, str(error))
        if isinstance(error, UsageError):
            return Failed(request.request, "usage", str(error))
        log.error("A %s of %s failed", type(request).__name__, self.peer, exc_info=error)
        return Failed(request.request, "internal", "the agent failed; its log says why")


class Server:
    """Listens at one address. ``serve`` makes it; who made it closes it."""

    def __init__(
        self, address: Address, handler: Handler, handshake: AgentHandshake, settings: ConnectionSettings
    ) -> None:
        self.handler = handler
        self.handshake = handshake
        self.settings = settings
        self._asked = address
        self._listening: Listening | None = None
        self.is_leaving = False
        """Whether workers are to go to other agents."""

        self._is_closed = False
        self._connections: set[ServerConnection] = set()
        self._one_is_gone = asyncio.Event()
        self._tasks = Tasks(f"connections at {address}")

    @property
    def address(self) -> str:
        """Where this listens, with its real port: what to give to ``connect``."""
        return str(self._asked if self._listening is None else self._listening.address)

    @property
    def connections(self) -> frozenset[ServerConnection]:
        """The connections that are open or opening now."""
        return frozenset(self._connections)

    async def start(self, network: Network) -> None:
        """Begin to accept. Raises as ``serve``."""
        self._listening = await network.listen(self._asked, lambda: ServerConnection(self))

    def announce_leaving(self) -> None:
        """Have workers that know another agent go there, those that come later too. They go on to be served
        meanwhile: ``release`` comes next, then ``close``.
        """
        self.is_leaving = True
        for connection in list(self._connections):
            connection.say_leaving()

    async def release(self, *, within_s: float) -> None:
        """Wait until workers that were to go to other agents have gone, for so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while any(connection.is_to_leave for connection in self._connections):
                    self._one_is_gone.clear()
                    await self._one_is_gone.wait()

    async def close(self) -> bool:
        """Accept no more, close every connection, and wait up to ``drain_s`` for requests under way.

        Return whether all have ended; those that have not go on, and their memory is in use until they end.
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
        """Let in by other rules from now on. Connections that they would not let in are refused now."""
        self.handshake = replace(self.handshake, access=access)
        for connection in list(self._connections):
            connection.look_again()

    # For its connections.

    def admit(self, connection: ServerConnection) -> bool:
        """Count a connection; say no when there are even too many that hear why they are refused.

        And to one that was accepted before this was closed, and made only now.
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
        """Whether more connections are open, or closing, than may be."""
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
    """Listen at ``unix:///path``, ``tcp://host:port`` or ``tls://host:port`` and serve who connects.

    Port 0 is any free one.

    Raises UsageError for an address that is none, and ConnectError when it can't be had.
    """
    server = Server(parse_address(address), handler, handshake, settings or ConnectionSettings())
    await server.start(network)
    return server
