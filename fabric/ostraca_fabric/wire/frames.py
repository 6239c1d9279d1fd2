"""Frames: how messages and block bytes share one byte stream.

A frame is a little-endian u32, the number of bytes that follow it; a u8, the kind; and a payload::

    kind 0  one message as msgpack (``ostraca_fabric.wire.codec``)
    kind 1  bulk: u64 transfer, u64 offset (little-endian), then bytes of blocks

``FrameReader`` takes a stream apart without doing I/O, in the manner of ``asyncio.BufferedProtocol``: it says
where the next received bytes should go, and its user says how many came. In the middle of a bulk payload they
go straight to their destination. Only bytes of a bulk frame that came behind something else in one read are
copied, once; the scratch memory is small, so that is little.

A reader holds at most the scratch memory and, while a long message comes in, as much as has come of it:
announcing a long frame costs its reader nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import Struct

import msgspec

from ostraca_fabric.errors import FrameTooLongError, MalformedError, ProtocolError
from ostraca_fabric.wire.messages import Message

MESSAGE = 0
BULK = 1

LENGTH_BYTES = 4
HEADER_BYTES = 5
BULK_HEADER_BYTES = HEADER_BYTES + 16
BULK_BYTES_MAX = 1 << 30
"""Longest payload of a bulk frame. It is never buffered: this bounds how long one frame holds up the next."""

SCRATCH_BYTES = 64 * 1024

_HEADER = Struct("<IB")
_BULK_HEADER = Struct("<IBQQ")
_KIND_BYTES = HEADER_BYTES - LENGTH_BYTES
_BULK_OVERHEAD_BYTES = BULK_HEADER_BYTES - LENGTH_BYTES
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class BulkEnd:
    """A bulk frame has come in whole."""

    transfer: int
    offset: int
    length: int
    landed: bool
    """Whether the bytes are where the sink said; False when it said to discard them."""


Event = bytes | BulkEnd | ProtocolError
"""A message's bytes, the end of a bulk frame, or what the other end did wrong: then nothing more is read."""

Sink = Callable[[int, int, int], memoryview | None]
"""Called with transfer, offset and length when a bulk frame begins; returns where its bytes go, or None.

None discards them. The memory must be writable, contiguous and of exactly that length, and stays in use until
the frame's BulkEnd or the reader's ``close``. It may raise ProtocolError, which ends the reading.
"""


def encode(message: Message) -> bytearray:
    """Return the whole frame of a message."""
    frame = bytearray(HEADER_BYTES)
    _ENCODER.encode_into(message, frame, HEADER_BYTES)
    _HEADER.pack_into(frame, 0, len(frame) - LENGTH_BYTES, MESSAGE)
    return frame


def bulk_header(transfer: int, offset: int, length: int) -> bytes:
    """Return what goes before *length* bytes of blocks, 0 to ``BULK_BYTES_MAX``."""
    assert 0 <= length <= BULK_BYTES_MAX, f"a bulk frame of {length} bytes"
    return _BULK_HEADER.pack(length + _BULK_OVERHEAD_BYTES, BULK, transfer, offset)


