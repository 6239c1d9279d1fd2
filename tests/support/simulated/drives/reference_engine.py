"""Reference of the flash I/O engine: scheduling and results of ``native/io``, without threads.

Both engines pass the same contract tests. A batch is one call: pieces to read or write, or a flush. Rules:

- The engine cuts a batch into I/Os of adjacent pieces: at most 256 pieces and 1 MiB, or a longer piece.
- Drives take turns, I/O by I/O.
- The bytes under way are limited per drive and in total. A drive with nothing under way may always begin.
- Batches of up to 256 KiB overtake longer batches of the same drive, and have 256 KiB of room on top of the
  limits. After 8 short I/Os in a row a longer batch has its turn.
- Batches of one kind begin in the order of submission; I/Os end in any order.
- Tags are checked once per piece, right behind a complete read. A failed I/O fails all its pieces.
- Progress and ends are reported in a later turn of the event loop, once for all news of a batch since then.

The engine decides *when* an I/O begins. A ``Device`` performs the I/O: a file, memory, or simulated flash.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.drives.io_engine import FlashIoSettings, IoEnd, IoOperation
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.tables.digests import CheckState, TagCheck

log = logging.getLogger(__name__)

PIECES_MAX = 256
IO_BYTES_MAX = 1 << 20
SHORT_BYTES = 256 << 10
SHORT_STREAK = 8
"""Short I/Os before the next long I/O of the same drive."""

END_OF_DRIVE = 0
"""Failure of an I/O beyond the end of a drive, in place of an errno."""

_GOOD_END = IoEnd(failed=0, offset=0, error=0)

Done = Callable[[int | None], None]
"""Receiver of an I/O's end: None for success, an errno, or ``END_OF_DRIVE``."""


class Device(Protocol):
    """Performer of a drive's I/Os."""

    def begin(self, io: ReferenceIo, done: Done) -> None:
        """Begin an I/O within the drive. Call *done* once on the event loop, now or later.

        An I/O without a call of *done* stays under way, as on a hung drive.
        """


def cut(pieces: Pieces) -> list[slice]:
    """Return the rows of each I/O: runs of adjacent pieces."""
    cuts, first, size_bytes = list[slice](), 0, 0
    ends, lengths = (pieces.drive_offsets + pieces.lengths).tolist(), pieces.lengths.tolist()
    for row, offset in enumerate(pieces.drive_offsets.tolist()):
        is_full = row - first == PIECES_MAX or size_bytes + lengths[row] > IO_BYTES_MAX
        if row > first and (is_full or offset != ends[row - 1]):
            cuts.append(slice(first, row))
            first, size_bytes = row, 0
        size_bytes += lengths[row]
    return [*cuts, slice(first, len(pieces))] if len(pieces) else []


@dataclass(slots=True, eq=False)
class _Batch:
    """A call, and its state."""

    operation: IoOperation
    pieces: Pieces | None
    check: TagCheck | None
    states: NDArray[np.uint8] | None
    end: Callable[[IoEnd], None]
    user_data: int
    cuts: deque[slice]
    """Rows of the I/Os to begin."""

    is_short: bool
    under_way: int = 0
    """I/Os."""

    result: IoEnd = _GOOD_END
    untold_bytes: int = 0
    is_over: bool = False
    is_listed: bool = False

    def next_io(self, drive_bytes: int) -> ReferenceIo | None:
        """Return the next I/O; None if no I/O is left. Fails runs of pieces that leave the drive."""
        while self.cuts:
            io = ReferenceIo(self, self.cuts.popleft())
            if 0 <= io.offset <= drive_bytes - io.size_bytes:
                return io
            self.fail(drive_bytes, END_OF_DRIVE)
        return None

    def fail(self, offset: int, error: int) -> None:
        self.result = IoEnd(self.result.failed + 1, offset, error)


class ReferenceIo:
    """Adjacent pieces of a batch, or a flush."""

    def __init__(self, batch: _Batch, rows: slice) -> None:
        """Take the next rows of *batch*."""
        self.batch, self.rows = batch, rows
        self.operation, self.user_data = batch.operation, batch.user_data
        self.offset = 0
        """Place on the drive."""

        self.parts: list[NDArray[np.uint8]] = []
        """Memory of each piece."""

        if (pieces := batch.pieces) is not None:
            self.offset = int(pieces.drive_offsets[rows.start])
            places = zip(pieces.memory_offsets[rows].tolist(), pieces.lengths[rows].tolist(), strict=True)
            self.parts = [pieces.memory[at : at + length] for at, length in places]
        self.size_bytes = sum(len(part) for part in self.parts)
        self.moved = 0
        """Bytes read or written so far, kept by the device: the place of a failure."""


@dataclass(slots=True, eq=False)
class _Drive:
    """Queues of a drive, and its I/O under way."""

    device: Device
    size_bytes: int
    waiting: deque[_Batch] = field(default_factory=deque)
    waiting_short: deque[_Batch] = field(default_factory=deque)
    streak: int = 0
    """Short I/Os begun one after another."""

    under_way: int = 0
    bytes_under_way: int = 0
    is_listed: bool = False

    def turn(self) -> deque[_Batch]:
        """Return the queue whose turn it is."""
        if not self.waiting_short or (self.waiting and self.streak >= SHORT_STREAK):
            return self.waiting
        return self.waiting_short


