"""A connection that carries frames, whichever end it is.

It is a BulkChannel (``ostraca_fabric.ports.transport``) for the inline transport. The offset of a bulk frame
*sent* is where its bytes belong at the other end, as the two agree; the offset of a bulk frame *expected* is
the index of a part, and its payload is that whole part.

Sending. ``send`` and ``send_bulk`` never wait: who sends much awaits ``drained`` before each bulk frame. When
the other end does not read, ``drained`` goes on waiting, and a message that would come on top of
``unread_bytes_max`` closes the connection, so the memory is bounded either way. Reading never stops because
writing does: two ends that both send much would wait for each other for ever.

uvloop and, from Python 3.12 on, asyncio keep *references* to memory they could not send at once, and say
nothing when they let go of it. Staging memory is reused as soon as a transfer has settled, so ``send_bulk``
hands the kernel what it takes at once through a second descriptor of the socket, without a copy, and gives
the loop a copy of the rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from ostraca_fabric.connection.settings import ConnectionSettings
from ostraca_fabric.errors import ConnectError, FrameTooLongError, ProtocolError
from ostraca_fabric.wire.frames import LENGTH_BYTES, BulkEnd, FrameReader, bulk_header, encode
from ostraca_fabric.wire.messages import Message

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Expected:
    """Parts of a transfer that the other end was asked for."""

    parts: Sequence[memoryview]
    ended: asyncio.Future[None]
    missing: set[int] = field(default_factory=set)


class FramedConnection(asyncio.BufferedProtocol):
    """One end of a connection. Subclasses say what a message and the end of the connection mean."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(self._destination, frame_bytes_max=settings.handshake_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._bulk_socket: socket.socket | None = None
        self._expected: dict[int, _Expected] = {}
        self._drain_waiters: list[asyncio.Future[None]] = []
        self._is_writing_paused = False
        self._is_closing = False
        self._sent_bytes_max = settings.handshake_bytes_max
        self._cut: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()

    # What subclasses define.

    def on_message(self, payload: bytes) -> None:
        """Take one message; ProtocolError is handed to ``on_broken``."""
        raise NotImplementedError

    def on_broken(self, error: ProtocolError) -> None:
        """The other end broke the rules: say so if that helps, and close."""
        raise NotImplementedError

    def on_closed(self, error: Exception | None) -> None:
        """The connection is gone. Called once."""
        raise NotImplementedError

    # Sending.

    @property
    def is_open(self) -> bool:
        """Whether messages can still be sent."""
        return not self._is_closing

    def send(self, message: Message) -> None:
        """Send a message.

        Raises ConnectError when the connection is closed, and FrameTooLongError when the other end would not
        take a frame of this length; then nothing was sent and the connection goes on.
        """
        transport = self._open_transport()
        frame = encode(message)
        if len(frame) - LENGTH_BYTES > self._sent_bytes_max:
            raise FrameTooLongError(
                f"a {type(message).__name__} of {len(frame)} bytes where {self._sent_bytes_max} are allowed"
            )
        if transport.get_write_buffer_size() > self._settings.unread_bytes_max:
            log.warning("Cut the connection to %s, which does not read what it is sent", self.peer)
            self.abort()
            raise self._closed_error()
        transport.write(frame)

    def send_bulk(self, transfer: int, offset: int, payload: memoryview) -> None:
        """Send bytes of blocks; *payload* is free again when this returns. Await ``drained`` before each.

        Bulk frames and messages arrive in the order sent. Raises ConnectError when the connection is closed.
        """
        transport = self._open_transport()
        rest = payload.cast("B")
        header = bulk_header(transfer, offset, len(rest))
        if not transport.get_write_buffer_size():
            sent = self._send_at_once(transport, header, rest)
            header, rest = header[sent:], rest[max(0, sent - len(header)) :]
        if header:
            transport.write(header)
        if rest:
            transport.write(bytes(rest))

    def _send_at_once(self, transport: asyncio.Transport, header: bytes, payload: memoryview) -> int:
        """Give the kernel what it takes without waiting; return how many bytes that was."""
        if self._bulk_socket is None:
            fileno = transport.get_extra_info("socket").fileno()
            self._bulk_socket = socket.socket(fileno=os.dup(fileno))
        try:
            return self._bulk_socket.sendmsg([header, payload], (), socket.MSG_DONTWAIT)
        except OSError:
            # Full, or broken: the loop's own write finds out which.
            return 0

    async def drained(self) -> None:
        """Wait until little is left to send. Raises ConnectError when the connection closes first."""
        while self._is_writing_paused and not self._closed.done():
            waiter = self._loop.create_future()
            self._drain_waiters.append(waiter)
            await waiter
        if self._is_closing:
            raise self._closed_error()

    def expect_bulk(self, transfer: int, parts: Sequence[memoryview]) -> asyncio.Future[None]:
        """Let the parts of a transfer land here, each as one bulk frame whose offset is the part's index.

        The future ends when all have landed. It raises ConnectError when the connection closes first; then
        nothing lands any more. Until either, the parts are in use, whether or not anyone waits for the
        future.
        """
        assert transfer not in self._expected, f"transfer {transfer} is expected already"
        ended = self._loop.create_future()
        if self._is_closing:
            ended.set_exception(self._closed_error())
        elif not parts:
            ended.set_result(None)
        else:
            self._expected[transfer] = _Expected(parts, ended, set(range(len(parts))))
        return ended

    # Ending.

    @property
    def peer(self) -> str:
        """Who is at the other end, for messages to people."""
        return "the other end"

    def close(self) -> None:
        """Send what is waiting to be sent, at most for ``close_s``, and close. Nothing more is received."""
        self._end_reading()
        if self._transport is not None:
            self._transport.close()
            self._cut_later(self._transport)

    def close_with(self, last: Message) -> None:
        """Send a last message, and close when the other end has closed, or after ``close_s``.

        Until then what comes is read and thrown away. To close at once would make the kernel reset the
        connection when anything unread is left, and the other end could find that before it finds the
        message.
        """
        if self._is_closing or self._transport is None:
            return
        # Also the OSError of a connection that was reset, which the loop is about to find out.
        with suppress(OSError):
            self.send(last)
            self._end_reading()
            self._cut_later(self._transport)
            if not self._transport.is_closing():
                self._transport.write_eof()

    def abort(self) -> None:
        """Close now, without sending what is waiting."""
        self._end_reading()
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection is gone."""
        await asyncio.shield(self._closed)

    def _cut_later(self, transport: asyncio.Transport) -> None:
        if self._cut is None:
            self._cut = self._loop.call_later(self._settings.close_s, transport.abort)

    def _open_transport(self) -> asyncio.Transport:
        if self._is_closing or self._transport is None:
            raise self._closed_error()
        return self._transport

    def _closed_error(self) -> ConnectError:
        return ConnectError(f"the connection to {self.peer} is closed")

    def _end_reading(self) -> None:
        """Let go of all memory under expected transfers; from here on nothing lands."""
        self._is_closing = True
        self._reader.close()
        expected, self._expected = self._expected, {}
        for each in expected.values():
            if not each.ended.done():
                each.ended.set_exception(self._closed_error())
                each.ended.exception()  # whoever stopped waiting is not missing anything

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        # uvloop's transports do what asyncio.Transport says without deriving from it.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._settings.send_buffer_bytes)
        tuned(self._transport, self._settings)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (the loop says it)
        """Say where the next bytes go."""
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Take what has come."""
        for event in self._reader.received(nbytes):
            if isinstance(event, BulkEnd):
                self._bulk_ended(event)
            elif isinstance(event, ProtocolError):
                self.on_broken(event)
            else:
                try:
                    self.on_message(event)
                except ProtocolError as error:
                    self.on_broken(error)

    def pause_writing(self) -> None:
        """Note that much is waiting to be sent."""
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        """Note that little is."""
        self._is_writing_paused = False
        self._wake_drain_waiters()

    def connection_lost(self, exc: Exception | None) -> None:
        """End everything that waits for this connection."""
        self._end_reading()
        if self._cut is not None:
            self._cut.cancel()
        if self._bulk_socket is not None:
            self._bulk_socket.close()
        self._closed.set_result(None)
        self._wake_drain_waiters()
        self.on_closed(exc)

    # Bulk.

    def _destination(self, transfer: int, offset: int, length: int) -> memoryview | None:
        expected = self._expected.get(transfer)
        if expected is None:
            return None
        if offset not in expected.missing or expected.parts[offset].nbytes != length:
            raise ProtocolError(
                f"a bulk frame of {length} bytes as part {offset} of transfer {transfer}, "
                "which lacks no such part"
            )
        return expected.parts[offset]

    def _bulk_ended(self, bulk: BulkEnd) -> None:
        if not bulk.landed:
            return
        expected = self._expected[bulk.transfer]
        expected.missing.remove(bulk.offset)
        if not expected.missing:
            del self._expected[bulk.transfer]
            if not expected.ended.done():
                expected.ended.set_result(None)

    def _wake_drain_waiters(self) -> None:
        waiters, self._drain_waiters = self._drain_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def tuned(transport: asyncio.Transport, settings: ConnectionSettings) -> None:
    """Make TCP send at once, and notice within about half a minute that the other host is gone."""
    tcp = transport.get_extra_info("socket")
    if tcp.family not in (socket.AF_INET, socket.AF_INET6):
        return
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, settings.keepalive_s)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, settings.keepalive_s)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
