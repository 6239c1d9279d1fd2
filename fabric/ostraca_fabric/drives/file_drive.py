"""Drive on a file or block device, with the I/O of the process's engine.

O_DIRECT where the file system allows: blocks go straight between flash and staging memory, and reads return
the content of flash.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import stat
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.drives.flash_files import FlashFileError, displacement, goes_direct, open_flash
from ostraca_fabric.drives.io_engine import DriveEngine, FlashIoSettings, IoEnd, IoEngine, IoOperation
from ostraca_fabric.errors import DriveError
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.runtime.os_errors import state_and_remedy
from ostraca_fabric.runtime.threads import run_in_background
from ostraca_fabric.tables.digests import GOOD, TagCheck
from ostraca_fabric.telemetry.requests import current_label, labelled


class LoopIoEngine(IoEngine):
    """Engine for one event loop at a time. Submit on the loop."""

    def __init__(self, settings: FlashIoSettings | None = None) -> None:
        """Start the engine's threads. Raises DriveError if the process can start no thread."""
        super().__init__(settings)
        self._loop: asyncio.AbstractEventLoop | None = None

    def close(self) -> None:
        """Wait for all I/O and stop the threads. Call on the event loop, or after its end."""
        self._release_loop()
        super().close()

    def _prepare_taking(self) -> None:
        """Have the running loop take ends, in place of an earlier loop."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._release_loop()
        self._loop = loop
        loop.add_reader(self.descriptor, self.take)

    def _release_loop(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.descriptor)


log = logging.getLogger(__name__)

_WRITE_TROUBLE_S = 60.0
"""Time after a failed write during which the drive reports the cause, so that an intermittent failure is
reported once."""


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """Use of one drive."""

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
        engine: DriveEngine | None = None,
    ) -> None:
        """Take the *descriptor*, and close it at the end. Without *engine* the drive has one of its own."""
        self.id = drive
        self.size_bytes = size_bytes
        self.has_volatile_cache = has_volatile_cache
        self.is_file = is_file
        self._write_trouble = (-math.inf, 0)
        """Time of the last failed write, and its errno; 0 without a failure."""

        self._descriptor = descriptor
        self._path = path
        """Path at opening; empty if unknown."""

        self._pieces_queued_max = settings.pieces_queued_max
        self._queued = 0
        self.failures = 0
        """Failed operations since the drive was opened."""

        self.last_error = ""
        """Message of the last failure; empty without a failure."""

        self._looking: Future[str | None] | None = None
        self._owns_engine = engine is None
        self._engine: DriveEngine = engine or LoopIoEngine()
        self._handle = self._engine.attach(descriptor, size_bytes)

    @classmethod
    def open(
        cls,
        drive: DriveId,
        path: str,
        settings: DriveSettings | None = None,
        *,
        engine: DriveEngine | None = None,
    ) -> FileDrive:
        """Open an existing drive, on *engine* or an engine of its own.

        Raises DriveError with the reason for an unusable drive.
        """
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
            engine=engine,
        )

    @property
    def queued(self) -> int:
        """Pieces submitted and not ended."""
        return self._queued

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[NDArray[np.bool_]]:
        """Read every piece, as defined by the port."""
        return self._submit(IoOperation.READ, pieces, check)

    def submit_write(self, pieces: Pieces) -> asyncio.Future[NDArray[np.bool_]]:
        """Write every piece, as defined by the port."""
        return self._submit(IoOperation.WRITE, pieces)

    def submit_flush(self) -> asyncio.Future[bool]:
        """Make all earlier writes durable."""
        flushed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queued += 1
        label = current_label()

        def end(ended: IoEnd) -> None:
            self._queued -= 1
            if ended.failed:
                with labelled(label):
                    self._count_failures(IoOperation.FLUSH, ended)
            if not flushed.done():
                flushed.set_result(not ended.failed)

        if not self._engine.submit(self._handle, IoOperation.FLUSH, None, None, end):
            self._queued -= 1
            flushed.set_result(False)
        return flushed

    def submit_look(self) -> asyncio.Future[str | None]:
        """Check the drive's file, as defined by the port.

        Runs in a thread: a hanging file system blocks no other component, and only one look of its drive.
        """
        loop = asyncio.get_running_loop()
        looked: asyncio.Future[str | None] = loop.create_future()
        if self._looking is not None and not self._looking.done():
            looked.set_result(None)
            return looked
        self._looking = looking = run_in_background("look", self._look)

        def give() -> None:
            if not looked.done():
                looked.set_result(looking.result())

        def tell(_: Future[str | None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: no caller waits
                loop.call_soon_threadsafe(give)

        looking.add_done_callback(tell)
        return looked

    def close(self) -> None:
        """Wait for operations in progress, then close the drive."""
        self._engine.detach(self._handle)
        if self._looking is not None:
            self._looking.result()
        if self._owns_engine:
            self._engine.close()
        os.close(self._descriptor)

    def _submit(
        self,
        operation: IoOperation,
        pieces: Pieces,
        check: TagCheck | None = None,
    ) -> asyncio.Future[NDArray[np.bool_]]:
        pieces.check()
        future: asyncio.Future[NDArray[np.bool_]] = asyncio.get_running_loop().create_future()
        count, label = len(pieces), current_label()
        states = np.zeros(count, np.uint8) if check is None else check.states
        if not count or self._queued + count > self._pieces_queued_max:
            future.set_result(np.zeros(count, np.bool_))
            return future
        self._queued += count
        log.debug("drive %s: %d blocks submitted behind %d", self.id, count, self._queued - count)

        def end(ended: IoEnd) -> None:
            self._queued -= count
            if ended.failed:
                with labelled(label):
                    self._count_failures(operation, ended)
            if not future.done():  # a caller may have cancelled the future, against the rules of the port
                future.set_result(states == GOOD)

        if not self._engine.submit(self._handle, operation, pieces, check, end, states=states):
            self._queued -= count
            future.set_result(np.zeros(count, np.bool_))
        return future

    def _count_failures(self, operation: IoOperation, ended: IoEnd) -> None:
        why = os.strerror(ended.error) if ended.error else self._describe_end()
        place = "" if operation is IoOperation.FLUSH else f" at {ended.offset}"
        self.last_error = f"{operation.name.lower()}{place}: {why}"
        if operation is IoOperation.WRITE:
            self._write_trouble = time.monotonic(), ended.error
        before, self.failures = self.failures, self.failures + ended.failed
        # Warn only the 1st, 2nd, 4th, 8th ... time: a broken drive fails thousands of times.
        level = logging.WARNING if self.failures.bit_length() > before.bit_length() else logging.DEBUG
        log.log(level, "Drive %s has failed %d times, just now: %s", self.id, self.failures, self.last_error)

    def _describe_end(self) -> str:
        try:
            now_bytes = os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            return f"the drive comes to an end, and can't be measured: {error.strerror}"
        if now_bytes < self.size_bytes:
            return f"the drive was cut short: {now_bytes} bytes now, {self.size_bytes} bytes at opening"
        return f"the drive comes to an end at {self.size_bytes} bytes"

    def _look(self) -> str | None:
        if not self._path:
            return ""
        found = displacement(self._descriptor, self._path, self.size_bytes)
        at_s, number = self._write_trouble
        if found or not number or time.monotonic() - at_s > _WRITE_TROUBLE_S:
            return found
        state, remedy = state_and_remedy(OSError(number, os.strerror(number)))
        return f"can't be written at {self._path} ({state}){f': {remedy}' if remedy else ''}"


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
