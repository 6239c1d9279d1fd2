"""Connection that carries frames, for both ends.

A BulkChannel (``ostraca_fabric.ports.transport``) for the inline transport. The place of a block *sent* is
the position of its bytes at the other end, as the two ends agree. The place of a block *expected* is the
index of a part; the block is the whole part.

``send`` and ``send_bulk`` never wait: an outbox holds unsent bytes until the socket takes them. Bulk frames
are sent from the memory of their blocks and wait without limit. A peer that does not read costs no memory
beyond its own transfers. Only messages add memory; a message on top of ``unread_bytes_max`` closes the
connection. Reading never stops because of writing: two ends with large sends would otherwise wait for each
other for ever.

The event loop's transport accepts, reads and closes. Writes go through a *stream*
(``ostraca_fabric.connection.streams``), for a socket a second descriptor. Staging memory is reused right
after a transfer, so the connection must know when the socket has taken the bytes. Blocks are received through
the second descriptor too, many in one call. Both happen in the loop's thread, with a bounded number of bytes
at a time. A separate thread saved no processor time (12 ms for 64 MiB either way), and a stalled peer would
block the thread.

Expected parts of transfers, and the memory for each part.

A bulk frame lands whole or not at all. A frame of an unknown transfer is discarded. A frame breaks the wire
protocol if it names a part that is not missing, names a part twice, or gives a part another length.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.connection.streams import ConnectionSettings, ConnectionStream, open_stream
from ostraca_fabric.errors import ConnectError, FrameTooLongError, ProtocolError
from ostraca_fabric.sockets.stream import Outbox
from ostraca_fabric.wire.frames import LENGTH_BYTES, BulkEnd, FrameReader, Passage, bulk_frames, encode
from ostraca_fabric.wire.messages import Message

log = logging.getLogger(__name__)

_TURN_BYTES = 1 << 20
"""Most bytes that one connection sends or receives before the loop serves others."""


class FramedConnection(asyncio.BufferedProtocol):
    """End of a connection. Subclasses handle messages and the end of the connection."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._expected = ExpectedParts()
        self._reader = FrameReader(self._expected.destination, frame_bytes_max=settings.handshake_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._stream: ConnectionStream | None = None
        self._outbox = Outbox()
        self._sending_lock = threading.Lock()
        """Held to change the outbox or the stream's descriptor: ``send_here`` is called in other threads."""

        self._is_watched = False  # whether the stream reports room
        self._when_sent: Callable[[], None] | None = None
        self._buffer_bytes = 0
        self._sending: set[asyncio.Future[None]] = set()
        self._is_closing = False
        self._why: OSError | None = None
        self._sent_bytes_max = settings.handshake_bytes_max
        self._cut: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()

    # Defined by subclasses.

    def on_message(self, payload: bytes) -> None:
        """Process one message; a ProtocolError raised here goes to ``on_broken``."""
        raise NotImplementedError

    def on_broken(self, error: ProtocolError) -> None:
        """Handle a protocol violation of the peer: report where useful, and close."""
        raise NotImplementedError

    def on_closed(self, error: Exception | None) -> None:
        """Handle the end of the connection. Called once."""
        raise NotImplementedError

    # Sending.

    @property
    def is_open(self) -> bool:
        """Whether messages can still be sent."""
        return not self._is_closing

    def send(self, message: Message) -> None:
        """Send a message.

        Raises ConnectError on a closed connection. Raises FrameTooLongError above the peer's frame limit,
        without sending; the connection remains open.
        """
        if self._is_closing or self._stream is None:
            raise self._closed_error()
        frame = encode(message)
        if len(frame) - LENGTH_BYTES > self._sent_bytes_max:
            raise FrameTooLongError(
                f"a {type(message).__name__} of {len(frame)} bytes where {self._sent_bytes_max} are allowed"
            )
        if self._outbox.held_bytes > self._settings.unread_bytes_max:
            log.warning("Cut the connection to %s: the peer reads no messages", self.peer)
            self.abort()
            raise self._closed_error()
        try:
            with self._sending_lock:
                is_sent = self._outbox.send(self._stream, frame)
        except OSError as error:
            self._fail_with(error)
        else:
            if not is_sent:
                self._watch()

    def send_here(self, message: Message) -> bool:
        """Send a message at once, from any thread; return whether it was sent.

        Not sent, if earlier bytes wait for the socket, or only the event loop may send.
        """
        frame = encode(message)
        if self._stream is None or not self._stream.is_for_threads:
            return False
        with self._sending_lock:
            if self._is_closing or not self._outbox.is_empty or len(frame) > self._sent_bytes_max:
                return False
            try:
                is_sent = self._outbox.send(self._stream, frame)
            except OSError:
                return False  # the loop notices the broken connection
        if not is_sent:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._watch)
        return True

    def send_bulk(
        self,
        transfer: int,
        memory: NDArray[np.uint8],
        *,
        places: NDArray[np.uint64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.uint32],
    ) -> asyncio.Future[None]:
        """Send blocks at *offsets* of *memory*, which stays in use until the future ends.

        The future ends when the socket has taken the last byte: later messages arrive behind the blocks.
        Earlier messages may arrive in between, at the end of a frame. The future raises ConnectError if the
        connection closes first.
        """
        ended = self._loop.create_future()
        if self._is_closing:
            fail(ended, self._closed_error())
        elif not len(lengths):
            ended.set_result(None)
        else:
            frames = bulk_frames(transfer, memory, places=places, offsets=offsets, lengths=lengths)
            with self._sending_lock:
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
        """Send as many bytes as there is room for; watch the stream for the rest."""
        assert self._stream is not None
        try:
            with self._sending_lock:
                is_sent = self._outbox.write(self._stream, _TURN_BYTES)
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
        assert self._stream is not None
        if not self._outbox.is_empty:
            self._is_watched = True
            self._stream.watch(self._write)

    def _stop_watching(self) -> None:
        self._is_watched = False
        if self._stream is not None:
            self._stream.unwatch()

    def expect_bulk(
        self,
        transfer: int,
        memory: NDArray[np.uint8],
        *,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.uint32],
    ) -> asyncio.Future[None]:
        """Expect the parts of a transfer at *offsets* of *memory*; a part's place is its index.

        Each part lands whole. The future ends when all parts have landed. The future raises ConnectError if
        the connection closes first; then no more bytes land. Until either event the memory is in use, even
        without a waiter.
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
        """Name of the other end, for messages."""
        return "the other end"

    def close(self) -> None:
        """Send waiting messages, for at most ``close_s``, and close.

        Receives no more. Starts no more bulk frames; the futures of waiting frames end with the connection.
        """
        self._end_reading()
        self._drop_bulk()
        if self._transport is not None:
            self._cut_later(self._transport)
            self._act_when_sent(self._transport.close)

    def close_with(self, last: Message) -> None:
        """Send a last message, and close after the peer closes or after ``close_s``.

        Until then, received bytes are read and discarded. On an immediate close with unread bytes the kernel
        would reset the connection, and the peer might see the reset before the message.
        """
        if self._is_closing or self._transport is None:
            return
        with suppress(ConnectError):
            self.send(last)
            self._end_reading()
            self._drop_bulk()
            self._cut_later(self._transport)
            assert self._stream is not None, "an open connection has a stream"
            self._act_when_sent(self._stream.end_writing)

    def _drop_bulk(self) -> None:
        with self._sending_lock:
            self._outbox.drop_bulk()

    def _act_when_sent(self, act: Callable[[], None]) -> None:
        """Call *act* once the outbox is empty; a later call replaces the action."""
        self._when_sent = act
        if self._outbox.is_empty:
            act()

    def abort(self) -> None:
        """Close now and drop waiting messages."""
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
        """Release the memory of expected transfers; no more bytes land."""
        self._is_closing = True
        self._reader.close()
        self._expected.give_up(self._closed_error())

    def _end_sending(self) -> None:
        """Release the memory of waiting sends."""
        self._stop_watching()
        with self._sending_lock:
            self._outbox.clear()
        sending, self._sending = self._sending, set()
        for ended in sending:
            fail(ended, self._closed_error())

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport, or close at once if the process has no descriptor for the stream."""
        # uvloop's transports behave like asyncio.Transport without being subclasses.
        self._transport = cast("asyncio.Transport", transport)
        try:
            self._stream = open_stream(self._transport, self._settings)
        except OSError as error:
            log.warning("Closed a new connection: no usable socket: %s", error.strerror or error)
            self._fail_with(error)

    def pause_writing(self) -> None:
        """Pause the stream."""
        if self._stream is not None:
            self._stream.pause()

    def resume_writing(self) -> None:
        """Resume the stream."""
        if self._stream is not None:
            self._stream.resume()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (passed by the loop)
        """Return the memory for the next bytes."""
        buffer = self._reader.buffer()
        self._buffer_bytes = len(buffer)
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Process received bytes, and receive further bytes of blocks."""
        self._take(nbytes)
        landing = self._reader.landing
        if landing is None or nbytes < self._buffer_bytes:
            return
        assert self._stream is not None
        count = self._stream.receive(self._reader, landing, _TURN_BYTES)
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
        """Send waiting messages before the connection closes: the peer may still read."""
        if self._outbox.is_empty:
            return False
        self.close()
        return self._stream is not None and self._stream.can_end_writing

    def connection_lost(self, exc: Exception | None) -> None:
        """End all operations of this connection."""
        self._end_reading()
        if self._cut is not None:
            self._cut.cancel()
        self._end_sending()
        if self._stream is not None:
            with self._sending_lock:  # no thread writes to a descriptor that is closed, and used again
                self._stream.close()
        self._closed.set_result(None)
        self.on_closed(exc or self._why)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of one transfer, by index."""

    memory: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    is_missing: NDArray[np.bool_]
    ended: asyncio.Future[None]

    def have(self, places: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> bool:
        """Tell whether these parts are missing, named once each, and of the expected length."""
        if int(places.max()) >= len(self.lengths):
            return False
        parts = places.astype(np.intp)
        is_named = np.zeros_like(self.is_missing)
        is_named[parts] = True
        return np.count_nonzero(is_named & self.is_missing) == len(parts) and bool(
            (self.lengths[parts] == lengths).all()
        )


class ExpectedParts:
    """Parts of transfers, by transfer."""

    def __init__(self) -> None:
        self._transfers: dict[int, _Parts] = {}

    def expect(
        self,
        transfer: int,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.uint32],
        ended: asyncio.Future[None],
    ) -> None:
        """Expect one or more parts at *offsets* of *memory*; *ended* ends with the last part."""
        assert transfer not in self._transfers, f"transfer {transfer} is expected already"
        self._transfers[transfer] = _Parts(memory, offsets, lengths, np.ones(len(lengths), np.bool_), ended)

    def destination(
        self, transfer: int, places: NDArray[np.uint64], lengths: NDArray[np.uint32]
    ) -> Passage | None:
        """Return the destination of a bulk frame's blocks.

        A ``Sink`` of ``ostraca_fabric.wire.frames``. Returns None for an unknown transfer; raises
        ProtocolError for unexpected parts.
        """
        parts = self._transfers.get(transfer)
        if parts is None:
            return None
        if not parts.have(places, lengths):
            raise ProtocolError(
                f"a bulk frame of {len(places)} parts: transfer {transfer} expects other parts or lengths"
            )
        return Passage(parts.memory, parts.offsets[places.astype(np.intp)], lengths)

    def landed(self, bulk: BulkEnd) -> None:
        """Record the parts of a landed frame."""
        if not bulk.landed:
            return
        parts = self._transfers[bulk.transfer]
        parts.is_missing[bulk.places.astype(np.intp)] = False
        if not parts.is_missing.any():
            del self._transfers[bulk.transfer]
            if not parts.ended.done():
                parts.ended.set_result(None)

    def give_up(self, error: ConnectError) -> None:
        """Release all memory and fail all transfers: no more bytes land."""
        transfers, self._transfers = self._transfers, {}
        for parts in transfers.values():
            fail(parts.ended, error)


def fail(ended: asyncio.Future[None], error: ConnectError) -> None:
    """Fail a future and mark the error as retrieved, since no caller may look."""
    if not ended.done():
        ended.set_exception(error)
        ended.exception()
