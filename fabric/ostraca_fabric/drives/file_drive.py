"""Drive on a file or block device, with a few threads for reads and writes.

O_DIRECT where the file system allows: blocks go straight between flash and staging memory, and reads return
the content of flash.

``DriveThreads`` runs batches of pieces, cut into shares that the threads take in turn. A share is moved and
checked without the interpreter lock. A blocked operation can't be interrupted, so the threads and their
backlog are bounded. Before its next share, a thread runs one waiting short batch: short batches overtake long
ones, but can't starve them. The last share of a batch wakes the event loop, once per batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.drives.flash_files import FlashFileError, displacement, goes_direct, open_flash
from ostraca_fabric.errors import DriveError
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.native import at, library
from ostraca_fabric.runtime.os_errors import state_and_remedy
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.telemetry.requests import current_label, labelled

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


Act = Callable[[slice], NDArray[np.bool_]]
"""Operation on some pieces of a batch, in a thread of the drive; returns the success of each piece."""

_ONE_SHARE = [slice(0, 1)]
_SHORT_BYTES = 256 << 10
"""Batches up to this size overtake longer ones. For example a summary page: all writers of the listed blocks
wait for the page."""


class DriveThreads:
    """Threads and queue of one drive. Submit on an event loop; call ``close`` at the end."""

    def __init__(self, drive: DriveId, *, threads: int, share_bytes_max: int, pieces_queued_max: int) -> None:
        """Start *threads* for *drive*."""
        self._drive = drive
        self._share_bytes_max = share_bytes_max
        self._pieces_queued_max = pieces_queued_max
        self.queued = 0
        """Pieces submitted and not ended."""

        self._failing = threading.Lock()
        self.failures = 0
        """Failed operations since the drive was opened."""

        self.last_error = ""
        """Message of the last failure; empty without a failure."""

        self._jobs: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._short: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"ostraca-{drive}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit_pieces(self, pieces: Pieces, act: Act) -> asyncio.Future[NDArray[np.bool_]]:
        """Run *act* on every piece, in shares; the future gives the success of each piece."""
        is_short = int(pieces.lengths.sum(dtype=np.int64)) <= _SHORT_BYTES
        return self._submit(self._shares(pieces), act, is_short=is_short)

    def submit_one(self, act: Callable[[], bool]) -> asyncio.Future[bool]:
        """Run *act* in a thread; the future gives the result."""
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def end(ends: asyncio.Future[NDArray[np.bool_]]) -> None:
            if not ended.done():
                ended.set_result(bool(ends.result()[0]))

        submitted = self._submit(_ONE_SHARE, lambda _: np.full(1, act(), np.bool_), is_short=True)
        submitted.add_done_callback(end)
        return ended

    def count_failures(self, failed: int, reason: str) -> None:
        """Count failed operations, and log some. May be called in any thread."""
        with self._failing:
            before, self.failures = self.failures, self.failures + failed
            self.last_error = reason
            count = self.failures
        # Warn only the 1st, 2nd, 4th, 8th ... time: a broken drive fails thousands of times.
        level = logging.WARNING if count.bit_length() > before.bit_length() else logging.DEBUG
        log.log(level, "Drive %s has failed %d times, just now: %s", self._drive, count, reason)

    def close(self) -> None:
        """Wait for operations in progress, then end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _shares(self, pieces: Pieces) -> list[slice]:
        """Cut a batch into shares: distribute its I/Os evenly to the threads, and cut long I/Os."""
        count = len(pieces)
        if not count:
            return []
        lengths, share_bytes = pieces.lengths, self._share_bytes_max
        begins = np.flatnonzero(pieces.drive_offsets[1:] != (pieces.drive_offsets + lengths)[:-1]) + 1
        each = len(begins) // len(self._threads) + 1
        cuts = {0, *begins[each - 1 :: each].tolist(), count}
        if int(lengths.sum(dtype=np.int64)) > share_bytes:
            filled = (np.cumsum(lengths, dtype=np.int64) - lengths) // share_bytes
            cuts.update((np.flatnonzero(filled[1:] != filled[:-1]) + 1).tolist())
        return [slice(*pair) for pair in itertools.pairwise(sorted(cuts))]

    def _submit(self, shares: list[slice], act: Act, *, is_short: bool) -> asyncio.Future[NDArray[np.bool_]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[NDArray[np.bool_]] = loop.create_future()
        count = shares[-1].stop if shares else 0
        if not count or self.queued + count > self._pieces_queued_max:
            future.set_result(np.zeros(count, np.bool_))
            return future
        self.queued += count
        log.debug("drive %s: %d blocks submitted behind %d", self._drive, count, self.queued - count)

        def end(ends: NDArray[np.bool_]) -> None:
            self.queued -= count
            if not future.done():  # a caller may have cancelled the future, against the rules of the port
                future.set_result(ends)

        batch = _Batch(shares, act, loop, end)
        if is_short:
            self._short.put(batch)
        for _ in range(min(len(shares), len(self._threads))):
            self._jobs.put(batch)
        return future

    def _work(self) -> None:
        show_name("drive")
        while (batch := self._jobs.get()) is not None:
            batch.work(self._work_short)

    def _work_short(self) -> None:
        """Run one waiting short batch, if any.

        The batch's entry in the other queue then finds no shares left.
        """
        with contextlib.suppress(queue.Empty):
            self._short.get_nowait().work()


class _Batch:
    """Shares for several threads to take in turn; the last to finish wakes the loop."""

    def __init__(
        self,
        shares: list[slice],
        act: Act,
        loop: asyncio.AbstractEventLoop,
        end: Callable[[NDArray[np.bool_]], None],
    ) -> None:
        self._shares = shares
        self._act = act
        self._loop = loop
        self._end = end
        self._label = current_label()
        self._ends = np.zeros(shares[-1].stop, np.bool_)
        # next() of a count is atomic under the interpreter lock: no two threads get the same number.
        self._next = itertools.count()
        self._done = itertools.count(1)

    def work(self, before_each: Callable[[], None] = lambda: None) -> None:
        """Take shares until none is left."""
        before_each()
        shares = self._shares
        while (number := next(self._next)) < len(shares):
            with labelled(self._label):
                self._take(shares[number])
            before_each()

    def _take(self, share: slice) -> None:
        try:
            self._ends[share] = self._act(share)
        except Exception:
            log.exception("A bug in a drive's thread; the operation counts as failed")
        if next(self._done) == len(self._shares):
            # The loop may be gone at the end of the process; then no caller waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end, self._ends)


def good_stretches(is_good: NDArray[np.bool_]) -> list[list[int]]:
    """Return (begin, end) of each run of good pieces."""
    edges = np.flatnonzero(np.diff(is_good, prepend=False, append=False))
    stretches: list[list[int]] = edges.reshape(-1, 2).tolist()
    return stretches
