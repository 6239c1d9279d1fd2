"""Reader of blocks from drives of this host, into the arena, rows of a region, or memory of a device.

A single I/O engine serves all drives, and a daemon thread takes the ends of reads. A drive that fails or
falls silent is suspended: reads are refused at once for a while, and the agent reads the blocks instead.

A silent drive may still write into memory later. So its blocks are reported as lost, and ``when_read`` tells
when their memory is free.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostraca._direct.device_reads import DeviceMemory, DeviceReads
from ostraca._direct.host_drives import HostDrive, open_host_drives, shown_path
from ostraca._protocol.operations import Progress
from ostraca.client_metrics import DirectCounters
from ostraca.settings import ClientSettings
from ostraca_fabric.drives.io_engine import FlashIoSettings, IoEnd, IoEngine, IoOperation
from ostraca_fabric.errors import DriveError, MalformedError
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.runtime.events import set_event
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.tables.digests import GOOD, CheckState, TagCheck

log = logging.getLogger("ostraca")

BATCH_BYTES = 4 << 20
"""Bytes of a batch, about: blocks of a batch are reported together."""

_PENDING = int(CheckState.PENDING)

_LENGTH_MAX = (1 << 32) - 1
_SLEEP_S_MAX = 3600.0

_ELSEWHERE = np.empty(0, np.uint8)
"""Memory of pieces that are read into device memory."""

Rows = NDArray[np.intp]

Ended = Callable[[Rows, Progress], None]
"""Takes blocks whose reads have ended. VERIFIED if read and checked; READING if read, unchecked or damaged.
FAILED if nothing was read and nothing lands later, LOST if the drive is silent.
"""

BlockTags = tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint8]]
"""Lengths of blocks in bytes, their seeds, and their tags of shape (n, 16): columns of n rows."""


@dataclass(slots=True, eq=False)
class _ReaderDrive:
    """State of a drive. Changed under the reader's lock."""

    at: HostDrive
    handle: int
    batches: set[_ReadBatch] = field(default_factory=set)
    """Batches under way, with those reported as lost."""

    lost: int = 0
    """Lost batches among them."""

    heard_s: float = 0.0
    """Time of the last end, or of the first read after a pause."""

    suspended_until_s: float | None = None

    @property
    def has_awaited(self) -> bool:
        """Whether reads are under way and not lost."""
        return len(self.batches) > self.lost

    @property
    def resumes_s(self) -> float:
        """Time of the end of a suspension: never before the end of lost reads. Infinite without an end."""
        return math.inf if self.suspended_until_s is None or self.lost else self.suspended_until_s


@dataclass(slots=True, eq=False)
class _ReadBatch:
    """Blocks of one request on one drive."""

    request: int
    drive: _ReaderDrive
    rows: Rows
    lengths: NDArray[np.uint32]
    states: NDArray[np.uint8]
    ended: Ended
    check: TagCheck | None
    is_lost: bool = False


@dataclass(slots=True)
class _Request:
    """Reads under way for a request."""

    batches: int = 0
    acts: list[Callable[[], None]] = field(default_factory=list)
    """To call after the last batch."""


