"""Reads and writes of a request on its drives: plans, I/Os in flight, and the queue of writes.

Adjacent extents take one I/O. Every block's tag is checked beside the event loop, right after the read, while
the bytes are in the CPU cache. The settings ``flash_io`` limit I/Os further below, in the engine
(``ostraca_fabric.drives.io_engine``).

Blocks are columns throughout: Python's cost is the same for a wave of four blocks and of a thousand.

A wait for a silent drive would last as long as the silence. A wave therefore continues without abandoned
I/Os. The memory of such I/Os stays leased until their end.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.location.routing import BlockLocations
from ostraca_fabric.model.extent import Pieces, whole_pages
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.runtime.tasks import until_done
from ostraca_fabric.tables.digests import GOOD, TagCheck

_Wave = TypeVar("_Wave")

_BegunWrite = tuple[Pieces, asyncio.Future[NDArray[np.bool_]]]


@dataclass(slots=True, eq=False)
class DriveIO:
    """An I/O of a drive."""

    ends: asyncio.Future[NDArray[np.bool_]]
    given_up: asyncio.Future[None] | None
    """As returned by the drive at the start."""

    is_abandoned: bool = False
    """Whether its user continued without this I/O, which may still run."""

    async def wait(self) -> None:
        """Wait until the I/O has ended, or abandon it with its drive. Call once."""
        given_up = () if self.given_up is None else (self.given_up,)
        await until_done(self.ends, *given_up)
        self.is_abandoned = not self.ends.done()


class WriteQueue:
    """Writes of verified blocks. Writes of a drive that begin in the same turn of the loop are one write.

    Staged blocks wait for a turn of their drive first. So small puts share a write and a commit.
    """

    def __init__(self, *, wait_s: float, wait_bytes_max: int) -> None:
        """Let staged blocks wait up to *wait_s*, and until *wait_bytes_max* of them wait for a drive."""
        self._wait_s = wait_s
        self._wait_bytes_max = wait_bytes_max
        self._turns: dict[DriveId, asyncio.Future[None]] = {}
        self._waiting: Counter[DriveId] = Counter()
        """Bytes that wait for the next turn of each drive."""
        self._begun: dict[Drive, list[_BegunWrite]] = {}

    def turn(self, drive: DriveId, more_bytes: int) -> asyncio.Future[None]:
        """Return the future that is done once staged blocks of *more_bytes* may be written."""
        loop = asyncio.get_running_loop()
        turn = self._turns.get(drive)
        if turn is None:
            turn = self._turns[drive] = loop.create_future()
            loop.call_later(self._wait_s, self._begin, drive, turn)
        self._waiting[drive] += more_bytes
        if self._waiting[drive] >= self._wait_bytes_max:
            self._begin(drive, turn)
        return turn

    def flush(self) -> None:
        """Let all waiting blocks be written now."""
        for drive, turn in list(self._turns.items()):
            self._begin(drive, turn)

    def _begin(self, drive: DriveId, turn: asyncio.Future[None]) -> None:
        if not turn.done():
            del self._turns[drive], self._waiting[drive]
            turn.set_result(None)

    def submit(self, drive: Drive, pieces: Pieces) -> DriveIO:
        """Write pieces, with all others of this turn of the loop."""
        loop = asyncio.get_running_loop()
        ends: asyncio.Future[NDArray[np.bool_]] = loop.create_future()
        if not self._begun:
            loop.call_soon(self._submit_begun)
        self._begun.setdefault(drive, []).append((pieces, ends))
        return DriveIO(ends, drive.writes_given_up)

    def _submit_begun(self) -> None:
        begun, self._begun = self._begun, {}
        for drive, writes in begun.items():
            writes.sort(key=lambda write: int(write[0].drive_offsets[0]))
            written = drive.submit_write(Pieces.joined([pieces for pieces, _ in writes]))
            written.add_done_callback(partial(_share_out, writes))


def _share_out(writes: Sequence[_BegunWrite], written: asyncio.Future[NDArray[np.bool_]]) -> None:
    """Hand each write its part of the result."""
    at = 0
    for pieces, ends in writes:
        ends.set_result(written.result()[at : at + len(pieces)])
        at += len(pieces)


@dataclass(slots=True, eq=False)
class PartRead(DriveIO):
    """Read of a part of a plan."""

    check: TagCheck = field(kw_only=True)
    why: Reason = Reason.DRIVE_ERROR
    """Why blocks are not read, at the end."""

    states: NDArray[np.uint8] = field(init=False)
    """A ``CheckState`` per block, which the drive changes until all are read."""

    def __post_init__(self) -> None:
        """Begin with the states that the drive changes."""
        self.states = self.check.states

    @property
    def is_good(self) -> bool:
        """Whether all blocks are verified."""
        return self.states.tobytes().count(GOOD) == len(self.states)

    def reasons(self) -> NDArray[np.uint8]:
        """Return a Reason per block of a read that is over: NONE for verified blocks.

        Other reasons are DRIVE_ERROR, DRIVE_SUSPECT and DAMAGED.
        """
        why = Reason.DRIVE_SUSPECT if self.is_abandoned else self.why
        return np.array([why, Reason.NONE, Reason.DAMAGED], np.uint8)[self.states]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Located blocks to read, in columns: by drive, then by part, then by place on the drive.

    A part is a slice of the columns. So Python's cost of a part does not depend on the number of blocks.
    """

    locations: BlockLocations
    """Locations of all blocks of the request."""

    positions: NDArray[np.intp]
    """Positions in the request."""

    drive_offsets: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    page_lengths: NDArray[np.uint32]
    """Bytes of whole pages."""

    seeds: NDArray[np.uint64]
    tags: NDArray[np.uint8]
    """Shape (n, 16)."""

    queues: list[tuple[DriveId, deque[slice]]]
    """Parts of each drive."""

    @classmethod
    def of(
        cls,
        locations: BlockLocations,
        seeds: NDArray[np.uint64],
        positions: NDArray[np.intp],
        *,
        per_part: int,
        per_first: int = 0,
    ) -> ReadPlan:
        """Plan the blocks at *positions*, with up to *per_part* blocks of one drive in a part.

        The first of several parts of a drive has *per_first* blocks, if given: the prefix comes early.
        *seeds* are those of the whole request. Parts keep the order of the request.
        """
        offsets = locations.drive_offsets()
        ordered: list[NDArray[np.intp]] = []
        queues: list[tuple[DriveId, deque[slice]]] = []
        first = 0
        for drive, its in locations.by_drive(positions):
            if len(its) <= per_part:
                cuts = [0, len(its)]
                ordered.append(its[offsets[its].argsort()])
            else:
                cuts = [0, *range(per_first or per_part, len(its), per_part), len(its)]
                parts = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
                ordered.append(its[np.lexsort((offsets[its], parts))])
            queues.append((drive, deque(slice(first + at, first + to) for at, to in pairwise(cuts))))
            first += len(its)
        order = ordered[0] if len(ordered) == 1 else np.concatenate((positions[:0], *ordered))
        lengths = locations.lengths[order]
        return cls(
            locations,
            order,
            offsets[order],
            lengths,
            whole_pages(lengths),
            seeds[order],
            locations.tags[order],
            queues,
        )


def interleave_drives(
    queues: Sequence[tuple[DriveId, deque[_Wave]]], *, lanes: int
) -> list[tuple[DriveId, deque[_Wave]]]:
    """Return each drive's queue once per lane, so that drives alternate.

    Drives share *lanes* evenly, with at least one each. A hanging drive thus blocks only its own lanes.
    """
    longest = max((len(queue) for _, queue in queues), default=0)
    share = min(longest, max(1, lanes // max(1, len(queues))))
    return [queue for turn in range(share) for queue in queues if turn < len(queue[1])]
