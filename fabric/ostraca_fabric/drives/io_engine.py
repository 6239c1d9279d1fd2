"""Flash I/O engine of all drives of a process, in C (``native/io``).

The engine carries reads, writes and flushes out by io_uring, with one ring and one thread. Where the kernel
refuses io_uring, as seccomp profiles of containers do, a bounded pool of threads replaces the ring. Drives
take turns. The bytes under way are limited per drive and in total. Batches up to 256 KiB overtake longer
batches of the same drive. Threads of the engine check tags right behind each read.

All ended batches make one eventfd readable. So does progress of long batches, if the submitter wants to know.
An event loop (``LoopIoEngine``) or a thread waits for the eventfd, and then calls ``take``.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import DriveError, UsageError
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.limits import check_one_at_least
from ostraca_fabric.native import at, brief, library
from ostraca_fabric.tables.digests import TagCheck

log = logging.getLogger(__name__)

_END = np.dtype(
    [
        ("ticket", np.uint64),
        ("is_over", np.int64),
        ("failed", np.int64),
        ("offset", np.int64),
        ("error", np.int64),
    ]
)
"""``struct io_end`` of ``native/io/io.h``."""

_ENDS_MAX = 256
"""Batches with progress or an end taken in one call."""

CHECKERS_MAX = 8


@dataclass(frozen=True, slots=True)
class FlashIoSettings:
    """Limits of flash I/O, of all drives of an agent together."""

    io_uring: bool = True
    """Whether to use io_uring where the kernel permits. Otherwise a pool of threads does the same I/O, with
    more processor time."""

    drive_bytes_max: int = 4 << 20
    """Bytes under way on one drive; the last I/O may exceed them. Four reads of 1 MiB reach the full rate of
    most drives; more bytes only delay the next read. Raise the limit for drives that need deeper queues.
    User-space NVMe/TCP ignores it."""

    bytes_max: int = 256 << 20
    """Bytes under way on all drives. A drive without I/O under way may always begin an I/O."""

    checkers: int = 2
    """Threads for tag checks of reads through io_uring, 1 to 8. A thread checks about 10 GB/s."""

    def __post_init__(self) -> None:
        """Refuse impossible limits."""
        check_one_at_least(self, "drive_bytes_max", "bytes_max", "checkers")
        if self.checkers > CHECKERS_MAX:
            raise UsageError(f"checkers is at most {CHECKERS_MAX}, not {self.checkers}")


class IoOperation(IntEnum):
    """Kinds of a batch, as in ``native/io/io.h``."""

    READ = 0
    WRITE = 1
    FLUSH = 2


class IoEnd(NamedTuple):
    """Result of a batch."""

    failed: int
    """Failed I/Os."""

    offset: int
    """Place of the last failure on the drive."""

    error: int
    """errno of the last failure, or 0 for the end of the drive."""


class DriveEngine(Protocol):
    """Engine of open drives, as ``IoEngine`` defines it. Tests have a second implementation in Python."""

    def attach(self, descriptor: int, size_bytes: int) -> int:
        """Add a drive of *size_bytes* at an open *descriptor*; return a handle."""

    def detach(self, drive: int) -> None:
        """Remove a drive."""

    def submit(
        self,
        drive: int,
        operation: IoOperation,
        pieces: Pieces | None,
        check: TagCheck | None,
        end: Callable[[IoEnd], None],
        *,
        states: NDArray[np.uint8] | None = None,
    ) -> bool:
        """Submit a batch on an event loop, which calls *end* later."""

    def close(self) -> None:
        """End after all drives."""


class _Columns(ctypes.Structure):
    """``struct io_columns`` of ``native/io/io.h``."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("memory_bytes", ctypes.c_uint64),
        ("drive_offsets", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("pieces", ctypes.c_int64),
        ("block_lengths", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        ("tags", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("progress_bytes", ctypes.c_uint64),
    )


def _places(pieces: Pieces) -> tuple[int, int, int, int, int]:
    """Return the first members of ``_Columns``."""
    memory = pieces.memory
    drive_offsets, offsets = at(pieces.drive_offsets), at(pieces.memory_offsets)
    return at(memory), memory.nbytes, drive_offsets, offsets, at(pieces.lengths)


class _Batch(NamedTuple):
    """Arrays in use until the batch has ended, and the receiver of the end."""

    pieces: Pieces | None
    check: TagCheck | None
    states: NDArray[np.uint8] | None
    end: Callable[[IoEnd], None]


class IoEngine:
    """I/O of all drives of a process. Close it after its drives.

    Any thread may submit. Only one thread at a time may take ends.
    """

    def __init__(self, settings: FlashIoSettings | None = None) -> None:
        """Start the engine's threads. Raises DriveError if the process can start no thread."""
        chosen = settings or FlashIoSettings()
        error = np.zeros(1, np.int64)
        self._engine = library.ostraca_io_open(
            not chosen.io_uring, chosen.drive_bytes_max, chosen.bytes_max, chosen.checkers, at(error)
        )
        if not self._engine:
            raise DriveError(f"the flash I/O engine can't start: {os.strerror(int(error[0]))}")
        self.mode: str = library.ostraca_io_mode(self._engine).decode()
        """``io_uring`` or ``threads``."""

        if chosen.io_uring and self.mode != "io_uring":
            log.warning("The kernel refuses io_uring: threads do the flash I/O, with more processor time")

        self.descriptor: int = library.ostraca_io_event(self._engine)
        """An eventfd, readable while ``take`` has news. The engine closes the descriptor."""

        self._tickets = itertools.count(1)
        self._batches: dict[int, _Batch] = {}
        self._ends = np.zeros(_ENDS_MAX, _END)

    def attach(self, descriptor: int, size_bytes: int) -> int:
        """Add a drive of *size_bytes* at an open *descriptor*; return a handle. The caller closes both."""
        return self._attach(descriptor, 0, size_bytes)

    def attach_process(self, process: int, size_bytes: int) -> int:
        """Add the memory of another process below an address; return a handle, as for a drive.

        Only reads, and only without io_uring. Each block's memory has whole pages, whose rest is zeroed.
        """
        assert self.mode == "threads", "io_uring reads no memory of a process"
        return self._attach(-1, process, size_bytes)

    def _attach(self, descriptor: int, process: int, size_bytes: int) -> int:
        drive: int | None = library.ostraca_io_attach(self._engine, descriptor, process, size_bytes)
        if drive is None:
            raise MemoryError
        return drive

    @staticmethod
    def detach(drive: int) -> None:
        """Wait for the I/O of a drive, then remove the drive. May be called in any thread."""
        library.ostraca_io_detach(drive)

    def submit(
        self,
        drive: int,
        operation: IoOperation,
        pieces: Pieces | None,
        check: TagCheck | None,
        end: Callable[[IoEnd], None],
        *,
        states: NDArray[np.uint8] | None = None,
    ) -> bool:
        """Submit a batch. A later ``take`` calls *end*.

        False, with nothing submitted, if a piece lies outside of its memory or no memory is left. *states*,
        those of *check* with a check, then has a ``CheckState`` per piece. Listeners of *check* are called
        whenever ``progress_bytes`` have been read, once for all since the last ``take``.
        """
        self._prepare_taking()
        ticket, count = next(self._tickets), 0 if pieces is None else len(pieces.lengths)
        columns = _Columns(
            *((None, 0, None, None, None) if pieces is None else _places(pieces)),
            count,
            *((None,) * 3 if check is None else (at(check.lengths), at(check.seeds), at(check.tags))),
            None if states is None else at(states),
            0 if check is None else check.progress_bytes,
        )
        self._batches[ticket] = _Batch(pieces, check, states, end)
        submitted = brief.ostraca_io_submit(drive, operation, ctypes.byref(columns), ticket)
        if submitted == count:
            return True
        del self._batches[ticket]
        if submitted < 0:
            log.warning("No memory for I/O: the operation counts as failed")
        else:
            log.error("Piece %d lies outside of its memory: a bug; the operation counts as failed", submitted)
        return False

    def take(self) -> None:
        """Call the receivers of all ends and progress since the last call. Never blocks.

        A RuntimeError of a receiver is dropped: its event loop has ended, and no caller waits.
        """
        count = _ENDS_MAX
        while count == _ENDS_MAX:
            count = brief.ostraca_io_take(self._engine, at(self._ends), _ENDS_MAX)
            for ticket, is_over, failed, offset, error in self._ends[:count].tolist():
                with contextlib.suppress(RuntimeError):
                    if is_over:
                        self._batches.pop(ticket).end(IoEnd(failed, offset, error))
                    elif (check := self._batches[ticket].check) is not None:
                        check.tell()

    def close(self) -> None:
        """Take what has ended, wait for all other I/O, and stop the threads."""
        self.take()
        library.ostraca_io_close(self._engine)

    def _prepare_taking(self) -> None:
        """Ensure that ends are taken. Called before each batch; here the caller of ``take`` ensures this."""
