"""Frames: how messages and block bytes share one byte stream.

A frame is a little-endian u32, the number of bytes that follow it; a u8, the kind; and a payload::

    kind 0  one message as msgpack (``ostraca_fabric.wire.codec``)
    kind 1  bulk: u64 transfer, u32 number of blocks, u64 place of each, u32 length of each, then their bytes

``FrameReader`` takes a stream apart without doing I/O: it says where the next received bytes should go, and
its user says how many came. In the middle of a bulk frame they go straight to its blocks: one after the
other, in the manner of ``asyncio.BufferedProtocol`` (``buffer``), or to many at once (``landing``, behind
which ``tail`` takes what follows). Only bytes of blocks that came behind something else in one read are
copied, once; the scratch memory is small, so that is little.

A reader holds at most the scratch memory and, while a long message comes in, as much as has come of it:
announcing a long frame costs its reader nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import Struct
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import FrameTooLongError, MalformedError, ProtocolError
from ostraca_fabric.wire.columns import U32, U64
from ostraca_fabric.wire.messages import Message
from ostraca_fabric.wire.passage import Passage

MESSAGE = 0
BULK = 1

LENGTH_BYTES = 4
HEADER_BYTES = 5
BULK_HEADER_BYTES = HEADER_BYTES + 12
"""Of a bulk frame's header, without its columns."""

BULK_BLOCKS_MAX = 1023
"""Most blocks of a bulk frame: with the header before them, or what follows, as many pieces of memory as the
kernel takes in one call."""

BULK_BYTES_MAX = 1 << 30
"""Longest payload of a bulk frame behind its header, columns and blocks together. The blocks are never
buffered: this bounds how long one frame holds up the next."""

CUT_BYTES = 4 << 20
"""Blocks sent together make a frame each for so many bytes, so that messages get in between."""

SCRATCH_BYTES = 64 * 1024

_HEADER = Struct("<IB")
_BULK_HEADER = Struct("<IBQI")
_KIND_BYTES = HEADER_BYTES - LENGTH_BYTES
_BULK_OVERHEAD_BYTES = BULK_HEADER_BYTES - LENGTH_BYTES
_COLUMNS_BYTES = U64.itemsize + U32.itemsize  # for each block
_Value = TypeVar("_Value", np.uint32, np.uint64)
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True, eq=False)
class BulkEnd:
    """A bulk frame has come in whole."""

    transfer: int
    places: NDArray[np.uint64]
    landed: bool
    """Whether the bytes are where the sink said; False when it said to discard them."""


@dataclass(frozen=True, slots=True, eq=False)
class BulkFrame:
    """A bulk frame to send: the header with its columns, and the blocks that follow it."""

    header: bytes
    blocks: Passage


Event = bytes | BulkEnd | ProtocolError
"""A message's bytes, the end of a bulk frame, or what the other end did wrong: then nothing more is read."""

Sink = Callable[[int, NDArray[np.uint64], NDArray[np.uint32]], Passage | None]
"""Called with transfer, places and lengths when a bulk frame begins; returns where its blocks go, or None.

There is at least one block, and none is empty. None discards the whole frame. Otherwise the passage has
exactly these lengths, and its memory stays in use until the frame's BulkEnd or the reader's ``close``. It may
raise ProtocolError, which ends the reading.
"""


def encode(message: Message) -> bytearray:
    """Return the whole frame of a message."""
    frame = bytearray(HEADER_BYTES)
    _ENCODER.encode_into(message, frame, HEADER_BYTES)
    _HEADER.pack_into(frame, 0, len(frame) - LENGTH_BYTES, MESSAGE)
    return frame