class DirectReader:
    """Reads drives of this host. Thread-safe. Close it.

    Receivers are called without locks held, and must not call ``close``.
    """

    def __init__(
        self, settings: ClientSettings, memory: NDArray[np.uint8], *, flash_io: FlashIoSettings | None = None
    ) -> None:
        """Open the drives of *settings*. Never raises; without a drive, no thread is started.

        *memory* is the flat arena, which begins at a page, and stays mapped until ``close`` returns True.
        """
        self._silent_s = settings.direct_silent_s
        self._retry_s = settings.direct_retry_s
        self._memory = memory
        self._changed = threading.Condition(threading.Lock())
        self._requests: dict[int, _Request] = {}
        self._read_s = -math.inf
        self._wakes_s = math.inf
        self._is_closing = self._is_over = False
        self.version = 0
        """Grows with each change of ``announced``. Read the version first, then the drives."""

        self.counters = DirectCounters()
        self._thread = threading.Thread(target=self._run, name="ostraca-direct", daemon=True)
        found = open_host_drives(settings.direct_drives)
        self._engine = _engine_for(found, flash_io)
        self._drives: tuple[_ReaderDrive, ...] = ()
        if self._engine is not None:
            self._drives = tuple(
                _ReaderDrive(each, self._engine.attach(each.descriptor, each.size_bytes)) for each in found
            )
            if not _starts(self._thread):
                _release(self._engine, self._drives)
                self._engine, self._drives = None, ()
        self._device_reads = _device_reads(self._wake) if settings.gpu_reads and self._drives else None
        self._told: set[str] = set()

    def announced(self) -> tuple[tuple[bytes, str], ...]:
        """Return fabric id and drive id for each number; an empty drive id while the drive is suspended."""
        with self._changed:
            return tuple(
                (drive.at.fabric, "" if drive.suspended_until_s is not None else drive.at.drive)
                for drive in self._drives
            )

    @property
    def reads_devices(self) -> bool:
        """Whether drives can be read into memory of devices."""
        return self._device_reads is not None and self._device_reads.is_usable

    def tell_host_reads(self, cause: str) -> None:
        """Log the *cause* of reads into host memory instead, once. For the driver's thread."""
        if cause not in self._told:
            self._told.add(cause)
            log.warning("Drives are read into host memory, not into a GPU's: %s", cause)

    def check(
        self, numbers: Rows, offsets: NDArray[np.int64], lengths: NDArray[np.int64] | NDArray[np.uint32]
    ) -> None:
        """Check an agent's places of blocks: columns of shape (n,), *offsets* and *lengths* in bytes.

        Raises MalformedError unless all blocks are whole pages of existing drives. Blocks beyond the end of a
        drive are read in vain: the drive here may be a cut copy.
        """
        if ((numbers < 0) | (numbers >= len(self._drives))).any():
            raise MalformedError(
                f"blocks lie on drives other than the {len(self._drives)} that were announced"
            )
        wide = lengths.astype(np.int64)
        if ((wide <= 0) | (wide > _LENGTH_MAX) | (wide % PAGE_BYTES != 0)).any():
            raise MalformedError("blocks on a drive are not whole pages")
        if ((offsets < 0) | (offsets % PAGE_BYTES != 0)).any():
            raise MalformedError("blocks do not begin at pages of their drives")

    def read(
        self,
        request: int,
        numbers: Rows,
        offsets: NDArray[np.int64],
        memory_offsets: NDArray[np.int64],
        lengths: NDArray[np.int64] | NDArray[np.uint32],
        ended: Ended,
        *,
        memory: NDArray[np.uint8] | DeviceMemory | None = None,
        tags: BlockTags | None = None,
    ) -> None:
        """Read blocks that passed ``check``: columns of shape (n,), in bytes.

        Memory offsets are multiples of 4096. *ended* gets each row once, in groups: from the reader's thread
        as batches end, or at once from this thread for refused blocks. Several reads may have one *request*.
        With *tags*, the engine checks each block right behind its read, in host memory alone. The receiver
        checks blocks that failed again: only a receiver knows whether their extents are still pinned.

        *memory* takes the blocks instead of the arena: a flat array that begins at a page, or device memory.
        The reader keeps it alive until its reads have ended, and not longer.
        """
        memory = self._memory if memory is None else memory
        assert tags is None or isinstance(memory, np.ndarray), "the engine checks no memory of devices"
        on_host, staged = (memory, None) if isinstance(memory, np.ndarray) else (_ELSEWHERE, memory)
        places = Pieces(
            on_host,
            memory_offsets.astype(np.int64),
            offsets.astype(np.int64),
            lengths.astype(np.uint32),
        )
        places.check()
        wanted = [(rows, places.some(rows)) for rows in _batches(numbers, places)]
        refused = []
        with self._changed:
            self._read_s = time.monotonic()
            for rows, pieces in wanted:
                check = None if tags is None else _check_of(tags, rows, pieces)
                states = np.zeros(len(rows), np.uint8) if check is None else check.states
                drive = self._drives[numbers[rows[0]]]
                batch = _ReadBatch(request, drive, rows, pieces.lengths, states, ended, check)
                if not self._submit(batch, pieces, staged):
                    refused.append(rows)
                    self.counters.blocks_failed += len(rows)
        if refused:
            _call(ended, np.concatenate(refused), Progress.FAILED)

    def suspend(self, number: int, damaged: int) -> None:
        """Do not read a drive directly for a while, because so many blocks read there were *damaged*."""
        with self._changed:
            drive = self._drives[number]
            self.counters.blocks_read -= damaged
            self.counters.blocks_failed += damaged
            is_news = self._suspend(drive)
            self._wakes_s = -math.inf
            self._wake()
        if is_news:
            self._tell_suspended(drive, "blocks there do not match their tags")

    def when_read(self, request: int, act: Callable[[], None]) -> None:
        """Call *act* once no read of *request* is under way, lost reads included.

        The call comes at once in this thread, or later in the reader's thread.
        """
        with self._changed:
            pending = self._requests.get(request)
            if pending is not None:
                pending.acts.append(act)
        if pending is None:
            _call(act)

    def close(self, within_s: float = 1.0) -> bool:
        """Refuse further reads, and wait for reads under way, at most *within_s*.

        Returns whether all reads have ended. If not, the drives stay open, and the memory must stay mapped.
        May be called again.
        """
        assert threading.current_thread() is not self._thread, "the reader's thread can't wait for itself"
        with self._changed:
            self._is_closing = True
            if not self._changed.wait_for(lambda: not self._requests, within_s):
                return False
            was_over, self._is_over = self._is_over, True
            if was_over or self._engine is None:
                return True
            self._wake()
        self._thread.join()
        if self._device_reads is not None:
            self._device_reads.close()
        _release(self._engine, self._drives)
        return True

    # In a caller's thread, with the lock held.

    def _submit(self, batch: _ReadBatch, pieces: Pieces, staged: DeviceMemory | None) -> bool:
        """Submit a batch; False for a refused batch. *staged* takes the blocks instead of host memory."""
        drive = batch.drive
        if self._is_closing or drive.suspended_until_s is not None:
            return False
        # Only the engine knows the memory: its owner may close it as soon as the end is reported.
        end = partial(self._end, batch)
        engine = self._engine
        assert engine is not None, "drives have an engine"
        if staged is None:
            columns = pieces, batch.check, end
            is_taken = engine.submit(drive.handle, IoOperation.READ, *columns, states=batch.states)
        else:
            devices = self._device_reads
            assert devices is not None, "no read before a look at reads_devices"
            is_taken = devices.submit(drive.at.descriptor, pieces, staged, batch.states, end)
        if not is_taken:
            return False
        if not drive.has_awaited:
            drive.heard_s = self._read_s
        drive.batches.add(batch)
        self._requests.setdefault(batch.request, _Request()).batches += 1
        if self._wakes_s > self._read_s + self._silent_s:
            self._wakes_s = -math.inf
            self._wake()
        return True

    def _wake(self) -> None:
        assert self._engine is not None, "the thread waits for an engine"
        set_event(self._engine.descriptor)

    # In the reader's thread.

    def _run(self) -> None:
        show_name("direct")
        engine = self._engine
        assert engine is not None, "the thread waits for an engine"
        news = select.poll()
        news.register(engine.descriptor, select.POLLIN)
        while (sleep_s := self._next_sleep_s()) is not None:
            news.poll(math.ceil(sleep_s * 1000))
            engine.take()  # before the check: a busy process may have left ends waiting
            if self._device_reads is not None:
                self._device_reads.take()
            self._check_drives()

    def _next_sleep_s(self) -> float | None:
        """Return the time until the next look at the drives; None at the end."""
        with self._changed:
            now_s = time.monotonic()
            # While reads come often, the thread wakes in time for each of them, and is not woken by each.
            lingering_s = self._read_s + self._silent_s
            due_s = [lingering_s] if lingering_s > now_s else []
            for drive in self._drives:
                if drive.has_awaited:
                    due_s.append(drive.heard_s + self._silent_s)
                due_s.append(drive.resumes_s)
            self._wakes_s = min(due_s, default=math.inf)
            return None if self._is_over else min(_SLEEP_S_MAX, max(0.0, self._wakes_s - now_s))

    def _end(self, batch: _ReadBatch, end: IoEnd, cause: str = "") -> None:
        """Report the end of a batch, unless the batch is lost. *cause* says more than an errno."""
        drive, is_read = batch.drive, batch.states != _PENDING
        is_good = batch.states == GOOD if batch.check is not None else np.zeros(len(batch.rows), np.bool_)
        failed = batch.rows[~is_read]
        with self._changed:
            drive.heard_s = time.monotonic()
            drive.batches.remove(batch)
            if batch.is_lost:
                drive.lost -= 1
            else:
                self.counters.blocks_read += len(batch.rows) - len(failed)
                self.counters.bytes_read += int(batch.lengths[is_read].sum(dtype=np.int64))
                self.counters.blocks_failed += len(failed)
            is_news = bool(end.failed) and self._suspend(drive)
        if is_news:
            cause = cause or (os.strerror(end.error) if end.error else "the drive comes to an end")
            self._tell_suspended(drive, f"read at {end.offset}: {cause}")
        unchecked = batch.rows[is_read & ~is_good]
        for rows, state in (
            (batch.rows[is_good], Progress.VERIFIED),
            (unchecked, Progress.READING),
            (failed, Progress.FAILED),
        ):
            if len(rows) and not batch.is_lost:
                _call(batch.ended, rows, state)
        self._finish(batch.request)

    def _finish(self, request: int) -> None:
        """Count the end of a batch, and act after the last one of the request."""
        acts = []
        with self._changed:
            pending = self._requests[request]
            pending.batches -= 1
            if not pending.batches:
                acts = self._requests.pop(request).acts
                self._changed.notify_all()
        for act in acts:
            _call(act)

    def _check_drives(self) -> None:
        """Give the reads of silent drives up as lost, and resume drives."""
        for drive in self._drives:
            lost, is_news = [], False
            with self._changed:
                now_s = time.monotonic()
                if drive.has_awaited and now_s - drive.heard_s >= self._silent_s:
                    lost = [batch for batch in drive.batches if not batch.is_lost]
                    drive.lost += len(lost)
                    for batch in lost:
                        batch.is_lost = True
                        self.counters.blocks_lost += len(batch.rows)
                    is_news = self._suspend(drive)
                if drive.resumes_s <= now_s:
                    drive.suspended_until_s = None
                    self.version += 1
            if is_news:
                self._tell_suspended(drive, f"{len(lost)} reads without an end for {self._silent_s} s")
            for batch in lost:
                _call(batch.ended, batch.rows, Progress.LOST)

    def _suspend(self, drive: _ReaderDrive) -> bool:
        """Suspend a drive, with the lock held; False if it was suspended before."""
        is_news = drive.suspended_until_s is None
        drive.suspended_until_s = time.monotonic() + self._retry_s
        self.version += is_news
        return is_news

    def _tell_suspended(self, drive: _ReaderDrive, cause: str) -> None:
        log.warning("%s is not read directly for %g s: %s", shown_path(drive.at.path), self._retry_s, cause)


