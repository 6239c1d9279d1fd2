"""A drive that is a file or a block device, read and written by a few threads of its own.

O_DIRECT where the file system allows: blocks then go straight between flash and staging memory, and what was
read is what lies on flash. A batch of pieces is cut into *shares*, which the threads take one after another.
A share is moved, and checked, without the interpreter lock; the last one to end wakes the event loop, once
for the batch. A blocked read can't be interrupted, so the threads are bounded, and so is what may wait for
them. A thread that is to take its next share does one of the short batches first, if any waits: they pass by
the long ones, and can't keep them from going on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import queue
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import DriveError
from ostraca_fabric.ids import DriveId
from ostraca_fabric.labels import current_label, labelled
from ostraca_fabric.native import at, library
from ostraca_fabric.ports.drive import Pieces
from ostraca_fabric.threads import show_name

log = logging.getLogger(__name__)

_Act = Callable[[slice], NDArray[np.bool_]]
"""Does something for some pieces of a batch, in a drive's thread; says of each whether it went well."""

_FLUSH = [slice(0, 1)]
_SHORT_BYTES = 256 << 10
"""A batch of no more than this passes by longer ones. A summary page is one: everybody whose blocks it lists
waits for it."""

_OFFSET_BYTES = 8
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """How one drive is used."""

    threads: int = 4
    """Reads and writes under way at once. Four keep most NVMe drives busy with 1 MiB blocks."""

    share_bytes_max: int = 4 << 20
    """About as much as one thread moves at a time, in one I/O where it lies together on the drive. Smaller
    ones let more threads work for one wave of blocks, and cost more each: with the default, the size of a
    wave that is read, a get of several waves was fastest. A block is never cut, so a share may be larger by
    one."""

    is_direct: bool = True
    """Whether to go past the page cache where the file system allows. False is for file systems where that
    is slow, and for tests: reads may then come from memory, which hides what flash would have said."""

    pieces_queued_max: int = 1 << 16
    """Blocks submitted and not ended; more fail at once, which makes them misses. Staging bounds them too, so
    only blocks smaller than the largest get can come to it."""

    has_volatile_cache: bool | None = None
    """Whether the drive may lose at a power cut what it has said is written. None asks the kernel for a
    block device, and takes a plain file as it comes: no flush, so a power cut may lose its newest blocks."""


