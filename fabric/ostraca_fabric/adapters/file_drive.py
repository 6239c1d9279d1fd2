"""A drive that is a file or a block device, read and written by a few threads of its own.

O_DIRECT where the file system allows: blocks then go straight between flash and staging memory, and what was
read is what lies on flash. A batch of runs is shared out among the threads and wakes the event loop once,
when the last run has ended. A blocked read can't be interrupted, so the threads are bounded, and so is what
may wait for them.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ostraca_fabric.errors import DriveError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.ids import DriveId
from ostraca_fabric.labels import current_label, labelled
from ostraca_fabric.ports.drive import Run

log = logging.getLogger(__name__)

_IOV_MAX = 1024
"""Views that one preadv or pwritev takes; Linux's limit."""


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """How one drive is used."""

    threads: int = 4
    """Reads and writes under way at once. Four keep most NVMe drives busy with 1 MiB blocks."""

    is_direct: bool = True
    """Whether to go past the page cache where the file system allows. False is for file systems where that
    is slow, and for tests: reads may then come from memory, which hides what flash would have said."""

    runs_queued_max: int = 4096
    """Runs submitted and not ended; more fail at once, which makes their blocks misses."""

    has_volatile_cache: bool | None = None
    """Whether the drive may lose at a power cut what it has said is written. None asks the kernel for a
    block device, and takes a plain file as it comes: no flush, so a power cut may lose its newest blocks."""


class FileDrive:
    """Implements ``ports.drive.Drive``. ``open`` makes it."""

    def __init__(
        self,
        drive: DriveId,
        descriptor: int,
        *,
        size_bytes: int,
        has_volatile_cache: bool,
        settings: DriveSettings,
    ) -> None:
        self.id = drive
        self.size_bytes = size_bytes
        self.has_volatile_cache = has_volatile_cache
        self.failures = 0
        """Operations that have failed since the drive was opened."""

        self.last_error = ""
        """What the last of them said."""

        self._descriptor = descriptor
        self._runs_queued_max = settings.runs_queued_max
        self._queued = 0
        self._failing = threading.Lock()
        self._jobs: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
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
        return cls(drive, descriptor, size_bytes=size_bytes, has_volatile_cache=volatile, settings=chosen)

    @property
    def queued(self) -> int:
        """Runs submitted and not ended."""
        return self._queued

    def submit_read(
        self, runs: Sequence[Run], then: Callable[[int], bool] | None = None
    ) -> asyncio.Future[list[bool]]:
        """Read every run, as the port says."""
        _check_aligned(runs)

        def read(number: int) -> bool:
            return self._moved(os.preadv, runs[number]) and (then is None or then(number))

        return self._submit(len(runs), read)

    def submit_write(self, runs: Sequence[Run]) -> asyncio.Future[list[bool]]:
        """Write every run, as the port says."""
        _check_aligned(runs)
        return self._submit(len(runs), lambda number: self._moved(os.pwritev, runs[number]))

    def submit_flush(self) -> asyncio.Future[bool]:
        """Make everything written before durable."""
        flushed = asyncio.get_running_loop().create_future()

        def flush(_: int) -> bool:
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self._count_failure(f"flush: {error.strerror}")
                return False
            return True

        def end(ends: asyncio.Future[list[bool]]) -> None:
            if not flushed.done():
                flushed.set_result(ends.result()[0])

        self._submit(1, flush).add_done_callback(end)
        return flushed

    def close(self) -> None:
        """Wait for operations under way, then let the drive go."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._descriptor)

    def _submit(self, count: int, act: Callable[[int], bool]) -> asyncio.Future[list[bool]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[bool]] = loop.create_future()
        if not count or self._queued + count > self._runs_queued_max:
            future.set_result([False] * count)
            return future
        self._queued += count
        log.debug("drive %s: %d runs submitted behind %d", self.id, count, self._queued - count)

        def end(ends: list[bool]) -> None:
            self._queued -= count
            if not future.done():  # its holder may have cancelled it, against the rules of the port
                future.set_result(ends)

        batch = _Batch(count, act, loop, end)
        for _ in range(min(count, len(self._threads))):
            self._jobs.put(batch)
        return future

    def _work(self) -> None:
        while (batch := self._jobs.get()) is not None:
            with labelled(batch.label):
                batch.work()

    def _moved(self, call: Callable[[int, list[memoryview], int], int], run: Run) -> bool:
        """Move a run whole, in as many calls as it takes; says whether it was."""
        offset, views = run.offset, list(run.views)
        if offset + sum(map(len, views)) > self.size_bytes:  # a plain file would grow
            self._count_failure(f"{call.__name__} at {offset} reaches beyond the drive's end")
            return False
        try:
            while views:
                count = call(self._descriptor, views[:_IOV_MAX], offset)
                if count <= 0:
                    self._count_failure(f"{call.__name__} at {run.offset} came to an end at byte {offset}")
                    return False
                offset += count
                views = _without(views, count)
        except OSError as error:
            self._count_failure(f"{call.__name__} at {run.offset}: {error.strerror}")
            return False
        return True

    def _count_failure(self, what: str) -> None:
        with self._failing:
            self.failures += 1
            self.last_error = what
            count = self.failures
        # Loudly the 1st, 2nd, 4th, 8th ... time only: a broken drive fails thousands of times.
        level = logging.WARNING if count.bit_count() == 1 else logging.DEBUG
        log.log(level, "Drive %s has failed %d times, just now: %s", self.id, count, what)


class _Batch:
    """Runs that several threads take one after the other; the last to finish wakes the loop."""

    def __init__(
        self,
        count: int,
        act: Callable[[int], bool],
        loop: asyncio.AbstractEventLoop,
        end: Callable[[list[bool]], None],
    ) -> None:
        self._act = act
        self._loop = loop
        self._end = end
        self.label = current_label()
        self._ends = [False] * count
        # next() of a count is one step under the interpreter lock: no two threads get the same number.
        self._next = itertools.count()
        self._done = itertools.count(1)

    def work(self) -> None:
        """Take runs until none is left."""
        count = len(self._ends)
        while (number := next(self._next)) < count:
            try:
                self._ends[number] = self._act(number)
            except Exception:
                log.exception("A drive's thread met a bug; the run counts as failed")
            if next(self._done) == count:
                # The loop may be gone when its process is ending; nobody waits then.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._end, self._ends)


def _without(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of *views* after their first *count* bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def _check_aligned(runs: Sequence[Run]) -> None:
    for run in runs:
        assert run.offset >= 0, "a run lies on the drive"
        assert run.offset % PAGE_BYTES == 0, "a run starts at a page"
        assert all(len(view) % PAGE_BYTES == 0 for view in run.views), "a run has whole pages"


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