class FrameReader:
    """Takes one direction of a connection apart.

    Put received bytes at the start of ``buffer()``, then iterate over ``received(how_many)`` to its end
    before asking for the next buffer. ``frame_bytes_max`` bounds a message's frame and may be changed between
    frames, as the handshake does.
    """

    def __init__(self, sink: Sink, *, frame_bytes_max: int, scratch_bytes: int = SCRATCH_BYTES) -> None:
        assert scratch_bytes >= BULK_HEADER_BYTES, "the scratch memory holds at least one header"
        self.frame_bytes_max = frame_bytes_max
        self._sink = sink
        self._scratch_bytes = scratch_bytes
        self._scratch = memoryview(bytearray(scratch_bytes))
        self._start = 0
        self._end = 0
        self._bulk: BulkEnd | None = None
        self._destination: memoryview | None = None
        self._landed_bytes = 0
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """How much memory this reader holds of its own."""
        return len(self._scratch)

    def close(self) -> None:
        """Let go of any destination: nothing is written to it any more, and nothing more is read."""
        self._is_closed = True
        self._bulk = self._destination = None
        self._start = self._end = 0

    def buffer(self) -> memoryview:
        """Return where the next received bytes go; never empty."""
        if self._destination is not None:
            return self._destination[self._landed_bytes :]
        self._make_room()
        return self._scratch[self._end :]

    def received(self, count: int) -> Iterator[Event]:
        """Yield what *count* more bytes completed, in order.

        Lazily: what an earlier event made its user do is done before the sink is asked about a later frame.
        """
        if self._is_closed:
            return
        if self._destination is not None:
            self._landed_bytes += count
        else:
            self._end += count
        while not self._is_closed:
            try:
                event = self._next()
            except ProtocolError as broken:
                self.close()
                yield broken
                return
            if event is None:
                return
            yield event

    def _next(self) -> bytes | BulkEnd | None:
        if self._bulk is None:
            if self._end - self._start < HEADER_BYTES:
                return None
            length, kind = _HEADER.unpack_from(self._scratch, self._start)
            if kind == MESSAGE:
                return self._message(length)
            if kind != BULK:
                raise MalformedError(f"a frame of kind {kind}, which is not known here")
            if not self._begin_bulk(length):
                return None
        return self._go_on_with_bulk()

    def _message(self, length: int) -> bytes | None:
        if length > self.frame_bytes_max:
            raise FrameTooLongError(
                f"a message frame of {length} bytes where {self.frame_bytes_max} are allowed: "
                "ask for fewer blocks at once"
            )
        if length <= _KIND_BYTES:
            raise MalformedError("a message frame without a message")
        end = self._start + LENGTH_BYTES + length
        if self._end < end:
            return None
        payload = bytes(self._scratch[self._start + HEADER_BYTES : end])
        self._start = end
        return payload

    def _begin_bulk(self, length: int) -> bool:
        """Read a bulk frame's header, once it is there whole, and ask the sink."""
        payload_bytes = length - _BULK_OVERHEAD_BYTES
        if payload_bytes < 0:
            raise MalformedError("a bulk frame shorter than its header")
        if payload_bytes > BULK_BYTES_MAX:
            raise FrameTooLongError(
                f"a bulk frame of {payload_bytes} bytes where {BULK_BYTES_MAX} are allowed"
            )
        if self._end - self._start < BULK_HEADER_BYTES:
            return False
        _, _, transfer, offset = _BULK_HEADER.unpack_from(self._scratch, self._start)
        destination = self._sink(transfer, offset, payload_bytes)
        self._start += BULK_HEADER_BYTES
        self._bulk = BulkEnd(transfer, offset, payload_bytes, landed=destination is not None)
        self._landed_bytes = 0
        if destination is not None:
            assert destination.nbytes == payload_bytes, "the sink returned memory of another length"
            self._destination = destination.cast("B")
        return True

    def _go_on_with_bulk(self) -> BulkEnd | None:
        """Move what is in scratch memory on, and end the frame when nothing is missing."""
        bulk = self._bulk
        assert bulk is not None
        count = min(bulk.length - self._landed_bytes, self._end - self._start)
        if count and self._destination is not None:
            landed = self._landed_bytes
            self._destination[landed : landed + count] = self._scratch[self._start : self._start + count]
        self._start += count
        self._landed_bytes += count
        if self._landed_bytes < bulk.length:
            return None
        self._bulk = self._destination = None
        return bulk

    def _make_room(self) -> None:
        """Move what is held to the front; grow when a message needs more, shrink when nothing is held."""
        held = self._end - self._start
        if not held and len(self._scratch) > self._scratch_bytes:
            self._scratch = memoryview(bytearray(self._scratch_bytes))
        elif held and self._start:
            self._scratch[:held] = self._scratch[self._start : self._end]
        self._start, self._end = 0, held
        if held == len(self._scratch):
            length, _ = _HEADER.unpack_from(self._scratch)
            grown = memoryview(bytearray(min(2 * held, LENGTH_BYTES + length)))
            grown[:held] = self._scratch
            self._scratch = grown
