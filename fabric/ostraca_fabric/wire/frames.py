"""Frames of messages and block bytes on a shared byte stream.

A frame is a little-endian u32 (number of following bytes), a u8 (kind), and a payload::

    kind 0  one message as msgpack (``ostraca_fabric.wire.codec``)
    kind 1  bulk: u64 transfer, u32 number of blocks, u64 place of each, u32 length of each, then their bytes

``FrameReader`` parses a stream without doing I/O: the reader names the memory for the next received bytes,
and the caller reports the number received. Within a bulk frame, bytes go directly to the blocks. ``buffer``
returns one piece after the other, in the manner of ``asyncio.BufferedProtocol``; ``landing`` covers many
blocks at once, followed by ``tail``. Block bytes are copied, once, only if received behind other bytes in one
read. The scratch memory is small, so copies are few.

A reader holds at most the scratch memory and the received part of a long message. The announcement of a long
frame costs no memory.

Blocks in transit through a stream: place in memory, and progress.

The blocks of a bulk frame follow each other in the stream, and lie anywhere in one piece of memory. A single
call into C (``native/passage.c``) moves as many blocks as the socket takes. The number of blocks therefore
costs next to nothing here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from struct import Struct
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import FrameTooLongError, MalformedError, ProtocolError
from ostraca_fabric.native import at, brief
from ostraca_fabric.wire.codec import U32, U64
from ostraca_fabric.wire.messages import Message


class _Blocks(ctypes.Structure):
    """``struct passage`` of ``native/passage.c``."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("offsets", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("blocks", ctypes.c_int64),
    )


class Passage:
    """Blocks at *offsets* of *memory*, *lengths* bytes each, in stream order.

    ``passed_bytes`` of ``total_bytes`` have passed; the caller of a transfer adds to the count. The passage
    keeps the memory in use. The creator must have checked that all blocks lie within the memory.
    """

    __slots__ = ("_blocks", "_lengths", "_memory", "_offsets", "address", "passed_bytes", "total_bytes")

    def __init__(
        self, memory: NDArray[np.uint8], offsets: NDArray[np.int64], lengths: NDArray[np.uint32]
    ) -> None:
        assert len(offsets) == len(lengths)
        self._memory = memory
        self._offsets = np.ascontiguousarray(offsets, np.int64)
        self._lengths = np.ascontiguousarray(lengths, np.uint32)
        self._blocks = _Blocks(
            at(memory), memory.nbytes, at(self._offsets), at(self._lengths), len(self._lengths)
        )
        self.address = ctypes.addressof(self._blocks)
        """Address of the ``struct passage``."""
        self.passed_bytes = 0
        self.total_bytes = int(self._lengths.sum(dtype=np.int64))

    @property
    def left_bytes(self) -> int:
        """Bytes yet to pass."""
        return self.total_bytes - self.passed_bytes

    def lies_in(self, memory: NDArray[np.uint8]) -> bool:
        """Tell whether the blocks lie in this very array object."""
        return self._memory is memory

    def blanked(self) -> Passage:
        """Return the rest of the passage with zeros for blocks, in memory of its own."""
        blank = Passage(
            np.zeros(int(self._lengths.max(initial=0)), np.uint8), np.zeros_like(self._offsets), self._lengths
        )
        blank.passed_bytes = self.passed_bytes
        return blank

    def next_piece(self) -> memoryview:
        """Return the memory of the rest of the current block; a block must be left."""
        ends = np.cumsum(self._lengths, dtype=np.int64)
        block = int(np.searchsorted(ends, self.passed_bytes, side="right"))
        stop = int(self._offsets[block]) + int(self._lengths[block])
        return self._memory.data[stop - (int(ends[block]) - self.passed_bytes) : stop]

    def copied(self, bytes_max: int) -> bytes:
        """Return a copy of the next bytes, at most *bytes_max*, not counted as passed."""
        ends = np.cumsum(self._lengths, dtype=np.int64)
        stop = min(self.passed_bytes + bytes_max, self.total_bytes)
        first, last = np.searchsorted(ends, (self.passed_bytes, stop - 1), side="right").tolist()
        pieces = []
        for block in range(first, last + 1) if stop > self.passed_bytes else ():
            end, length = int(ends[block]), int(self._lengths[block])
            ahead = int(self._offsets[block]) + length - end  # from stream position to memory offset
            begin = ahead + max(self.passed_bytes, end - length)
            assert 0 <= begin <= ahead + end <= self._memory.nbytes, "a block lies outside of its memory"
            pieces.append(self._memory.data[begin : ahead + min(end, stop)])
        return b"".join(pieces)

    def fill(self, source: memoryview) -> None:
        """Copy bytes received elsewhere to the blocks, and count the bytes as passed.

        *source* is at most as long as the missing part.
        """
        came = np.frombuffer(source, np.uint8)
        filled = brief.ostraca_fill(self.address, self.passed_bytes, at(came), len(came))
        assert filled == 0, "a block lies outside of its memory"
        self.passed_bytes += len(came)


MESSAGE = 0
BULK = 1

LENGTH_BYTES = 4
HEADER_BYTES = 5
BULK_HEADER_BYTES = HEADER_BYTES + 12
"""Length of a bulk frame's header without the columns."""

