"""Blocks on their way through a stream: where they lie in memory, and how far they have come.

The blocks of one bulk frame come one behind another in the stream, and lie anywhere in one piece of memory.
Moving them through a socket is one call into C for as many of them as the socket takes
(``native/passage.c``), so their number costs next to nothing here.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.native import at, library

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    """Blocks at *offsets* of *memory*, *lengths* bytes each, in the order in which they pass.

    ``passed_bytes`` of the ``total_bytes`` are through; whoever moves some counts them. The memory is in use
    for as long as this is. Blocks must lie in it: who makes a passage has checked that.
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
        """Of the ``struct passage``."""
        self.passed_bytes = 0
        self.total_bytes = int(self._lengths.sum(dtype=np.int64))

    @property
    def left_bytes(self) -> int:
        """How many bytes have yet to pass."""
        return self.total_bytes - self.passed_bytes

    def next_piece(self) -> memoryview:
        """Return where the next bytes of the block lie that is not through; there must be one."""
        ends = np.cumsum(self._lengths, dtype=np.int64)
        block = int(np.searchsorted(ends, self.passed_bytes, side="right"))
        stop = int(self._offsets[block]) + int(self._lengths[block])
        return self._memory.data[stop - (int(ends[block]) - self.passed_bytes) : stop]

    def copied(self, bytes_max: int) -> bytes:
        """Return a copy of the next bytes to pass, *bytes_max* at most. Counts nothing as passed."""
        ends = np.cumsum(self._lengths, dtype=np.int64)
        stop = min(self.passed_bytes + bytes_max, self.total_bytes)
        first, last = np.searchsorted(ends, (self.passed_bytes, stop - 1), side="right").tolist()
        pieces = []
        for block in range(first, last + 1) if stop > self.passed_bytes else ():
            end, length = int(ends[block]), int(self._lengths[block])
            ahead = int(self._offsets[block]) + length - end  # of its place in the stream
            begin = ahead + max(self.passed_bytes, end - length)
            assert 0 <= begin <= ahead + end <= self._memory.nbytes, "a block lies outside of its memory"
            pieces.append(self._memory.data[begin : ahead + min(end, stop)])
        return b"".join(pieces)

    def fill(self, source: memoryview) -> None:
        """Copy what came elsewhere to the blocks, no more than they lack, and count it as passed."""
        came = np.frombuffer(source, np.uint8)
        filled = library.ostraca_fill(self.address, self.passed_bytes, at(came), len(came))
        assert filled == 0, "a block lies outside of its memory"
        self.passed_bytes += len(came)
