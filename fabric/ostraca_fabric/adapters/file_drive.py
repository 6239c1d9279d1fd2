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
from ostraca_fabric.ports.drive import Run

log = logging.getLogger(__name__)

_IOV_MAX = 1024
"""Views that one preadv or pwritev takes; Linux's limit."""


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """How one drive is used."""

    threads: int = 4
    """Reads and writes under way at once. Four keep most NVMe drives busy with 1 MiB blocks."""

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
        self.last_error = ""
        """What the last failed operation said; empty when none has failed."""

        self._descriptor = descriptor
        self._runs_queued_max = settings.runs_queued_max
        self._queued = 0
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
            descriptor = _opened(path)
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

        def read(number: int) -> bool:
            run = runs[number]
            return self._moved(os.preadv, run) and (then is None or then(number))

        return self._submit(len(runs), read)

    def submit_write(self, runs: Sequence[Run]) -> asyncio.Future[list[bool]]:
        """Write every run, as the port says."""
        return self._submit(len(runs), lambda number: self._moved(os.pwritev, runs[number]))

    def submit_flush(self) -> asyncio.Future[bool]:
        """Make everything written before durable."""
        flushed = asyncio.get_running_loop().create_future()

        def flush(_: int) -> bool:
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self._failed("flush", error)
                return False
            return True

        self._submit(1, flush).add_done_callback(lambda ends: flushed.set_result(ends.result()[0]))
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
        batch = _Batch(count, act, loop, future)
        future.add_done_callback(lambda _: self._ended(count))
        for _ in range(min(count, len(self._threads))):
            self._jobs.put(batch)
        return future

    def _ended(self, count: int) -> None:
        self._queued -= count

    def _work(self) -> None:
        while (batch := self._jobs.get()) is not None:
            batch.work()

    def _moved(self, call: Callable[[int, list[memoryview], int], int], run: Run) -> bool:
        """Move a run whole, in as many calls as it takes; says whether it was."""
        offset, views = run.offset, list(run.views)
        assert offset % PAGE_BYTES == 0, "a run starts at a page"
        try:
            while views:
                count = call(self._descriptor, views[:_IOV_MAX], offset)
                if count <= 0:
                    self.last_error = f"the drive ends before byte {offset + len(views[0])}"
                    return False
                offset += count
                views = _without(views, count)
        except OSError as error:
            self._failed(f"{call.__name__} at {run.offset}", error)
            return False
        return True

    def _failed(self, what: str, error: OSError) -> None:
        self.last_error = f"{what}: {error.strerror}"
        log.warning("Drive %s failed: %s", self.id, self.last_error)


class _Batch:
    """Runs that several threads take one after the other; the last to finish wakes the loop."""

    def __init__(
        self,
        count: int,
        act: Callable[[int], bool],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[list[bool]],
    ) -> None:
        self._act = act
        self._loop = loop
        self._future = future
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
                    self._loop.call_soon_threadsafe(self._future.set_result, self._ends)


def _without(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of *views* after their first *count* bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def _opened(path: str) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
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
