"""A drive in memory, whose faults are planted by whoever tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tests.support.simulated.drives.joined import io_of, ios, resolve

from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.tables.digests import TagCheck


@dataclass(frozen=True, slots=True)
class _Fault:
    """What befalls I/Os that touch some bytes."""

    offset: int
    length: int
    fails_reads: bool
    written_bytes: int | None
    """How much of a write arrives before it fails; None: writes are not concerned."""

    def touches(self, begin: int, end: int) -> bool:
        return begin < self.offset + self.length and self.offset < end


class MemoryDrive:
    """Implements ``ports.drive.Drive`` on the event loop's own thread, in the order of submission.

    What is submitted is done at once, and its future resolves in a later turn of the loop. A fault befalls
    all pieces of an I/O, those that join each other on the drive, as it does with a drive of flash.
    """

    refuses_reads = False
    refuses_writes = False
    reads_given_up = writes_given_up = None

    def __init__(
        self,
        drive: DriveId,
        size_bytes: int,
        *,
        pieces_queued_max: int = 1 << 16,
        has_volatile_cache: bool = False,
    ) -> None:
        assert size_bytes % PAGE_BYTES == 0, "a drive has whole pages"
        self.id = drive
        self.size_bytes = size_bytes
        self.has_volatile_cache = has_volatile_cache
        self.is_file = False
        self.bytes = bytearray(size_bytes)
        """What lies on the drive. Change it at will: that is what bit rot does."""

        self._pieces_queued_max = pieces_queued_max
        self._queued = 0
        self._faults: list[_Fault] = []
        self._is_closed = False

    def fail_reads(self, offset: int, length: int) -> None:
        """Fail every read of these bytes from now on."""
        self._faults.append(_Fault(offset, length, fails_reads=True, written_bytes=None))

    def fail_writes(self, offset: int, length: int, *, written_bytes: int = 0) -> None:
        """Fail every write of these bytes from now on; its first *written_bytes* arrive: a torn write."""
        self._faults.append(_Fault(offset, length, fails_reads=False, written_bytes=written_bytes))

    def flip_bit(self, offset: int, bit: int = 0) -> None:
        """Change one bit of what lies on the drive."""
        self.bytes[offset] ^= 1 << bit

    def mend(self) -> None:
        """Take the planted faults away."""
        self._faults.clear()

    @property
    def queued(self) -> int:
        """Pieces submitted and not ended."""
        return self._queued

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[NDArray[np.bool_]]:
        """Read every piece, as the port says."""

        def read(rows: slice) -> NDArray[np.bool_] | bool:
            return self._read(pieces, rows) and (check is None or check.run(rows))

        return self._submit(pieces, read)

    def submit_write(self, pieces: Pieces) -> asyncio.Future[NDArray[np.bool_]]:
        """Write every piece, as the port says."""
        return self._submit(pieces, lambda rows: self._write(pieces, rows))

    def submit_flush(self) -> asyncio.Future[bool]:
        """Memory is as durable as it gets."""
        flushed = asyncio.get_running_loop().create_future()
        flushed.get_loop().call_soon(resolve, flushed, True)
        return flushed

    def submit_look(self) -> asyncio.Future[str | None]:
        """Memory has no place where something else could lie."""
        looked: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        looked.set_result("")
        return looked

    def close(self) -> None:
        """Take nothing more."""
        self._is_closed = True

    def _submit(
        self, pieces: Pieces, act: Callable[[slice], NDArray[np.bool_] | bool]
    ) -> asyncio.Future[NDArray[np.bool_]]:
        assert not self._is_closed, "the drive is closed"
        pieces.check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[NDArray[np.bool_]] = loop.create_future()
        ends = np.zeros(len(pieces), np.bool_)
        if self._queued + len(pieces) > self._pieces_queued_max:
            future.set_result(ends)
            return future
        self._queued += len(pieces)
        for rows in ios(pieces):
            ends[rows] = act(rows)
        loop.call_soon(self._end, future, ends)
        return future

    def _end(self, future: asyncio.Future[NDArray[np.bool_]], ends: NDArray[np.bool_]) -> None:
        self._queued -= len(ends)
        resolve(future, ends)

    def _read(self, pieces: Pieces, rows: slice) -> bool:
        begin, end, parts = io_of(pieces, rows)
        if end > self.size_bytes:
            return False
        if any(fault.fails_reads and fault.touches(begin, end) for fault in self._faults):
            return False
        for part in parts:
            part[:] = np.frombuffer(self.bytes, np.uint8, len(part), begin)
            begin += len(part)
        return True

    def _write(self, pieces: Pieces, rows: slice) -> bool:
        begin, end, parts = io_of(pieces, rows)
        if end > self.size_bytes:
            return False
        written = np.concatenate(parts).tobytes()
        torn = [
            fault.written_bytes
            for fault in self._faults
            if fault.written_bytes is not None and fault.touches(begin, end)
        ]
        arrives = min(torn, default=len(written))
        self.bytes[begin : begin + arrives] = written[:arrives]
        return not torn