class FileDrive:
    """Implements ``ports.drive.Drive``. ``open`` makes it. It tries whatever it is asked for."""

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
    ) -> None:
        self.id = drive
        self.size_bytes = size_bytes
        self.has_volatile_cache = has_volatile_cache
        self.is_file = is_file
        self.failures = 0
        """Operations that have failed since the drive was opened."""

        self.last_error = ""
        """What the last of them said."""

        self._descriptor = descriptor
        self._settings = settings
        self._queued = 0
        self._failing = threading.Lock()
        self._jobs: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._short: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"ostraca-{drive}-{number}", daemon=True)
            for number in range(settings.threads)
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def open(cls, drive: DriveId, path: str, settings: DriveSettings | None = None) -> FileDrive:
        """Open a drive that exists. Raises DriveError that says why it can't be used."""
        chosen = settings or DriveSettings()
        try:
            descriptor = _opened(path, is_direct=chosen.is_direct)
            is_device = stat.S_ISBLK(os.fstat(descriptor).st_mode)
            size_bytes = os.lseek(descriptor, 0, os.SEEK_END)
        except OSError as error:
            raise DriveError(f"drive {drive} can't be opened at {path}: {error.strerror}") from error
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
        )

    @property
    def queued(self) -> int:
        """Pieces submitted and not ended."""
        return self._queued

    def submit_read(
        self, pieces: Pieces, then: Callable[[slice], NDArray[np.bool_]] | None = None
    ) -> asyncio.Future[NDArray[np.bool_]]:
        """Read every piece, as the port says."""
        pieces.check()
        move = _Move(self._descriptor, self.size_bytes, pieces, is_write=False)

        def read(rows: slice) -> NDArray[np.bool_]:
            is_good, failed = self._moved(move, rows)
            if then is None:
                return is_good
            if not failed:
                return then(rows)
            for begin, end in _stretches(is_good):
                is_good[begin:end] = then(slice(rows.start + begin, rows.start + end))
            return is_good

        return self._submit(self._shares(pieces), read, is_short=_is_short(pieces))

    def submit_write(self, pieces: Pieces) -> asyncio.Future[NDArray[np.bool_]]:
        """Write every piece, as the port says."""
        pieces.check()
        move = _Move(self._descriptor, self.size_bytes, pieces, is_write=True)
        shares, is_short = self._shares(pieces), _is_short(pieces)
        return self._submit(shares, lambda rows: self._moved(move, rows)[0], is_short=is_short)

    def submit_flush(self) -> asyncio.Future[bool]:
        """Make everything written before durable."""
        flushed = asyncio.get_running_loop().create_future()

        def flush(_: slice) -> NDArray[np.bool_]:
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self._count_failures(1, f"flush: {error.strerror}")
                return np.zeros(1, np.bool_)
            return np.ones(1, np.bool_)

        def end(ends: asyncio.Future[NDArray[np.bool_]]) -> None:
            if not flushed.done():
                flushed.set_result(bool(ends.result()[0]))

        self._submit(_FLUSH, flush, is_short=True).add_done_callback(end)
        return flushed

    def close(self) -> None:
        """Wait for operations under way, then let the drive go."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._descriptor)

    def _shares(self, pieces: Pieces) -> list[slice]:
        """Cut a batch: its I/Os are dealt out evenly to the threads, and long ones are cut."""
        count = len(pieces)
        if not count:
            return []
        lengths, share_bytes = pieces.lengths, self._settings.share_bytes_max
        begins = np.flatnonzero(pieces.drive_offsets[1:] != (pieces.drive_offsets + lengths)[:-1]) + 1
        each = len(begins) // self._settings.threads + 1
        cuts = {0, *begins[each - 1 :: each].tolist(), count}
        if int(lengths.sum(dtype=np.int64)) > share_bytes:
            filled = (np.cumsum(lengths, dtype=np.int64) - lengths) // share_bytes
            cuts.update((np.flatnonzero(filled[1:] != filled[:-1]) + 1).tolist())
        return [slice(*pair) for pair in itertools.pairwise(sorted(cuts))]

    def _submit(self, shares: list[slice], act: _Act, *, is_short: bool) -> asyncio.Future[NDArray[np.bool_]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[NDArray[np.bool_]] = loop.create_future()
        count = shares[-1].stop if shares else 0
        if not count or self._queued + count > self._settings.pieces_queued_max:
            future.set_result(np.zeros(count, np.bool_))
            return future
        self._queued += count
        log.debug("drive %s: %d blocks submitted behind %d", self.id, count, self._queued - count)

        def end(ends: NDArray[np.bool_]) -> None:
            self._queued -= count
            if not future.done():  # its holder may have cancelled it, against the rules of the port
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
        """Do one of the short batches that wait, if any does. Whoever comes to it in the other queue later
        finds nothing left to do.
        """
        with contextlib.suppress(queue.Empty):
            self._short.get_nowait().work()

    def _moved(self, move: _Move, rows: slice) -> tuple[NDArray[np.bool_], int]:
        """Move some pieces; say of each whether it was moved whole, and how many I/Os failed."""
        is_moved, failed, trouble = move.some(rows)
        if failed:
            self._count_failures(failed, trouble)
        return is_moved, failed

    def _count_failures(self, failed: int, what: str) -> None:
        with self._failing:
            before, self.failures = self.failures, self.failures + failed
            self.last_error = what
            count = self.failures
        # Loudly the 1st, 2nd, 4th, 8th ... time only: a broken drive fails thousands of times.
        level = logging.WARNING if count.bit_length() > before.bit_length() else logging.DEBUG
        log.log(level, "Drive %s has failed %d times, just now: %s", self.id, count, what)


class _Move:
    """Pieces that are read or written, as C sees them."""

    def __init__(self, descriptor: int, drive_bytes: int, pieces: Pieces, *, is_write: bool) -> None:
        self._pieces = pieces  # what lies at these addresses lives as long as they are used
        self._drive_offsets = at(pieces.drive_offsets)
        self._memory_offsets = at(pieces.memory_offsets)
        self._lengths = at(pieces.lengths)
        self._on = descriptor, is_write, drive_bytes, at(pieces.memory), pieces.memory.nbytes

    def some(self, rows: slice) -> tuple[NDArray[np.bool_], int, str]:
        """Move some pieces, adjacent ones in one I/O. Releases the interpreter lock.

        Returns whether each was moved whole, how many I/Os failed, and what the last of them said.
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
            return is_moved, 0, ""
        offset, error = trouble.tolist()
        why = os.strerror(error) if error else self._ended()
        return is_moved, failed, f"{'write' if self._on[1] else 'read'} at {offset}: {why}"

    def _ended(self) -> str:
        descriptor, _, was_bytes, *_ = self._on
        try:
            now_bytes = os.lseek(descriptor, 0, os.SEEK_END)
        except OSError as error:
            return f"the drive comes to an end, and can't be measured: {error.strerror}"
        if now_bytes < was_bytes:
            return (
                f"the drive was cut short: it has {now_bytes} bytes, and had {was_bytes} when it was opened"
            )
        return f"the drive comes to an end at {was_bytes} bytes"


class _Batch:
    """Shares that several threads take one after the other; the last to finish wakes the loop."""

    def __init__(
        self,
        shares: list[slice],
        act: _Act,
        loop: asyncio.AbstractEventLoop,
        end: Callable[[NDArray[np.bool_]], None],
    ) -> None:
        self._shares = shares
        self._act = act
        self._loop = loop
        self._end = end
        self._label = current_label()
        self._ends = np.zeros(shares[-1].stop, np.bool_)
        # next() of a count is one step under the interpreter lock: no two threads get the same number.
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
            log.exception("A drive's thread met a bug; what it was doing counts as failed")
        if next(self._done) == len(self._shares):
            # The loop may be gone when its process is ending; nobody waits then.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end, self._ends)


def _is_short(pieces: Pieces) -> bool:
    return int(pieces.lengths.sum(dtype=np.int64)) <= _SHORT_BYTES


def _stretches(is_good: NDArray[np.bool_]) -> list[list[int]]:
    """Return (begin, end) of each stretch of good pieces."""
    edges = np.flatnonzero(np.diff(is_good, prepend=False, append=False))
    stretches: list[list[int]] = edges.reshape(-1, 2).tolist()
    return stretches


def _opened(path: str, *, is_direct: bool) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    if not is_direct:
        return os.open(path, flags)
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    log.warning("%s does not take O_DIRECT: reads may come from the page cache", path)
    return os.open(path, flags)


def _device_caches_writes(descriptor: int) -> bool:
    number = os.fstat(descriptor).st_rdev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    for queue_of in (device, device.parent):
        with contextlib.suppress(OSError):
            return (queue_of / "queue" / "write_cache").read_text().strip() == "write back"
    return True
