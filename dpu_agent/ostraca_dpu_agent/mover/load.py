"""Flash into staging: reads extents, adjacent ones in one I/O, and checks every block's tag.

The check runs in the drive's threads, right behind the read, while the bytes are in cache and the loop is
free. Blocks are columns all the way: Python's part is the same for a wave of four blocks and of a thousand.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.mover.drive_io import WaveIO
from ostraca_fabric.extent import whole_pages
from ostraca_fabric.outcome import Reason
from ostraca_fabric.ports.drive import Pieces
from ostraca_fabric.tags import are_good

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.drive_io import Begun
    from ostraca_dpu_agent.mover.located import Located
    from ostraca_dpu_agent.mover.pace import Line, Pace
    from ostraca_dpu_agent.mover.staging import Lease, Staging
    from ostraca_fabric.ids import DriveId
    from ostraca_fabric.ports.drive import Drive


class Loader:
    """Reads located blocks into leased slots."""

    def __init__(
        self, staging: Staging, drives: Mapping[DriveId, Drive], pace: Pace, clock: Callable[[], float]
    ) -> None:
        """Read from *drives*, a mapping the steward keeps current, and tell *pace* how long reads take."""
        self._staging = staging
        self._drives = drives
        self._pace = pace
        self._clock = clock

    async def load(
        self,
        located: Located,
        positions: NDArray[np.intp],
        lease: Lease,
        seeds: NDArray[np.uint64],
    ) -> tuple[NDArray[np.uint8], WaveIO]:
        """Bring the blocks at *positions* into the lease's slots, in that order.

        Returns a Reason per block: NONE when it is there and verified, else DRIVE_ERROR, DRIVE_SUSPECT or
        DAMAGED; and the reads, of which those are left that drives have given up. Whoever can't wait that
        long leaves this running and keeps the lease.
        """
        reasons = np.full(len(positions), Reason.DRIVE_ERROR, np.uint8)
        reads = WaveIO()
        try:
            for drive_id, rows, drive_offsets in _by_drive(located, positions):
                drive = self._drives.get(drive_id)
                if drive is not None and drive.refuses_reads:
                    reasons[rows] = Reason.DRIVE_SUSPECT
                elif drive is not None:
                    lengths = located.lengths[positions[rows]]
                    offsets = lease.offsets[rows]
                    pieces = Pieces(self._staging.array, offsets, drive_offsets, whole_pages(lengths))
                    chosen = positions[rows]
                    check = _checker(pieces, lengths, seeds[chosen], located.tags[chosen], rows, reasons)
                    read = reads.add(rows, drive.submit_read(pieces, check), drive.reads_given_up)
                    self._measure(read, self._pace.drives[drive_id], int(lengths.sum()))
            await reads.ended_or_given_up()
        except BaseException:  # whatever went wrong: the lease must outlive every read that was begun
            await reads.ended()
            raise
        if reads.given_up:
            reasons = reasons.copy()  # what is left may still tell how it ended
            for left in reads.given_up:
                reasons[left.rows] = Reason.DRIVE_SUSPECT
        return reasons, reads

    def _measure(self, read: Begun, line: Line, read_bytes: int) -> None:
        """Measure a read. The end of one that was given up says nothing of others."""

        def ended(_: asyncio.Future[NDArray[np.bool_]]) -> None:
            if read.is_given_up:
                line.abandon(read_bytes)
            else:
                line.end(self._clock(), read_bytes)

        line.begin(self._clock(), read_bytes)
        read.ends.add_done_callback(ended)


def _by_drive(
    located: Located, positions: NDArray[np.intp]
) -> Iterator[tuple[DriveId, NDArray[np.intp], NDArray[np.int64]]]:
    """Yield for each drive the rows of *positions* that lie on it, in the order they lie there, and where."""
    numbers: dict[DriveId, int] = {}
    of_source = [numbers.setdefault(source.drive, len(numbers)) for source in located.sources]
    sources = located.source[positions]
    drives = np.array(of_source, np.intp)[sources]
    bases = np.array([source.base for source in located.sources], np.int64)
    offsets = bases[sources] + located.offsets[positions].astype(np.int64)
    order = np.lexsort((offsets, drives))
    ends = np.cumsum(np.bincount(drives, minlength=len(numbers))).tolist()
    for drive, begin, end in zip(numbers, [0, *ends], ends, strict=False):
        if begin < end:
            rows = order[begin:end]
            yield drive, rows, offsets[rows]


def _checker(
    pieces: Pieces,
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
    tags: NDArray[np.uint8],
    rows: NDArray[np.intp],
    reasons: NDArray[np.uint8],
) -> Callable[[slice], NDArray[np.bool_]]:
    """Make the check of blocks that have been read, for the drive's threads. *rows*: theirs in *reasons*."""

    def check(some: slice) -> NDArray[np.bool_]:
        good = are_good(pieces.memory, pieces.memory_offsets[some], lengths[some], seeds[some], tags[some])
        reasons[rows[some]] = np.where(good, Reason.NONE, Reason.DAMAGED)
        return good

    return check
