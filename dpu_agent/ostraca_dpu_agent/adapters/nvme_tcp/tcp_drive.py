"""Drive over the user-space initiator: threads that move pieces through the association of the moment.

The drive outlives associations: each share of pieces uses the live path to the drive's NGUID. Without a path,
operations fail at once, so no write waits for a path's return.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.adapters.nvme_tcp.association import LOST, Association, FoundNamespace
from ostraca_dpu_agent.adapters.nvme_tcp.drive_threads import DriveThreads, good_stretches
from ostraca_dpu_agent.adapters.nvme_tcp.queue_pair import Transfer, cut
from ostraca_fabric.errors import DriveError
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.sockets.nvme_tcp.commands import IoOpcode, NvmeCommand, block_command
from ostraca_fabric.tables.digests import TagCheck


class DrivePath(Protocol):
    """Path to one drive, whichever controller is live."""

    def current(self) -> tuple[Association, FoundNamespace]:
        """Return the association and the namespace to use now. Raises DriveError without any."""


@dataclass(slots=True)
class _Run:
    """Adjacent pieces, moved together."""

    rows: slice
    offset: int
    buffers: list[memoryview]
    size: int


class TcpDrive:
    """Implements ``ports.drive.Drive``. Attempts every operation."""

    is_file = True
    """Behind the target is a file, on a disk with other users."""

    refuses_reads = False
    refuses_writes = False
    reads_given_up = writes_given_up = None

    def __init__(self, drive: DriveId, path: DrivePath, *, pieces_queued_max: int = 1 << 16) -> None:
        """Open the drive at *path*. Raises DriveError without a path."""
        association, namespace = path.current()
        self.id = drive
        self.size_bytes = namespace.size_bytes
        self.has_volatile_cache = association.identity.has_volatile_cache
        self._path = path
        self._threads = DriveThreads(drive, pieces_queued_max=pieces_queued_max)

    @property
    def queued(self) -> int:
        """Pieces submitted and not ended."""
        return self._threads.queued

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[NDArray[np.bool_]]:
        """Read every piece, as defined by the port."""
        pieces.check()
        loop = asyncio.get_running_loop()

        def read(rows: slice) -> NDArray[np.bool_]:
            is_good = self._move(pieces, rows, IoOpcode.READ)
            if check is not None:
                for begin, end in good_stretches(is_good):
                    is_good[begin:end] = check.run(slice(rows.start + begin, rows.start + end))
                if check.progress_bytes:
                    with contextlib.suppress(RuntimeError):  # the loop has ended: no caller waits
                        loop.call_soon_threadsafe(check.tell)
            return is_good

        return self._threads.submit_pieces(pieces, read)

    def submit_write(self, pieces: Pieces) -> asyncio.Future[NDArray[np.bool_]]:
        """Write every piece, as defined by the port."""
        pieces.check()
        return self._threads.submit_pieces(pieces, lambda rows: self._move(pieces, rows, IoOpcode.WRITE))

    def submit_flush(self) -> asyncio.Future[bool]:
        """Make all earlier writes durable."""

        def flush() -> bool:
            try:
                flush_drive(self._path)
            except DriveError as error:
                self._threads.count_failures(1, str(error))
                return False
            return True

        return self._threads.submit_one(flush)

    def submit_look(self) -> asyncio.Future[str | None]:
        """Compare the drive with its size at opening, as defined by the port."""
        looked: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        try:
            size_bytes = self._path.current()[1].size_bytes
        except DriveError:
            looked.set_result(None)
            return looked
        is_same = size_bytes == self.size_bytes
        looked.set_result(
            ""
            if is_same
            else f"has {size_bytes} bytes, and had {self.size_bytes} at opening: replace the drive"
        )
        return looked

    def close(self) -> None:
        """Wait for operations in progress, then end the threads."""
        self._threads.close()

    def _move(self, pieces: Pieces, rows: slice, opcode: IoOpcode) -> NDArray[np.bool_]:
        is_good = np.zeros(rows.stop - rows.start, np.bool_)
        runs = list(_runs(pieces, rows, self.size_bytes))
        beyond = len(is_good) - sum(run.rows.stop - run.rows.start for run in runs)
        if beyond:
            self._threads.count_failures(beyond, f"{opcode.name.lower()} beyond {self.size_bytes} bytes")
        if not runs:
            return is_good
        for run, trouble in zip(runs, move_runs(self._path, runs, opcode), strict=True):
            if trouble:
                self._threads.count_failures(1, f"{opcode.name.lower()} at {run.offset}: {trouble}")
            else:
                is_good[run.rows.start - rows.start : run.rows.stop - rows.start] = True
        return is_good


def move_runs(path: DrivePath, runs: list[_Run], opcode: IoOpcode) -> list[str]:
    """Read or write runs over the present path; return for each the reason of its failure, or nothing."""
    try:
        association, namespace = path.current()
    except DriveError as error:
        return [str(error)] * len(runs)
    by_run = [list(_transfers(run, opcode, namespace, association.transfer_bytes_max)) for run in runs]
    lost = ""
    try:
        association.run([transfer for transfers in by_run for transfer in transfers])
    except LOST as error:
        lost = str(error) or type(error).__name__
    return [
        next((_trouble(each, lost) for each in transfers if not each.is_good), "") for transfers in by_run
    ]


def move_whole(path: DrivePath, opcode: IoOpcode, offset: int, memory: memoryview) -> None:
    """Read or write one extent. Raises DriveError."""
    (trouble,) = move_runs(path, [_Run(slice(0, 1), offset, [memory], len(memory))], opcode)
    if trouble:
        raise DriveError(f"{opcode.name.lower()} error at {offset}: {trouble}")


def flush_drive(path: DrivePath) -> None:
    """Make all earlier writes durable. Raises DriveError."""
    association, namespace = path.current()
    transfer, lost = Transfer(NvmeCommand(IoOpcode.FLUSH, namespace=namespace.number)), ""
    try:
        association.run([transfer])
    except LOST as error:
        lost = str(error) or type(error).__name__
    if not transfer.is_good:
        raise DriveError(f"flush: {_trouble(transfer, lost)}")


def _runs(pieces: Pieces, rows: slice, size_bytes: int) -> Iterator[_Run]:
    """Yield runs of adjacent pieces, without pieces beyond the drive's end or outside of their memory."""
    memory = pieces.memory.data
    run: _Run | None = None
    for row in range(rows.start, rows.stop):
        offset, length = int(pieces.drive_offsets[row]), int(pieces.lengths[row])
        at = int(pieces.memory_offsets[row])
        is_inside = 0 <= offset <= size_bytes - length and 0 <= at <= len(memory) - length
        if run is not None and is_inside and offset == run.offset + run.size:
            run.rows = slice(run.rows.start, row + 1)
            run.buffers.append(memory[at : at + length])
            run.size += length
            continue
        if run is not None:
            yield run
        run = _Run(slice(row, row + 1), offset, [memory[at : at + length]], length) if is_inside else None
    if run is not None:
        yield run


def _transfers(run: _Run, opcode: IoOpcode, namespace: FoundNamespace, bytes_max: int) -> Iterator[Transfer]:
    lba_bytes = namespace.identity.lba_bytes
    for begin in range(0, run.size, bytes_max):
        size = min(bytes_max, run.size - begin)
        first = (run.offset + begin) // lba_bytes
        command = block_command(opcode, namespace.number, first, size // lba_bytes, size)
        yield Transfer(command, cut(run.buffers, begin, size), size)


def _trouble(transfer: Transfer, lost: str) -> str:
    return f"NVMe status {transfer.status:#x}" if transfer.status is not None else lost or "not tried"