BULK_BLOCKS_MAX = 1023
"""Most blocks of a bulk frame. With a header before the blocks, or bytes behind, the kernel takes as many
pieces of memory in one call."""

BULK_BYTES_MAX = 1 << 30
"""Longest payload of a bulk frame behind the header, columns and blocks together. The reader does not
buffer blocks; the limit bounds how long a frame delays the next."""

CUT_BYTES = 4 << 20
"""Blocks sent together are split into frames of about this size, so that messages get in between."""

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
    """End of a completely received bulk frame."""

    transfer: int
    places: NDArray[np.uint64]
    landed: bool
    """Whether the bytes are in the sink's memory; False if the sink discarded the frame."""


@dataclass(frozen=True, slots=True, eq=False)
class BulkFrame:
    """Bulk frame to send: the header with columns, and the blocks."""

    header: bytes
    blocks: Passage


Event = bytes | BulkEnd | ProtocolError
"""A message's bytes, the end of a bulk frame, or a violation by the other end. The reader stops after a
violation."""

Sink = Callable[[int, NDArray[np.uint64], NDArray[np.uint32]], Passage | None]
"""Function for the start of a bulk frame: transfer, places and lengths to the blocks' memory, or None.

There is at least one block, and no block is empty. With None, the reader discards the whole frame. Otherwise
the passage must have exactly these lengths, and the memory stays in use until the frame's BulkEnd or the
reader's ``close``. The sink may raise ProtocolError, which ends the reading.
"""


def encode(message: Message) -> bytearray:
    """Return the whole frame of a message."""
    frame = bytearray(HEADER_BYTES)
    _ENCODER.encode_into(message, frame, HEADER_BYTES)
    _HEADER.pack_into(frame, 0, len(frame) - LENGTH_BYTES, MESSAGE)
    return frame


def bulk_header(transfer: int, places: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> bytes:
    """Return the header of a bulk frame for blocks of these lengths."""
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
    """Return the frames for blocks at *offsets* of *memory*, in order.

    *places* are the blocks' places in the transfer. All blocks lie in the memory, and no block is empty.
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
    """Parser of one direction of a connection.

    Put received bytes at the start of ``buffer()``, or fill the blocks of ``landing`` and then ``tail()``.
    Then iterate over ``received(how_many)`` to the end before the next call. ``frame_bytes_max`` bounds a
    message's frame and may be changed between frames, as the handshake does.
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
        self.landing: Passage | None = None
        """Blocks of the current frame, as memory for the next received bytes; None if not landing."""

        self._discard_bytes = 0
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """Bytes of the reader's own memory."""
        return len(self._scratch)

    def close(self) -> None:
        """Stop reading and release all blocks: no byte is written there any more."""
        self._is_closed = True
        self._bulk = self.landing = None
        self._start = self._end = 0

    def divert(self, memory: NDArray[np.uint8]) -> None:
        """Discard the rest of the current frame if its blocks land in *memory*, an array object."""
        if self._bulk is not None and self.landing is not None and self.landing.lies_in(memory):
            self._discard_bytes = self.landing.left_bytes
            self._bulk, self.landing = replace(self._bulk, landed=False), None

    def buffer(self) -> memoryview:
        """Return the memory for the next received bytes, in one piece; never empty."""
        return self.tail() if self.landing is None else self.landing.next_piece()

    def tail(self) -> memoryview:
        """Return the memory for bytes behind the blocks of ``landing``; never empty."""
        self._make_room()
        return self._scratch[self._end :]

    def received(self, count: int) -> Iterator[Event]:
        """Yield the events completed by *count* more bytes, in order.

        The iteration is lazy: the caller's reaction to an event precedes the sink's call for a later frame.
        """
        if self._is_closed:
            return
        if self.landing is not None:
            landed = min(count, self.landing.left_bytes)
            self.landing.passed_bytes += landed
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
                raise MalformedError(f"a frame of kind {kind}, unknown here")
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
        """Parse a bulk frame's header, once complete, and call the sink."""
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
        self.landing = self._sink(transfer, places, lengths)
        assert self.landing is None or self.landing.total_bytes == blocks_bytes, "a sink of another length"
        self._discard_bytes = 0 if self.landing is not None else blocks_bytes
        self._bulk = BulkEnd(transfer, places, landed=self.landing is not None)
        self._start += self._whole_bytes
        return True

    def _column(self, dtype: np.dtype[_Value], offset: int, count: int) -> NDArray[_Value]:
        """Copy a column out of the current header."""
        return np.frombuffer(self._scratch, dtype, count, self._start + offset).copy()

    def _has(self, count: int) -> bool:
        """Return whether *count* bytes of the frame are present, and expect as many."""
        self._whole_bytes = count
        return self._end - self._start >= count

    def _go_on_with_bulk(self) -> BulkEnd | None:
        """Move bytes from scratch memory to the blocks, and end a complete frame."""
        bulk, landing = self._bulk, self.landing
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
        self._bulk = self.landing = None
        return bulk

    def _make_room(self) -> None:
        """Move held bytes to the front; grow for a longer frame, shrink when empty."""
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