class ReferenceEngine:
    """Engine of ``io_engine.IoEngine``'s behaviour, for drives on devices."""

    def __init__(self, settings: FlashIoSettings | None = None) -> None:
        """Begin without drives."""
        self._settings = settings or FlashIoSettings()
        self._handles = itertools.count(1)
        self._drives: dict[int, _Drive] = {}
        self._ready: deque[_Drive] = deque()
        """Drives with work to begin, in turn."""

        self._bytes_under_way = 0
        self._is_beginning = False

    def add(self, device: Device, size_bytes: int) -> int:
        """Add a drive of *size_bytes*; return a handle."""
        handle = next(self._handles)
        self._drives[handle] = _Drive(device, size_bytes)
        return handle

    def detach(self, drive: int) -> None:
        """Remove a drive. I/O submitted before goes on."""
        del self._drives[drive]

    def submit(
        self,
        drive: int,
        operation: IoOperation,
        pieces: Pieces | None,
        check: TagCheck | None,
        end: Callable[[IoEnd], None],
        *,
        states: NDArray[np.uint8] | None = None,
        user_data: int = 0,
    ) -> bool:
        """Submit a batch, as ``IoEngine.submit`` does. The device finds *user_data* in each I/O."""
        if pieces is not None:
            room = pieces.memory.nbytes - pieces.lengths.astype(np.int64)
            is_outside = (pieces.memory_offsets < 0) | (pieces.memory_offsets > room)
            if is_outside.any():
                outside = int(np.argmax(is_outside))
                log.error(
                    "Piece %d lies outside of its memory: a bug; the operation counts as failed", outside
                )
                return False
        if states is not None:
            states[:] = CheckState.PENDING
        cuts = deque([slice(0, 0)] if pieces is None else cut(pieces))
        is_short = pieces is None or int(pieces.lengths.sum(dtype=np.int64)) <= SHORT_BYTES
        to = self._drives[drive]
        queue = to.waiting_short if is_short else to.waiting
        queue.append(_Batch(operation, pieces, check, states, end, user_data, cuts, is_short))
        self._list_drive(to)
        self._begin_ios()
        return True

    def close(self) -> None:
        """Assert that all drives were detached."""
        assert not self._drives, "an engine is closed after its drives"

    def _list_drive(self, drive: _Drive) -> None:
        if not drive.is_listed and (drive.waiting or drive.waiting_short):
            drive.is_listed = True
            self._ready.append(drive)

    def _may_begin(self, drive: _Drive, *, is_short: bool) -> bool:
        extra, limits = SHORT_BYTES if is_short else 0, self._settings
        return not drive.under_way or (
            drive.bytes_under_way < limits.drive_bytes_max + extra
            and self._bytes_under_way < limits.bytes_max + extra
        )

    def _begin_ios(self) -> None:
        """Begin every I/O that may begin. Devices that are done at once call back from here."""
        if self._is_beginning:
            return
        self._is_beginning = True
        while self._ready:
            drive = self._ready.popleft()
            drive.is_listed = False
            queue = drive.turn()
            batch = queue[0]
            if not self._may_begin(drive, is_short=batch.is_short):
                continue  # the end of an I/O lists the drive again
            io = batch.next_io(drive.size_bytes)
            if not batch.cuts:
                queue.popleft()
            drive.streak = drive.streak + 1 if batch.is_short else 0
            self._list_drive(drive)
            if io is None:
                self._end_if_over(batch)
                continue
            batch.under_way += 1
            drive.under_way += 1
            drive.bytes_under_way += io.size_bytes
            self._bytes_under_way += io.size_bytes
            drive.device.begin(io, partial(self._finish, drive, io))
        self._is_beginning = False

    def _finish(self, drive: _Drive, io: ReferenceIo, failure: int | None) -> None:
        """End an I/O, and begin waiting I/Os."""
        batch, rows = io.batch, io.rows
        if failure is not None:
            batch.fail(io.offset + io.moved, failure)
        elif batch.check is not None:
            batch.check.run(rows)
        elif batch.states is not None:
            batch.states[rows] = CheckState.GOOD
        batch.under_way -= 1
        drive.under_way -= 1
        drive.bytes_under_way -= io.size_bytes
        self._bytes_under_way -= io.size_bytes
        batch.untold_bytes += io.size_bytes
        if batch.check is not None and 0 < batch.check.progress_bytes <= batch.untold_bytes:
            batch.untold_bytes = 0
            _list(batch)
        self._end_if_over(batch)
        self._list_drive(drive)
        self._begin_ios()

    def _end_if_over(self, batch: _Batch) -> None:
        if not batch.cuts and not batch.under_way:
            batch.is_over = True
            _list(batch)


def _list(batch: _Batch) -> None:
    """Have the loop report a batch."""
    if not batch.is_listed:
        batch.is_listed = True
        asyncio.get_running_loop().call_soon(_report, batch)


def _report(batch: _Batch) -> None:
    """Report all news of a batch."""
    batch.is_listed = False
    if batch.is_over:
        batch.end(batch.result)
    elif batch.check is not None:
        batch.check.tell()
