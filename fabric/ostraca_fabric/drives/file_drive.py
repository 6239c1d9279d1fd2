"""Drive on a file or block device, with a few threads for reads and writes.

O_DIRECT where the file system allows: blocks go straight between flash and staging memory, and reads return
the content of flash. A share of pieces (``drive_threads``) is moved and checked without the interpreter lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.drives.drive_threads import DriveThreads, good_stretches
from ostraca_fabric.drives.flash_files import FlashFileError, displacement, goes_direct, open_flash
from ostraca_fabric.errors import DriveError
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.native import at, library
from ostraca_fabric.runtime.os_errors import state_and_remedy

log = logging.getLogger(__name__)

_WRITE_TROUBLE_S = 60.0
"""Time after a failed write during which the drive reports the cause, so that an intermittent failure is
reported once."""

_OFFSET_BYTES = 8
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """Use of one drive."""

    threads: int = 4
    """Reads and writes in progress at once. Four keep most NVMe drives busy with 1 MiB blocks."""

    share_bytes_max: int = 4 << 20
    """Approximate bytes of one thread's share, moved in one I/O if contiguous on the drive. Smaller shares
    let more threads work on one wave of blocks, at a higher cost each. With the default, the size of a read
    wave, a get of several waves was fastest. Blocks are never cut, so a share may exceed the limit by one
    block."""

    is_direct: bool = True
    """Whether to bypass the page cache where the file system allows. False is for file systems with slow
    direct I/O, and for tests: reads may then come from memory, which hides errors of flash."""

    pieces_queued_max: int = 1 << 16
    """Blocks in progress; more fail at once and become misses. Staging is bounded too, so only gets of blocks
    below the largest size reach this limit."""

    has_volatile_cache: bool | None = None
    """Whether a power cut may lose acknowledged writes. None asks the kernel for a block device. For a plain
    file None means no flush, so a power cut may lose the newest blocks."""


class FileDrive:
    """Implements ``ports.drive.Drive``. Created by ``open``. Attempts every operation."""

    refuses_reads = False
    refuses_writes = False
    reads_given_up = writes_given_up = None

    def __init__(
        self,
        drive: DriveId,
        descriptor: int,
        *,
        size_bytes: int,
        has_volatile_cache: bool,
        is_file: bool,
        settings: DriveSettings,
        path: str = "",
    ) -> None:
        self.id = drive
        self.size_bytes = size_bytes
        self.has_volatile_cache = has_volatile_cache
        self.is_file = is_file
        self._write_trouble = (-math.inf, 0)
        """Time of the last failed write, and its errno; 0 without a failure."""

        self._descriptor = descriptor
        self._path = path
        """Path at opening; empty if unknown."""

        self._threads = DriveThreads(
            drive,
            threads=settings.threads,
            share_bytes_max=settings.share_bytes_max,
            pieces_queued_max=settings.pieces_queued_max,
        )

    @classmethod
    def open(cls, drive: DriveId, path: str, settings: DriveSettings | None = None) -> FileDrive:
        """Open an existing drive. Raises DriveError with the reason for an unusable drive."""
        chosen = settings or DriveSettings()
        try:
            descriptor = _opened(path, is_direct=chosen.is_direct)
        except FlashFileError as error:
            raise DriveError(
                f"drive {drive} can't be used: {error}; `ostraca doctor {path}` says how to replace it"
            ) from error
        is_device = stat.S_ISBLK(os.fstat(descriptor).st_mode)
        try:
            size_bytes = os.lseek(descriptor, 0, os.SEEK_END)
        except OSError as error:
            os.close(descriptor)
            raise DriveError(f"drive {drive} can't be measured at {path}: {error.strerror}") from error
        volatile = chosen.has_volatile_cache
        if volatile is None:
            volatile = is_device and _device_caches_writes(descriptor)
        return cls(
            drive,
            descriptor,
            size_bytes=size_bytes,
            has_volatile_cache=volatile,
            is_file=not is_device,
            settings=chosen,
            path=path,
        )

    @property
    def queued(self) -> int:
        """Pieces submitted and not ended."""
        return self._threads.queued

    @property
    def failures(self) -> int:
        """Failed operations since the drive was opened."""
        return self._threads.failures

    @property
    def last_error(self) -> str:
        """Message of the last failure."""
        return self._threads.last_error

    def submit_read(
        self, pieces: Pieces, then: Callable[[slice], NDArray[np.bool_]] | None = None
    ) -> asyncio.Future[NDArray[np.bool_]]:
        """Read every piece, as defined by the port."""
        pieces.check()
        move = _Move(self._descriptor, self.size_bytes, pieces, is_write=False)

        def read(rows: slice) -> NDArray[np.bool_]:
            is_good, failed = self._moved(move, rows)
            if then is None:
                return is_good
            if not failed:
                return then(rows)
            for begin, end in good_stretches(is_good):
                is_good[begin:end] = then(slice(rows.start + begin, rows.start + end))
            return is_good

        return self._threads.submit_pieces(pieces, read)

    def submit_write(self, pieces: Pieces) -> asyncio.Future[NDArray[np.bool_]]:
        """Write every piece, as defined by the port."""
        pieces.check()
        move = _Move(self._descriptor, self.size_bytes, pieces, is_write=True)
        return self._threads.submit_pieces(pieces, lambda rows: self._moved(move, rows)[0])

    def submit_flush(self) -> asyncio.Future[bool]:
        """Make all earlier writes durable."""

        def flush() -> bool:
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self._threads.count_failures(1, f"flush: {error.strerror}")
                return False
            return True

        return self._threads.submit_one(flush)

    def submit_look(self) -> asyncio.Future[str | None]:
        """Check the drive's file, as defined by the port.

        Runs in a thread of the drive: a hanging file system blocks no other component.
        """
        looked: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        said: list[str] = []

        def look() -> bool:
            said.append(self._look())
            return True

        def end(ends: asyncio.Future[bool]) -> None:
            if not looked.done():
                looked.set_result(said[0] if ends.result() else None)

        self._threads.submit_one(look).add_done_callback(end)
        return looked

    def close(self) -> None:
        """Wait for operations in progress, then close the drive."""
        self._threads.close()
        os.close(self._descriptor)

    def _look(self) -> str:
        if not self._path:
            return ""
        found = displacement(self._descriptor, self._path, self.size_bytes)
        at_s, number = self._write_trouble
        if found or not number or time.monotonic() - at_s > _WRITE_TROUBLE_S:
            return found
        state, remedy = state_and_remedy(OSError(number, os.strerror(number)))
        return f"can't be written at {self._path} ({state}){f': {remedy}' if remedy else ''}"

    def _moved(self, move: _Move, rows: slice) -> tuple[NDArray[np.bool_], int]:
        """Move some pieces; return for each whether moved whole, and the number of failed I/Os."""
        is_moved, failed, trouble, number = move.some(rows)
        if failed:
            self._threads.count_failures(failed, trouble)
            if move.is_write:
                self._write_trouble = time.monotonic(), number
        return is_moved, failed


class _Move:
    """Pieces to read or write, as C sees them."""

    def __init__(self, descriptor: int, drive_bytes: int, pieces: Pieces, *, is_write: bool) -> None:
        self._pieces = pieces  # keeps the arrays behind these addresses alive
        self._drive_offsets = at(pieces.drive_offsets)
        self._memory_offsets = at(pieces.memory_offsets)
        self._lengths = at(pieces.lengths)
        self.is_write = is_write
        self._on = descriptor, is_write, drive_bytes, at(pieces.memory), pieces.memory.nbytes

    def some(self, rows: slice) -> tuple[NDArray[np.bool_], int, str, int]:
        """Move some pieces, adjacent pieces in one I/O. Releases the interpreter lock.

        Returns for each piece whether moved whole, the number of failed I/Os, the last failure's message, and
        its errno, or 0 without an errno.
        """
        first, count = rows.start, rows.stop - rows.start
        is_moved, trouble = np.empty(count, np.bool_), np.empty(2, np.int64)
        failed = library.ostraca_move(
            *self._on,
            self._drive_offsets + first * _OFFSET_BYTES,
            self._memory_offsets + first * _OFFSET_BYTES,
            self._lengths + first * _LENGTH_BYTES,
            at(is_moved),
            at(trouble),
            count,
        )
        assert failed >= 0, "a piece lies outside of its memory"
        if not failed:
            return is_moved, 0, "", 0
        offset, error = trouble.tolist()
        why = os.strerror(error) if error else self._ended()
        return is_moved, failed, f"{'write' if self.is_write else 'read'} at {offset}: {why}", error

    def _ended(self) -> str:
        descriptor, _, was_bytes, *_ = self._on
        try:
            now_bytes = os.lseek(descriptor, 0, os.SEEK_END)
        except OSError as error:
            return f"the drive comes to an end, and can't be measured: {error.strerror}"
        if now_bytes < was_bytes:
            return f"the drive was cut short: {now_bytes} bytes now, {was_bytes} bytes at opening"
        return f"the drive comes to an end at {was_bytes} bytes"


def _opened(path: str, *, is_direct: bool) -> int:
    """Open a drive for reading and writing. Raises FlashFileError."""
    descriptor = open_flash(path, os.O_RDWR | (os.O_DIRECT if is_direct else 0))
    if is_direct and not goes_direct(descriptor):
        log.warning("%s does not take O_DIRECT: reads may come from the page cache", path)
    return descriptor


def _device_caches_writes(descriptor: int) -> bool:
    number = os.fstat(descriptor).st_rdev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    for queue_of in (device, device.parent):
        with contextlib.suppress(OSError):
            return (queue_of / "queue" / "write_cache").read_text().strip() == "write back"
    return True
