"""Drives that a worker reads itself: the SDK's reader, on simulated paths from the worker's host.

A read lands block by block, at its end, as what is under it then says. A path may lead to another drive, or
to what its drive held once. The reader's thread is a timer of the worker's process.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tests.simulation.fabric.world.drives import FABRIC, Drives
from tests.support.simulated.virtual_hosts import VirtualHost, outside, running_host

from ostraca._direct.direct_reader import DirectReader, _ReaderDrive
from ostraca._direct.host_drives import HostDrive
from ostraca._protocol.operations import ExtentsEnded, Progress
from ostraca.settings import ClientSettings
from ostraca_fabric.drives.io_engine import IoEnd, IoOperation
from ostraca_fabric.model.extent import whole_pages
from ostraca_fabric.tables.digests import GOOD, TagCheck
from ostraca_fabric.wire import codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.simulated.drives.simulated_flash import SimulatedFlash

    from ostraca_fabric.model.extent import Pieces
    from ostraca_fabric.model.ids import DriveId
    from ostraca_fabric.wire.messages import GetExtents

_TOLD = {
    Progress.READING: "read",
    Progress.VERIFIED: "read",
    Progress.FAILED: "failed",
    Progress.LOST: "lost",
}
SLOW_S = 0.2
"""Reads that take longer make a get late."""


@dataclass(frozen=True)
class DirectReads:
    """How workers read drives themselves. Chances are from 0 to 1, for each block unless said otherwise."""

    workers: float = 1.0
    """The share of workers that do."""

    failures: float = 0.0
    """A read fails on its way, with a part of its bytes landed."""

    hangs: float = 0.0
    """A read takes longer, by up to ``hang_s``, and lands then."""

    hang_s: float = 20.0
    strays: float = 0.0
    """Of paths: those that lead to another drive, or to what their drive held when the worker began."""

    silent_s: float = 2.0
    retry_s: float = 30.0


@dataclass(eq=False)
class HostPath:
    """A path of a worker's host to a drive."""

    drive: DriveId
    flash: SimulatedFlash
    is_stray: bool = False
    old: NDArray[np.uint8] | None = None
    """What is read instead of what is on flash now."""

    def read(self, begin: int, part: NDArray[np.uint8]) -> bool:
        """Read what is there now; say whether that went well."""
        end = begin + len(part)
        if self.old is None:
            return self.flash.read(begin, end, [part])
        part[:] = self.old[begin:end]
        return True


class HostPaths:
    """Paths of all hosts, and what befalls reads there."""

    def __init__(
        self, drives: Drives, dice: random.Random, usual: DirectReads, happened: Counter[str]
    ) -> None:
        self.faults = usual
        self.happened = happened
        self._drives = drives
        self._dice = dice
        self._usual = usual

    def well(self) -> None:
        """Let reads neither fail nor hang from now on. Strays stay."""
        self.faults = replace(self._usual, failures=0.0, hangs=0.0)

    def as_usual(self) -> None:
        """Let the usual happen."""
        self.faults = self._usual

    def opened(self) -> list[HostPath]:
        """Open the drives that a host finds now; none where its worker reads no drives."""
        dice, living = self._dice, self._drives.living
        if dice.random() >= self._usual.workers:
            return []
        return [self._opened(drive, living) for drive in living]

    def _opened(self, drive: DriveId, living: list[DriveId]) -> HostPath:
        dice, flashes = self._dice, self._drives.flashes
        if dice.random() >= self._usual.strays:
            return HostPath(drive, flashes[drive])
        other = dice.choice(living)
        old = flashes[drive].image.copy() if other == drive else None
        return HostPath(drive, flashes[other], is_stray=True, old=old)

    def delay_s(self, path: HostPath) -> float:
        """Draw how long a read takes."""
        dice, its = self._dice, path.flash.faults
        delay_s = its.service_s * (0.5 + dice.random())
        delay_s += dice.uniform(0, its.stall_s) if path.flash.chance(its.stalls) else 0.0
        return delay_s + (dice.uniform(0, self.faults.hang_s) if self._rolls(self.faults.hangs) else 0.0)

    def landed(self, path: HostPath, begin: int, part: NDArray[np.uint8]) -> bool:
        """Land a read, or a part of it; say whether it went well."""
        if self._rolls(self.faults.failures):
            path.read(begin, part[: self._dice.randrange(len(part))])
            return False
        return path.read(begin, part)

    def _rolls(self, chance: float) -> bool:
        return chance > 0 and self._dice.random() < chance


class SimulatedReader(DirectReader):
    """The SDK's reader, without files and threads. Made and called in a worker's process."""

    def __init__(
        self,
        paths: list[HostPath],
        host_paths: HostPaths,
        memory: NDArray[np.uint8],
        holder_of: Callable[[int], int],
        on_landing: Callable[[int, object], None],
    ) -> None:
        self.paths = paths
        self.happened = host_paths.happened
        self._timer: asyncio.TimerHandle | None = None
        usual = host_paths.faults
        super().__init__(ClientSettings(direct_silent_s=usual.silent_s, direct_retry_s=usual.retry_s), memory)
        self._engine = engine = _Engine(self, host_paths, holder_of, on_landing)  # type: ignore[assignment]
        self._drives = tuple(
            _ReaderDrive(HostDrive(FABRIC, path.drive, str(path.drive), -1, path.flash.size_bytes), number)
            for number, path in enumerate(paths)
        )
        self._sizes = np.array([drive.at.size_bytes for drive in self._drives], np.int64)
        self.numbers = range(len(paths))
        self.slots: Counter[int] = engine.slots
        """Slots of memory that reads may land in."""

    @property
    def is_reading(self) -> bool:
        """Whether any read is under way."""
        return bool(self._requests)

    def turn(self) -> None:
        """Do what the reader's thread does when it wakes."""
        if self._timer is not None:
            self._timer.cancel()
        self._check_drives()
        sleep_s = self._next_sleep_s()
        assert sleep_s is not None, "nobody closes it"
        self._timer = asyncio.get_running_loop().call_later(math.ceil(sleep_s * 1000) / 1000, self.turn)

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self.turn)


