"""Publisher of messages to ZeroMQ subscribers: the server's side of ZMTP 3.0, without security.

All subscribers get all messages, whatever the subscriptions, and filter. A slow subscriber is disconnected,
and connects again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self, cast

from ostraca_fabric.errors import ConnectError
from ostraca_fabric.wire.address import TcpAddress, parse_address

log = logging.getLogger(__name__)

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type" + len(b"PUB").to_bytes(4, "big") + b"PUB"
_MORE, _LONG, _COMMAND = 1, 2, 4
_SHORT_MAX = 255
_UNREAD_BYTES_MAX = 64 << 20
_CONNECTIONS_MAX = 32
_GREETING_S = 10.0
"""Time for the greeting. Nothing is sent before, so the loss of the other end would not show."""


class _Subscriber(asyncio.Protocol):
    """Connection of a subscriber. After the greeting, all its input is ignored."""

    def __init__(self, publisher: ZmtpPublisher) -> None:
        self._publisher = publisher
        self._greeting = b""
        self._late: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet, unless there are too many connections."""
        # uvloop's transports behave like asyncio.Transport without being subclasses.
        self.transport = cast("asyncio.Transport", transport)
        if len(self._publisher.connections) >= _CONNECTIONS_MAX:
            log.warning("%s has %d subscribers, and takes no more", self._publisher.address, _CONNECTIONS_MAX)
            self.transport.abort()
            return
        self._publisher.connections.add(self)
        self._late = asyncio.get_running_loop().call_later(_GREETING_S, self.transport.abort)
        self.transport.write(_GREETING)

    def data_received(self, data: bytes) -> None:
        """Complete the handshake with the other end's greeting."""
        if len(self._greeting) >= len(_GREETING):
            return
        self._greeting += data
        if len(self._greeting) >= len(_GREETING):
            assert self.transport is not None
            assert self._late is not None
            self._late.cancel()
            self.transport.write(frame(_READY, _COMMAND))
            self._publisher.subscribers.add(self)
            self._publisher.on_subscriber()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the subscriber."""
        del error
        if self._late is not None:
            self._late.cancel()
        self._publisher.connections.discard(self)
        self._publisher.subscribers.discard(self)


class ZmtpPublisher:
    """Publisher at one address, ``tcp://HOST:PORT``; an async context manager."""

    def __init__(self, address: str, *, on_subscriber: Callable[[], None]) -> None:
        """Call *on_subscriber* for each new subscriber."""
        parsed = parse_address(address)
        assert isinstance(parsed, TcpAddress), address
        self._parsed = parsed
        self.on_subscriber = on_subscriber
        self.connections: set[_Subscriber] = set()
        self.subscribers: set[_Subscriber] = set()
        """Connections that have greeted."""

        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Address with the real port; empty while not listening."""
        if self._server is None:
            return ""
        return str(replace(self._parsed, port=self._server.sockets[0].getsockname()[1]))

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message to all subscribers. Never blocks."""
        message = b"".join(
            frame(each, _MORE if number < len(frames) - 1 else 0) for number, each in enumerate(frames)
        )
        for subscriber in tuple(self.subscribers):
            transport = subscriber.transport
            assert transport is not None
            if transport.get_write_buffer_size() > _UNREAD_BYTES_MAX:
                log.warning("A subscriber of %s reads too slowly, and is disconnected", self.address)
                self.subscribers.discard(subscriber)
                transport.abort()
            else:
                transport.write(message)

    async def __aenter__(self) -> Self:
        """Listen. Raises ConnectError."""
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Subscriber(self), self._parsed.host, self._parsed.port
            )
        except OSError as error:
            raise ConnectError(f"{self._parsed} can't be bound: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect all subscribers."""
        assert self._server is not None
        self._server.close()
        self.subscribers.clear()
        while self.connections:
            transport = self.connections.pop().transport
            assert transport is not None
            transport.abort()


def frame(body: bytes, flags: int) -> bytes:
    """Return a frame."""
    if len(body) <= _SHORT_MAX:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body