def bulk_header(transfer: int, places: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> bytes:
    """Return what goes before blocks of these lengths."""
    blocks = len(lengths)
    assert len(places) == blocks
    assert 0 < blocks <= BULK_BLOCKS_MAX, f"a bulk frame of {blocks} blocks"
    assert lengths.all(), "a bulk frame with a block of no bytes"
    rest_bytes = blocks * _COLUMNS_BYTES + int(lengths.sum(dtype=np.int64))
    assert rest_bytes <= BULK_BYTES_MAX, f"a bulk frame of {rest_bytes} bytes"
    header = _BULK_HEADER.pack(rest_bytes + _BULK_OVERHEAD_BYTES, BULK, transfer, blocks)
    return header + places.astype(U64).tobytes() + lengths.astype(U32).tobytes()


def bulk_frames(
    transfer: int,
    memory: NDArray[np.uint8],
    *,
    places: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
) -> list[BulkFrame]:
    """Return the frames that carry blocks at *offsets* of *memory* to *places* of a transfer, in order.

    All of them lie in the memory, and none is empty.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    frames, first = [], 0
    while first < len(lengths):
        begin = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, begin + CUT_BYTES, side="right"))
        some = slice(first, min(max(last, first + 1), first + BULK_BLOCKS_MAX))
        frames.append(
            BulkFrame(
                bulk_header(transfer, places[some], lengths[some]),
                Passage(memory, offsets[some], lengths[some]),
            )
        )
        first = some.stop
    return frames


class FrameReader:
    """Takes one direction of a connection apart.

    Put received bytes at the start of ``buffer()``, or fill ``landing``'s blocks and then ``tail()``; then
    iterate over ``received(how_many)`` to its end before asking again. ``frame_bytes_max`` bounds a message's
    frame and may be changed between frames, as the handshake does.
    """

    def __init__(self, sink: Sink, *, frame_bytes_max: int, scratch_bytes: int = SCRATCH_BYTES) -> None:
        assert scratch_bytes >= BULK_HEADER_BYTES, "the scratch memory holds at least one header"
        self.frame_bytes_max = frame_bytes_max
        self._sink = sink
        self._scratch_bytes = scratch_bytes
        self._scratch = memoryview(bytearray(scratch_bytes))
        self._start = 0
        self._end = 0
        self._whole_bytes = 0
        self._bulk: BulkEnd | None = None
        self._landing: Passage | None = None
        self._discard_bytes = 0
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """How much memory this reader holds of its own."""
        return len(self._scratch)

    @property
    def landing(self) -> Passage | None:
        """Where the next received bytes go: the blocks of the frame that is coming in, when they land."""
        return self._landing

    def close(self) -> None:
        """Let go of any blocks: nothing is written to them any more, and nothing more is read."""
        self._is_closed = True
        self._bulk = self._landing = None
        self._start = self._end = 0

    def buffer(self) -> memoryview:
        """Return where the next received bytes go, in one piece; never empty."""
        if self._landing is not None:
            return self._landing.next_piece()
        return self.tail()

    def tail(self) -> memoryview:
        """Return where bytes go that follow those of ``landing``'s blocks; never empty."""
        self._make_room()
        return self._scratch[self._end :]

    def received(self, count: int) -> Iterator[Event]:
        """Yield what *count* more bytes completed, in order.

        Lazily: what an earlier event made its user do is done before the sink is asked about a later frame.
        """
        if self._is_closed:
            return
        if self._landing is not None:
            landed = min(count, self._landing.left_bytes)
            self._landing.passed_bytes += landed
            count -= landed
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
            if not self._has(HEADER_BYTES):
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
        if not self._has(LENGTH_BYTES + length):
            return None
        payload = bytes(self._scratch[self._start + HEADER_BYTES : end])
        self._start = end
        return payload

    def _begin_bulk(self, length: int) -> bool:
        """Read a bulk frame's header, once it is there whole, and ask the sink."""
        rest_bytes = length - _BULK_OVERHEAD_BYTES
        if rest_bytes < 0:
            raise MalformedError("a bulk frame shorter than its header")
        if rest_bytes > BULK_BYTES_MAX:
            raise FrameTooLongError(f"a bulk frame of {rest_bytes} bytes where {BULK_BYTES_MAX} are allowed")
        if not self._has(BULK_HEADER_BYTES):
            return False
        _, _, transfer, blocks = _BULK_HEADER.unpack_from(self._scratch, self._start)
        if not 0 < blocks <= BULK_BLOCKS_MAX or blocks * (_COLUMNS_BYTES + 1) > rest_bytes:
            raise MalformedError(
                f"a bulk frame of {rest_bytes} bytes for {blocks} blocks, of which 1 to {BULK_BLOCKS_MAX} "
                "are allowed, none of them empty"
            )
        if not self._has(BULK_HEADER_BYTES + blocks * _COLUMNS_BYTES):
            return False
        places = self._column(U64, BULK_HEADER_BYTES, blocks)
        lengths = self._column(U32, BULK_HEADER_BYTES + blocks * U64.itemsize, blocks)
        blocks_bytes = int(lengths.sum(dtype=np.int64))
        if blocks_bytes != rest_bytes - blocks * _COLUMNS_BYTES or not lengths.all():
            raise MalformedError(f"a bulk frame of {rest_bytes} bytes whose blocks do not add up to it")
        self._landing = self._sink(transfer, places, lengths)
        assert self._landing is None or self._landing.total_bytes == blocks_bytes, "a sink of another length"
        self._discard_bytes = 0 if self._landing is not None else blocks_bytes
        self._bulk = BulkEnd(transfer, places, landed=self._landing is not None)
        self._start += self._whole_bytes
        return True

    def _column(self, dtype: np.dtype[_Value], offset: int, count: int) -> NDArray[_Value]:
        """Copy a column out of the header that is being read."""
        return np.frombuffer(self._scratch, dtype, count, self._start + offset).copy()

    def _has(self, count: int) -> bool:
        """Tell whether so many bytes of the frame's beginning are there; else they are waited for."""
        self._whole_bytes = count
        return self._end - self._start >= count

    def _go_on_with_bulk(self) -> BulkEnd | None:
        """Move what is in scratch memory on, and end the frame when nothing is missing."""
        bulk, landing = self._bulk, self._landing
        assert bulk is not None
        left_bytes = self._discard_bytes if landing is None else landing.left_bytes
        count = min(left_bytes, self._end - self._start)
        if landing is None:
            self._discard_bytes -= count
        elif count:
            landing.fill(self._scratch[self._start : self._start + count])
        self._start += count
        if count < left_bytes:
            return None
        self._bulk = self._landing = None
        return bulk

    def _make_room(self) -> None:
        """Move what is held to the front; grow when a frame needs more, shrink when nothing is held."""
        held = self._end - self._start
        if not held and len(self._scratch) > self._scratch_bytes:
            self._scratch = memoryview(bytearray(self._scratch_bytes))
        elif held and self._start:
            self._scratch[:held] = self._scratch[self._start : self._end]
        self._start, self._end = 0, held
        if held == len(self._scratch):
            grown = memoryview(bytearray(min(2 * held, self._whole_bytes)))
            grown[:held] = self._scratch
            self._scratch = grown