def _engine_for(found: tuple[HostDrive, ...], flash_io: FlashIoSettings | None) -> IoEngine | None:
    """Start an engine for drives; None without drives, or where the process can have no engine."""
    if not found:
        return None
    try:
        return IoEngine(flash_io or FlashIoSettings())
    except DriveError as error:
        log.warning("No drive is read directly: %s", error)
        for drive in found:
            os.close(drive.descriptor)
        return None


def _device_reads(wake: Callable[[], None]) -> DeviceReads | None:
    """Return the means of reading into device memory; None without the library for it."""
    try:
        from ostraca._direct.kvikio_file import KvikioFile  # noqa: PLC0415 (needs kvikio)
    except Exception as error:  # noqa: BLE001 (of a library that loads others)
        cause = " ".join(str(error).split())
        log.warning("No drive is read into GPU memory: kvikio can't be imported (%s)", cause)
        return None
    return DeviceReads(KvikioFile, wake)


def _starts(thread: threading.Thread) -> bool:
    """Start a thread; False where the process may have no more threads."""
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("No drive is read directly: %s", error)
        return False
    return True


def _check_of(tags: BlockTags, rows: Rows, pieces: Pieces) -> TagCheck:
    """Return the check of *rows*, read as *pieces*."""
    lengths, seeds, wanted = tags
    return TagCheck(pieces, lengths[rows], seeds[rows], wanted[rows])


def _batches(numbers: Rows, places: Pieces) -> Iterator[Rows]:
    """Yield the rows of each batch: blocks of one drive, in drive order."""
    if not len(numbers):
        return
    order = np.lexsort((places.drive_offsets, numbers))
    drives = numbers[order]
    ends = np.cumsum(places.lengths[order], dtype=np.int64)
    parts = (ends - places.lengths[order]) // BATCH_BYTES
    cuts = np.flatnonzero((drives[1:] != drives[:-1]) | (parts[1:] != parts[:-1])) + 1
    yield from np.split(order, cuts)


def _release(engine: IoEngine, drives: tuple[_ReaderDrive, ...]) -> None:
    """Close engine and drives without reads under way."""
    for drive in drives:
        engine.detach(drive.handle)
    engine.close()
    for drive in drives:
        os.close(drive.at.descriptor)


def _call(receiver: Callable[..., None], *arguments: object) -> None:
    """Call a receiver, which should raise nothing."""
    try:
        receiver(*arguments)
    except Exception:
        log.exception("a receiver of direct reads failed: a bug")