class _Engine:
    """In place of ``IoEngine``: each block is an I/O."""

    def __init__(
        self,
        reader: SimulatedReader,
        host_paths: HostPaths,
        holder_of: Callable[[int], int],
        on_landing: Callable[[int, object], None],
    ) -> None:
        host = running_host()
        assert host is not None, "workers are in processes"
        self.host: VirtualHost = host
        self.reader = reader
        self.host_paths = host_paths
        self.holder_of = holder_of
        self.on_landing = on_landing
        self.slots = Counter[int]()

    def submit(
        self,
        drive: int,
        operation: IoOperation,
        pieces: Pieces,
        check: TagCheck | None,
        end: Callable[[IoEnd], None],
        *,
        states: NDArray[np.uint8],
    ) -> bool:
        """As ``IoEngine``."""
        assert operation is IoOperation.READ, "workers only read"
        outside(_Batch(self, self.reader.paths[drive], pieces, check, end, states).begin)
        return True


@dataclass(eq=False)
class _Batch:
    """Reads of one batch."""

    engine: _Engine
    path: HostPath
    pieces: Pieces
    check: TagCheck | None
    end: Callable[[IoEnd], None]
    states: NDArray[np.uint8]
    failed: int = 0
    left: int = 0
    holders: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Be under way."""
        loop, slots = asyncio.get_running_loop(), self.pieces.memory_offsets.tolist()
        self.left = len(slots)
        self.holders = [self.engine.holder_of(at) for at in slots]
        self.engine.slots.update(slots)
        for row in range(self.left):
            delay_s = self.engine.host_paths.delay_s(self.path)
            loop.call_later(delay_s, self._land, row, self.path.flash.cuts)

    def _land(self, row: int, cuts: int) -> None:
        engine, pieces = self.engine, self.pieces
        if engine.host.is_dead:
            return
        at, begin = int(pieces.memory_offsets[row]), int(pieces.drive_offsets[row])
        engine.on_landing(at, self.holders[row])
        part = pieces.memory[at : at + int(pieces.lengths[row])]
        is_good = cuts == self.path.flash.cuts and engine.host_paths.landed(self.path, begin, part)
        engine.slots[at] -= 1
        self.states[row] = GOOD * is_good
        if is_good and self.check is not None:
            self.check.run(slice(row, row + 1))
        self.failed += not is_good
        self.left -= 1
        if not self.left:
            engine.host.call_soon(self._ended)

    def _ended(self) -> None:
        self.end(IoEnd(self.failed, 0, 5 if self.failed else 0))
        self.engine.reader.turn()


@dataclass(frozen=True)
class OwnBlock:
    """Where a worker has read a block itself."""

    path: HostPath
    offset: int
    length: int
    mishaps: int
    """What had befallen the drive before."""


class OwnGet:
    """Own reads of one get. The reader's engine checks the blocks of every other get."""

    def __init__(
        self,
        reader: SimulatedReader,
        request: int,
        slots: NDArray[np.int64],
        lengths: NDArray[np.uint32],
        seeds: NDArray[np.uint64],
        deliver: Callable[[int, Any], None],
    ) -> None:
        self.blocks: dict[int, OwnBlock] = {}
        """By position: those that the agent has left to this worker."""

        self.unread: set[int] = set()
        """Positions of reads that have not ended, or were given up as lost."""

        self.read_ones: set[int] = set()
        """Positions of blocks that were read, and not checked yet."""

        self.is_slow = False
        self._reader = reader
        self._request = request
        self._slots = slots
        self._lengths = lengths
        self._seeds = seeds
        self._deliver = deliver
        self._began_s = 0.0

    def read(self, extents: GetExtents) -> None:
        """Begin all reads of drives, as the SDK's get does."""
        reader = self._reader
        self._began_s = asyncio.get_running_loop().time()
        positions = codec.positions(extents.positions, len(self._slots))
        drives = codec.u32(extents.drives, len(positions)).astype(np.intp)
        offsets = codec.u64(extents.offsets, len(positions)).astype(np.int64)
        lengths = whole_pages(self._lengths[positions])
        reader.check(drives, offsets, lengths)
        for row, position in enumerate(positions.tolist()):
            path = reader.paths[drives[row]]
            self.blocks[position] = OwnBlock(
                path, int(offsets[row]), int(lengths[row]), len(path.flash.mishaps)
            )
        self.unread = set(self.blocks)
        ended = partial(self._ended, positions)
        tags = codec.rows16(extents.tags, len(positions))
        tagged = (self._lengths[positions], self._seeds[positions], tags) if self._request % 2 else None
        reader.read(self._request, drives, offsets, self._slots[positions], lengths, ended, tags=tagged)

    def _ended(self, positions: NDArray[np.uint32], rows: NDArray[np.intp], state: Progress) -> None:
        self._reader.happened[f"blocks {_TOLD[state]} directly"] += len(rows)
        self.is_slow |= asyncio.get_running_loop().time() > self._began_s + SLOW_S
        if state is not Progress.LOST:
            self.unread -= set(positions[rows].tolist())
        if state in (Progress.READING, Progress.VERIFIED):
            self.read_ones |= set(positions[rows].tolist())
        self._deliver(self._request, ExtentsEnded(positions[rows].tobytes(), state))
