"""Waves and their flash I/O: loads into staging, and reads and writes in flight.

Adjacent extents take one I/O. Every block's tag is checked. The check runs in the drive's threads right after
the read, while the bytes are in the CPU cache and the loop is free. Blocks are columns throughout: Python's
cost is the same for a wave of four blocks and of a thousand.

A wait for a silent drive would last as long as the silence. A wave therefore continues without abandoned
I/Os. The memory of such I/Os stays leased until their end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.admission import LatencyEstimator, LoadQueue
from ostraca_dpu_agent.datapath.location.routing import BlockLocations
from ostraca_dpu_agent.datapath.staging.leases import StagingLease
from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_fabric.model.extent import Pieces, whole_pages
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.tables.digests import TagCheck

DriveQueue = tuple["DriveId", "deque[NDArray[np.intp]]"]
"""Pending waves of a request from or to a drive."""


@dataclass(slots=True, eq=False)
class DriveIO:
    """A read or write."""

    rows: NDArray[np.intp]
    """Blocks of the wave in this I/O."""

    ends: asyncio.Future[NDArray[np.bool_]]
    given_up: asyncio.Future[None] | None
    """As returned by the drive at the start."""

    is_abandoned: bool = False
    """Whether the wave continued without this I/O, which may still run."""

    async def wait(self) -> None:
        """Wait until the I/O has ended or is abandoned by the drive."""
        if self.given_up is None:
            await asyncio.wait((self.ends,))
        else:
            await asyncio.wait((self.ends, self.given_up), return_when=asyncio.FIRST_COMPLETED)
            self.is_abandoned = not self.ends.done()


@dataclass(frozen=True, slots=True)
class WaveIO:
    """I/Os of a wave. Wait for ``wait``, or after an error ``wait_until_ended``."""

    ios: list[DriveIO] = field(default_factory=list)

    def add(
        self,
        rows: NDArray[np.intp],
        ends: asyncio.Future[NDArray[np.bool_]],
        given_up: asyncio.Future[None] | None,
    ) -> DriveIO:
        """Add an I/O just submitted to a drive.

        *given_up*: done when the drive abandons I/Os of this kind.
        """
        self.ios.append(DriveIO(rows, ends, given_up))
        return self.ios[-1]

    @property
    def abandoned(self) -> list[DriveIO]:
        """Abandoned I/Os."""
        return [each for each in self.ios if each.is_abandoned]

    async def wait(self) -> None:
        """Wait until each I/O has ended or is abandoned by its drive."""
        for each in self.ios:
            await each.wait()

    async def wait_until_ended(self) -> None:
        """Wait until all I/Os have ended and no longer use the memory."""
        if self.ios:
            await asyncio.wait([each.ends for each in self.ios])


class Loader:
    """Reader of located blocks into leased slots."""

    def __init__(
        self,
        staging: Staging,
        drives: Mapping[DriveId, Drive],
        estimator: LatencyEstimator,
        clock: Callable[[], float],
    ) -> None:
        """Read from *drives*, and report the duration of reads to *estimator*.

        The controller keeps *drives* current.
        """
        self._staging = staging
        self._drives = drives
        self._estimator = estimator
        self._clock = clock

    async def load(
        self,
        locations: BlockLocations,
        positions: NDArray[np.intp],
        lease: StagingLease,
        seeds: NDArray[np.uint64],
    ) -> tuple[NDArray[np.uint8], WaveIO]:
        """Load the blocks at *positions* into the lease's slots, in order.

        Returns a Reason per block: NONE for verified blocks, else DRIVE_ERROR, DRIVE_SUSPECT or DAMAGED.
        Also returns the reads, with abandoned reads still running. A caller that can't wait must leave
        this running and keep the lease.
        """
        reasons = np.full(len(positions), Reason.DRIVE_ERROR, np.uint8)
        reads, checks = WaveIO(), list[TagCheck]()
        try:
            for drive_id, rows, drive_offsets in _by_drive(locations, positions):
                drive = self._drives.get(drive_id)
                if drive is not None and drive.refuses_reads:
                    reasons[rows] = Reason.DRIVE_SUSPECT
                elif drive is not None:
                    lengths = locations.lengths[positions[rows]]
                    offsets = lease.offsets[rows]
                    pieces = Pieces(self._staging.array, offsets, drive_offsets, whole_pages(lengths))
                    chosen = positions[rows]
                    check = TagCheck(pieces, lengths, seeds[chosen], locations.tags[chosen])
                    checks.append(check)
                    read = reads.add(rows, drive.submit_read(pieces, check), drive.reads_given_up)
                    self._measure(read, self._estimator.drives[drive_id], int(lengths.sum()))
            await reads.wait()
        except BaseException:  # on any error, the lease must outlive every started read
            await reads.wait_until_ended()
            raise
        for read, check in zip(reads.ios, checks, strict=True):
            if read.is_abandoned:
                reasons[read.rows] = Reason.DRIVE_SUSPECT
            else:
                is_damaged = check.was_read & ~read.ends.result()
                reasons[read.rows[read.ends.result()]] = Reason.NONE
                reasons[read.rows[is_damaged]] = Reason.DAMAGED
        return reasons, reads

    def _measure(self, read: DriveIO, queue: LoadQueue, read_bytes: int) -> None:
        """Measure a read; the end of an abandoned read tells nothing of others."""

        def ended(_: asyncio.Future[NDArray[np.bool_]]) -> None:
            if read.is_abandoned:
                queue.abandon(read_bytes)
            else:
                queue.end(self._clock(), read_bytes)

        queue.begin(self._clock(), read_bytes)
        read.ends.add_done_callback(ended)


def _by_drive(
    locations: BlockLocations, positions: NDArray[np.intp]
) -> Iterator[tuple[DriveId, NDArray[np.intp], NDArray[np.int64]]]:
    """Yield per drive the rows of *positions* there, in order, and offsets."""
    numbers: dict[DriveId, int] = {}
    of_source = [numbers.setdefault(source.drive, len(numbers)) for source in locations.sources]
    sources = locations.source[positions]
    drives = np.array(of_source, np.intp)[sources]
    bases = np.array([source.base for source in locations.sources], np.int64)
    offsets = bases[sources] + locations.offsets[positions].astype(np.int64)
    order = np.lexsort((offsets, drives))
    ends = np.cumsum(np.bincount(drives, minlength=len(numbers))).tolist()
    for drive, begin, end in zip(numbers, [0, *ends], ends, strict=False):
        if begin < end:
            rows = order[begin:end]
            yield drive, rows, offsets[rows]


def cut_into_waves(positions: NDArray[np.intp], blocks_per_wave: int) -> list[NDArray[np.intp]]:
    """Cut positions into waves, in order."""
    return [positions[at : at + blocks_per_wave] for at in range(0, len(positions), max(1, blocks_per_wave))]


def interleave_drives(queues: Sequence[DriveQueue], *, lanes: int) -> list[DriveQueue]:
    """Return each drive's queue once per lane, so that drives alternate.

    Drives share *lanes* evenly, with at least one each. A hanging drive thus blocks only its own lanes.
    """
    share = max(1, lanes // max(1, len(queues)))
    return [queue for turn in range(share) for queue in queues if turn < len(queue[1])]


def waves_of_one_size(
    slot_bytes: NDArray[np.int64], per_wave: Callable[[int], int]
) -> list[NDArray[np.intp]]:
    """Cut one or more blocks into waves with slots of one size.

    *per_wave* returns the number of slots of a size in a wave. Each wave is indexes into *slot_bytes*.
    """
    everything, size = np.arange(len(slot_bytes)), int(slot_bytes[0])
    if len(everything) == 1:
        return [everything]
    if (slot_bytes == size).all():
        return cut_into_waves(everything, per_wave(size))
    sizes = np.unique(slot_bytes).tolist()
    return [wave for size in sizes for wave in cut_into_waves(everything[slot_bytes == size], per_wave(size))]
