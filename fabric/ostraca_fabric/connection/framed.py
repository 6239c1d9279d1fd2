"""A connection that carries frames, whichever end it is.

It is a BulkChannel (``ostraca_fabric.ports.transport``) for the inline transport. The place of a block *sent*
is where its bytes belong at the other end, as the two agree; the place of a block *expected* is the index of
a part, and the block is that whole part.

Sending. ``send`` and ``send_bulk`` never wait: what the socket does not take stays in an outbox until it can
be written. Bulk frames are sent from where their blocks lie, and wait as long as it takes: an end that does
not read costs no memory but that which its own transfers hold. Only messages add to it, and one that would
come on top of ``unread_bytes_max`` closes the connection. Reading never stops because writing does: two ends
that both send much would wait for each other for ever.

The event loop's transport accepts, reads and closes; what is written goes through a *line*
(``ostraca_fabric.connection.lines``), which for a socket is a second descriptor of it: staging memory is
reused as soon as a transfer has settled, so it must be known when the socket has taken it. Blocks are
received through that descriptor too, many in one call. Both are done in the loop's own thread, a bounded
number of bytes at a time: another thread saved no processor time (12 ms of it for 64 MiB either way), and an
end that has stopped would keep it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.connection.expected import ExpectedParts, fail
from ostraca_fabric.connection.lines import Line, line_of
from ostraca_fabric.connection.settings import ConnectionSettings
from ostraca_fabric.errors import ConnectError, FrameTooLongError, ProtocolError
from ostraca_fabric.stream import Outbox
from ostraca_fabric.wire.frames import LENGTH_BYTES, BulkEnd, FrameReader, bulk_frames, encode
from ostraca_fabric.wire.messages import Message

log = logging.getLogger(__name__)

_TURN_BYTES = 1 << 20
"""What one connection sends or receives at most before the loop turns to others."""


class FramedConnection(asyncio.BufferedProtocol):
    """One end of a connection. Subclasses say what a message and the end of the connection mean."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._expected = ExpectedParts()
        self._reader = FrameReader(self._expected.destination, frame_bytes_max=settings.handshake_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._line: Line | None = None
        self._outbox = Outbox()
        self._is_watched = False  # whether the line says when there is room
        self._when_sent: Callable[[], None] | None = None
        self._buffer_bytes = 0
        self._sending: set[asyncio.Future[None]] = set()
        self._is_closing = False
        self._why: OSError | None = None
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
        if self._is_closing or self._line is None:
            raise self._closed_error()
        frame = encode(message)
        if len(frame) - LENGTH_BYTES > self._sent_bytes_max:
            raise FrameTooLongError(
                f"a {type(message).__name__} of {len(frame)} bytes where {self._sent_bytes_max} are allowed"
            )
        if self._outbox.held_bytes > self._settings.unread_bytes_max:
            log.warning("Cut the connection to %s, which does not read what it is sent", self.peer)
            self.abort()
            raise self._closed_error()
        try:
            is_sent = self._outbox.send(self._line, frame)
        except OSError as error:
            self._fail_with(error)
        else:
            if not is_sent:
                self._watch()

    def send_bulk(
        self,
        transfer: int,
        memory: NDArray[np.uint8],
        *,
        places: NDArray[np.uint64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.uint32],
    ) -> asyncio.Future[None]:
        """Send blocks at *offsets* of *memory*, which is in use until the future ends.

        That is when the socket has taken their last byte: what is sent from then on arrives behind them. What
        was sent before may arrive in between, at the end of a frame. The future raises ConnectError when the
        connection closes first.
        """
        ended = self._loop.create_future()
        if self._is_closing:
            fail(ended, self._closed_error())
        elif not len(lengths):
            ended.set_result(None)
        else:
            frames = bulk_frames(transfer, memory, places=places, offsets=offsets, lengths=lengths)
            self._outbox.add_bulk(frames, functools.partial(self._sent, ended))
            self._sending.add(ended)
            if not self._is_watched:
                self._write()
        return ended

    def _sent(self, ended: asyncio.Future[None]) -> None:
        self._sending.discard(ended)
        if not ended.done():
            ended.set_result(None)

    def _write(self) -> None:
        """Send what there is room for, and have the line say when there is more."""
        assert self._line is not None
        try:
            is_sent = self._outbox.write(self._line, _TURN_BYTES)
        except OSError as error:
            self._fail_with(error)
            return
        if not is_sent:
            self._watch()
            return
        self._stop_watching()
        if self._when_sent is not None:
            self._when_sent()

    def _fail_with(self, error: OSError) -> None:
        self._why = error
        self.abort()

    def _watch(self) -> None:
        assert self._line is not None
        self._is_watched = True
        self._line.watch(self._write)

    def _stop_watching(self) -> None:
        self._is_watched = False
        if self._line is not None:
            self._line.unwatch()

    def expect_bulk(
        self,
        transfer: int,
        memory: NDArray[np.uint8],
        *,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.uint32],
    ) -> asyncio.Future[None]:
        """Let the parts of a transfer land at *offsets* of *memory*, each whole; its place is its index.

        The future ends when all have landed. It raises ConnectError when the connection closes first; then
        nothing lands any more. Until either, the parts are in use, whether or not anyone waits for the
        future.
        """
        ended = self._loop.create_future()
        if self._is_closing:
            fail(ended, self._closed_error())
        elif not len(lengths):
            ended.set_result(None)
        else:
            self._expected.expect(transfer, memory, offsets, lengths, ended)
        return ended

    # Ending.

    @property
    def peer(self) -> str:
        """Who is at the other end, for messages to people."""
        return "the other end"

    def close(self) -> None:
        """Send the messages that wait, at most for ``close_s``, and close. Nothing more is received.

        No bulk frame is begun any more; the futures of those that wait end with the connection.
        """
        self._end_reading()
        self._outbox.drop_bulk()
        if self._transport is not None:
            self._cut_later(self._transport)
            self._act_when_sent(self._transport.close)

    def close_with(self, last: Message) -> None:
        """Send a last message, and close when the other end has closed, or after ``close_s``.

        Until then what comes is read and thrown away. To close at once would make the kernel reset the
        connection when anything unread is left, and the other end could find that before it finds the
        message.
        """
        if self._is_closing or self._transport is None:
            return
        with suppress(ConnectError):
            self.send(last)
            self._end_reading()
            self._outbox.drop_bulk()
            self._cut_later(self._transport)
            assert self._line is not None, "what is open has a line"
            self._act_when_sent(self._line.end_writing)

    def _act_when_sent(self, act: Callable[[], None]) -> None:
        """Do something once nothing is left to send; the last such thing counts."""
        self._when_sent = act
        if self._outbox.is_empty:
            act()

    def abort(self) -> None:
        """Close now, without sending what is waiting."""
        self._end_reading()
        self._when_sent = None
        self._end_sending()
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection is gone."""
        await asyncio.shield(self._closed)

    def _cut_later(self, transport: asyncio.Transport) -> None:
        if self._cut is None:
            self._cut = self._loop.call_later(self._settings.close_s, transport.abort)

    def _closed_error(self) -> ConnectError:
        return ConnectError(f"the connection to {self.peer} is closed")

    def _end_reading(self) -> None:
        """Let go of all memory under expected transfers; from here on nothing lands."""
        self._is_closing = True
        self._reader.close()
        self._expected.give_up(self._closed_error())

    def _end_sending(self) -> None:
        """Let go of all memory that was to be sent from."""
        self._stop_watching()
        self._outbox.clear()
        sending, self._sending = self._sending, set()
        for ended in sending:
            fail(ended, self._closed_error())

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        # uvloop's transports do what asyncio.Transport says without deriving from it.
        self._transport = cast("asyncio.Transport", transport)
        self._line = line_of(self._transport, self._settings)

    def pause_writing(self) -> None:
        """Pass it on."""
        if self._line is not None:
            self._line.pause()

    def resume_writing(self) -> None:
        """Pass it on."""
        if self._line is not None:
            self._line.resume()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (the loop says it)
        """Say where the next bytes go."""
        buffer = self._reader.buffer()
        self._buffer_bytes = len(buffer)
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take what has come, and what else is there for blocks."""
        self._take(nbytes)
        landing = self._reader.landing
        if landing is None or nbytes < self._buffer_bytes:
            return
        assert self._line is not None
        count = self._line.receive(self._reader, landing, _TURN_BYTES)
        if count:
            self._take(count)

    def _take(self, count: int) -> None:
        for event in self._reader.received(count):
            if isinstance(event, BulkEnd):
                self._expected.landed(event)
            elif isinstance(event, ProtocolError):
                self.on_broken(event)
            else:
                try:
                    self.on_message(event)
                except ProtocolError as error:
                    self.on_broken(error)

    def eof_received(self) -> bool:
        """Send what is waiting before the connection closes: the other end may still read."""
        if self._outbox.is_empty:
            return False
        self.close()
        return self._line is not None and self._line.can_end_writing

    def connection_lost(self, exc: Exception | None) -> None:
        """End everything that waits for this connection."""
        self._end_reading()
        if self._cut is not None:
            self._cut.cancel()
        self._end_sending()
        if self._line is not None:
            self._line.close()
        self._closed.set_result(None)
        self.on_closed(exc or self._why)
