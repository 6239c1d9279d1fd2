"""A drive in memory, whose faults are planted by whoever tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.ids import DriveId
from ostraca_fabric.ports.drive import Run

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Fault:
    """What befalls runs that touch some bytes."""

    offset: int
    length: int
    fails_reads: bool
    written_bytes: int | None
    """How much of a write arrives before it fails; None: writes are not concerned."""

    def touches(self, run: Run) -> bool:
        return run.offset < self.offset + self.length and self.offset < run.offset + _length(run)


class MemoryDrive:
    """Implements ``ports.drive.Drive`` on the event loop's own thread, in the order of submission.

    What is submitted is done at once, and its future resolves in a later turn of the loop.
    """

    def __init__(
        self,
        drive: DriveId,
        size_bytes: int,
        *,
        runs_queued_max: int = 4096,
        has_volatile_cache: bool = False,
    ) -> None:
        assert size_bytes % PAGE_BYTES == 0, "a drive has whole pages"
        self.id = drive
        self.size_bytes = size_bytes
        self.has_volatile_cache = has_volatile_cache
        self.bytes = bytearray(size_bytes)
        """What lies on the drive. Change it at will: that is what bit rot does."""

        self._runs_queued_max = runs_queued_max
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
        """Runs submitted and not ended."""
        return self._queued

    def submit_read(
        self, runs: Sequence[Run], then: Callable[[int], bool] | None = None
    ) -> asyncio.Future[list[bool]]:
        """Read every run, as the port says."""
        return self._submit(runs, lambda number: self._read(runs[number]) and (then is None or then(number)))

    def submit_write(self, runs: Sequence[Run]) -> asyncio.Future[list[bool]]:
        """Write every run, as the port says."""
        return self._submit(runs, lambda number: self._write(runs[number]))

    def submit_flush(self) -> asyncio.Future[bool]:
        """Memory is as durable as it gets."""
        flushed = asyncio.get_running_loop().create_future()
        flushed.get_loop().call_soon(_resolve, flushed, True)  # noqa: FBT003 - the result
        return flushed

    def close(self) -> None:
        """Take no more runs."""
        self._is_closed = True

    def _submit(self, runs: Sequence[Run], act: Callable[[int], bool]) -> asyncio.Future[list[bool]]:
        assert not self._is_closed, "the drive is closed"
        for run in runs:
            assert run.offset % PAGE_BYTES == 0, "a run starts at a page"
            assert all(len(view) % PAGE_BYTES == 0 for view in run.views), "a run has whole pages"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[bool]] = loop.create_future()
        if self._queued + len(runs) > self._runs_queued_max:
            future.set_result([False] * len(runs))
            return future
        self._queued += len(runs)
        loop.call_soon(self._end, future, [act(number) for number in range(len(runs))])
        return future

    def _end(self, future: asyncio.Future[list[bool]], ends: list[bool]) -> None:
        self._queued -= len(ends)
        _resolve(future, ends)

    def _read(self, run: Run) -> bool:
        if run.offset + _length(run) > self.size_bytes:
            return False
        if any(fault.fails_reads and fault.touches(run) for fault in self._faults):
            return False
        offset = run.offset
        for view in run.views:
            view[:] = self.bytes[offset : offset + len(view)]
            offset += len(view)
        return True

    def _write(self, run: Run) -> bool:
        if run.offset + _length(run) > self.size_bytes:
            return False
        written = b"".join(run.views)
        torn = [
            fault.written_bytes
            for fault in self._faults
            if fault.written_bytes is not None and fault.touches(run)
        ]
        arrives = min(torn, default=len(written))
        self.bytes[run.offset : run.offset + arrives] = written[:arrives]
        return not torn


def _length(run: Run) -> int:
    return sum(map(len, run.views))


def _resolve(future: asyncio.Future[_Result], result: _Result) -> None:
    if not future.done():
        future.set_result(result)
