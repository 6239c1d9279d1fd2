"""A shard, its owners one after the other, and movers that use it, on one simulated flash.

Movers do what the agent's does, in its order; owners are the real code. Every answer goes to the oracle.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tests.simulation.shard.blocks import Block, seed_of
from tests.simulation.shard.model import Model, ViolationError
from tests.simulation.shard.seam import Listed, Owner
from tests.support.simulated.drives.drive_faults import Befell, DriveFaults
from tests.support.simulated.drives.simulated_drive import SimulatedDrive
from tests.support.simulated.drives.simulated_flash import SimulatedFlash

from ostraca_dpu_agent.shards.core import ShardSettings
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.flash.superblock import Superblock, encode_superblock
from ostraca_fabric.model.extent import (
    FIRST_SEGMENT_OFFSET,
    MIB,
    PAGE_BYTES,
    SUPERBLOCK_COPIES,
    Geometry,
    Pieces,
    rounded_up,
)
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.model.ids import DriveId, EnclosureId, FabricId, OwnerEpoch, ShardId
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.tables.digests import matches

FABRIC, ENCLOSURE, DRIVE, SHARD = FabricId(bytes(16)), EnclosureId("e"), DriveId("e/d"), ShardId("e/d/0")
_T = TypeVar("_T")
_RETRY_S = 1.0
_OPEN_TRIES = 50


class Fate(Enum):
    """What a mover does with space it was given, once its bytes are written."""

    COMMIT = auto()
    RELEASE = auto()
    FORGET = auto()
    """It goes away without a word."""


@dataclass(frozen=True)
class Setup:
    """What a history is played on."""

    segments: int = 4
    segment_bytes: int = MIB
    block_bytes: int = 4096
    """What the shard is formatted for."""

    has_volatile_cache: bool = False
    admits_its_cache: bool = True
    faults: DriveFaults = field(default_factory=DriveFaults)
    owner: ShardSettings = field(
        default_factory=lambda: ShardSettings(
            blocks_max=4096,
            free_segments=1,
            pin_max_s=3.0,
            hold_max_s=3.0,
            late_write_s=5.0,
            pins_max=64,
            reservations_max=64,
            retry_s=0.5,
        )
    )
    shares: dict[int, float] = field(default_factory=dict)
    """Of pools, at the beginning."""

    waits_for_late_writes: bool = True
    """A successor begins only when no write of its predecessor's movers can land any more."""

    forbids_late_writes: bool = True
    """No write may land over a newer one: they are never later than ``late_write_s``, and successors wait."""


class World:
    """Everything but what is to happen. Lives on a virtual loop."""

    def __init__(self, setup: Setup, dice: random.Random) -> None:
        self.setup = setup
        self.dice = dice
        shard_bytes = FIRST_SEGMENT_OFFSET + setup.segments * setup.segment_bytes
        geometry = Geometry.planned(
            shard_bytes, segment_bytes=setup.segment_bytes, block_bytes=setup.block_bytes
        )
        base = dice.choice([0, 0, MIB])
        self.flash = SimulatedFlash(base + shard_bytes, dice, has_volatile_cache=setup.has_volatile_cache)
        superblock = Superblock(FABRIC, bytes(16), ENCLOSURE, DRIVE, SHARD, base, geometry)
        pages = np.frombuffer(encode_superblock(superblock), np.uint8)
        self.flash.land(self.flash.next_number(), base, pages, lambda: False)
        self.flash.flush(self.flash.flush_mark())
        self.flash.faults = setup.faults
        self.record = ShardRecord(SHARD, DRIVE, base, shard_bytes, weight=1)
        self.model = Model(self.flash, superblock)
        self.shares = setup.shares
        self.owner: Owner | None = None
        self.mover = self._path()
        self.happened: Counter[str] = Counter()
        self.trace: list[str] = []
        self.is_shard_gone = False
        """Both copies of the superblock were destroyed."""

        self._epoch = OwnerEpoch(0)
        self._movers: set[asyncio.Task[None]] = set()
        self._taking_over: asyncio.Task[None] | None = None
        self._failed: BaseException | None = None

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    # ------------------------------------------------------------------------------------------- movers

    def begin_put(self, wanted: list[tuple[int, int]], fate: Fate, pool: int = 0) -> None:
        """Put blocks, by number and length, at the pace of the drive."""
        self._spawn(self._put([self.model.new_block(*each) for each in wanted], fate, pool))

    def share_out(self, shares: dict[int, float]) -> None:
        """Let pools have other shares, of this owner and of those behind it."""
        self.shares = shares
        if self.owner is not None:
            self.owner.share_out(shares)

    def begin_get(self, numbers: list[int], *, pin_s: float, keeps_pin_s: float = 0.0) -> None:
        """Look blocks up and read them; the pin is given back *keeps_pin_s* after that."""
        self._spawn(self._get(numbers, pin_s, keeps_pin_s))

    async def _put(self, blocks: list[Block], fate: Fate, pool: int) -> None:
        owner, path, hold_s = self.owner, self.mover, self.setup.owner.hold_max_s
        if owner is None or not owner.answers:
            return
        until_s, departures = self.now_s + hold_s, Counter(self.model.departures)
        made = await self._asking(owner, owner.reserve(blocks, hold_s=hold_s, within_s=1.0, pool=pool))
        epoch = owner.epoch
        for block, state in zip(blocks, made.states, strict=True):
            if state == PutState.EXISTS and owner is self.owner:
                self.happened["EXISTS"] += 1
                self.model.exists(owner, block.number, departures[block.number])
        rows = np.flatnonzero(made.states == PutState.STAGED)
        self.happened["no space"] += int(np.count_nonzero(made.reasons == Reason.NO_SPACE))
        if not len(rows):
            return
        for row in rows.tolist():
            self.model.reserved(blocks[row].number)
        rows = rows[np.argsort(made.offsets[rows])]
        given = [blocks[row] for row in rows.tolist()]
        ends = await path.submit_write(self._pieces(given, made.offsets[rows]))
        numbers = made.reservations[rows]
        self._release([], numbers[~ends], may_land=True)
        if fate is Fate.RELEASE:
            self._release([], numbers[ends])
        owner = self.owner
        if fate is not Fate.COMMIT or not ends.any() or self.now_s >= until_s or owner is None:
            return
        if owner.answers:
            kept = [block for block, end in zip(given, ends.tolist(), strict=True) if end]
            await self._commit(owner, kept, numbers[ends], epoch)

    async def _commit(
        self, owner: Owner, blocks: list[Block], numbers: NDArray[np.uint64], epoch: OwnerEpoch
    ) -> None:
        for block in blocks:
            self.model.offered(block)
        answers = await self._asking(owner, owner.commit(blocks, numbers, epoch))
        for block, (state, reason) in zip(blocks, answers, strict=True):
            self.happened[f"commit {state.name} {reason.name}"] += 1
            if state == PutState.COMMITTED:
                self.model.committed(block)
            elif reason in (Reason.EXPIRED, Reason.NO_OWNER):
                self.model.refused(block)

    async def _get(self, numbers: list[int], pin_s: float, keeps_pin_s: float) -> None:
        owner, path = self.owner, self.mover
        if owner is None or not owner.answers:
            return
        may_pin, mishaps, until_s = owner.may_pin, len(self.flash.mishaps), self.now_s + pin_s
        answer, pin = owner.resolve(numbers, pin_s)
        found = [each for each in answer if each is not None]
        for number, each in zip(numbers, answer, strict=True):
            if each is not None:
                self.model.found(each, is_recovering=owner.is_recovering)
            elif may_pin and not owner.is_recovering:
                self.model.not_found(number)
        if not found:
            return
        memory, pieces = self._room(found)
        ends = await path.submit_read(pieces)
        for each, at, is_read in zip(found, pieces.memory_offsets.tolist(), ends.tolist(), strict=True):
            self._judge(each, memory[at : at + each.length] if is_read else None, mishaps, until_s)
        if keeps_pin_s:
            await asyncio.sleep(keeps_pin_s)
        self._release([pin], np.zeros(0, np.uint64))

    def _judge(self, listed: Listed, data: NDArray[np.uint8] | None, mishaps: int, until_s: float) -> None:
        begin = self.record.offset + listed.offset
        if data is None:
            self.happened["read failed"] += 1
            kinds = (Befell.READ_ERROR, Befell.POWER_CUT)
            if not self.flash.befell_since(mishaps, begin, begin + listed.length, *kinds):
                raise ViolationError(f"block {listed.number} is found, and reading it fails for no fault")
        elif matches(data.data, seed_of(listed.number), listed.tag):
            self.happened["HIT"] += 1
            self.model.verified(listed, data)
        else:
            self.happened["damaged"] += 1
            if self.now_s < until_s:
                self.model.unreadable(listed, mishaps)
            if self.owner is not None and self.owner.answers:
                self.model.reported(listed)
                self.owner.report(listed)

    def _pieces(self, blocks: list[Block], offsets: NDArray[np.uint64]) -> Pieces:
        stored = np.array([block.stored_bytes for block in blocks], np.int64)
        places = np.cumsum(stored) - stored
        memory = np.zeros(int(stored.sum()), np.uint8)
        for block, at in zip(blocks, places.tolist(), strict=True):
            memory[at : at + block.length] = block.data
        return Pieces(memory, places, self.record.offset + offsets.astype(np.int64), stored.astype(np.uint32))

    def _room(self, found: list[Listed]) -> tuple[NDArray[np.uint8], Pieces]:
        stored = np.array([rounded_up(each.length) for each in found], np.int64)
        places = np.cumsum(stored) - stored
        memory = np.zeros(int(stored.sum()), np.uint8)
        offsets = np.array([self.record.offset + each.offset for each in found], np.int64)
        return memory, Pieces(memory, places, offsets, stored.astype(np.uint32))

    def _release(self, pins: list[int], reservations: NDArray[np.uint64], *, may_land: bool = False) -> None:
        if self.owner is not None and self.owner.answers and (pins or len(reservations)):
            self.owner.release(pins, reservations, may_land=may_land)

    async def _asking(self, owner: Owner, asked: Coroutine[None, None, _T]) -> _T:
        """Wait for an owner's answer, which never comes when it dies."""
        task = asyncio.current_task()
        assert task is not None
        owner.waiting.add(task)
        try:
            return await asked
        finally:
            owner.waiting.discard(task)

    # ------------------------------------------------------------------------------------------- owners

    def begin_taking_over(self, *, earlier_pins_s: float = 0.0, waits: bool = False) -> None:
        """Let a new owner recover the shard; *waits* as long as writes of the one before may land."""
        wait_s = self.setup.owner.hold_max_s + self.setup.owner.late_write_s if waits else 0.0
        self._taking_over = asyncio.get_running_loop().create_task(self._take_over(wait_s, earlier_pins_s))
        self._taking_over.add_done_callback(self._ended)

    async def owned(self) -> None:
        """Wait until an owner has recovered."""
        if self._taking_over is not None:
            await asyncio.wait([self._taking_over])

    async def _take_over(self, wait_s: float, earlier_pins_s: float) -> None:
        await asyncio.sleep(wait_s)
        self.flash.fence()
        for _ in range(_OPEN_TRIES):
            mishaps = len(self.flash.mishaps)
            self.model.recovering()
            owner = Owner(
                self._path(),
                self.record,
                FABRIC,
                settings=self.setup.owner,
                shares=self.shares,
                gone=self.model.gone,
            )
            self.owner = owner
            try:
                await owner.recover(epoch_above=self._epoch, earlier_pins_s=earlier_pins_s)
            except OstracaError as error:
                self._may_not_open(error, mishaps)
                owner.kill()
                self.owner = None
            else:
                self.happened["recoveries"] += 1
                self._epoch = owner.epoch
                self.model.taken_over(owner, mishaps)
                return
            await asyncio.sleep(_RETRY_S)
        self.is_shard_gone = True
        self.happened["shards gone"] += 1

    def _may_not_open(self, error: OstracaError, mishaps: int) -> None:
        """Check a shard that stays shut: both superblocks, a summary or a flush must have failed."""
        begin = self.record.offset
        copies = [
            (at, at + PAGE_BYTES) for at in range(begin, begin + SUPERBLOCK_COPIES * PAGE_BYTES, PAGE_BYTES)
        ]
        kinds = (Befell.READ_ERROR, Befell.ROT_ON_READ, Befell.POWER_CUT)
        is_shut = all(
            self.flash.is_spoilt(*copy) or self.flash.befell_since(mishaps, *copy, *kinds) for copy in copies
        )
        summaries = (self.model.geometry.first_segment_offset + begin, self.flash.size_bytes)
        is_unread = self.flash.befell_since(mishaps, *summaries, Befell.READ_ERROR, Befell.POWER_CUT)
        if not is_shut and not is_unread and not self._failed_flushes(mishaps):
            raise ViolationError(f"a sound shard can't be opened: {error}")

    def _failed_flushes(self, mishaps: int) -> bool:
        return any(each.begin == each.end for each in self.flash.mishaps[mishaps:])

    def kill_owner(self) -> None:
        """Kill the owner's process; data paths elsewhere live on."""
        if self._taking_over is not None:
            self._taking_over.cancel()
        if self.owner is not None:
            self.owner.kill()
        self.owner = None

    def kill_all(self) -> None:
        """Owner and movers die."""
        self.kill_owner()
        for task in self._movers:
            task.cancel()
        self.mover.crash()
        self.mover = self._path()

    def check(self) -> None:
        """Look at everything at once: nobody is asked, and nothing moves."""
        self.fail_if_failed()
        if self.owner is None or not self.owner.answers:
            return
        if self.owner.has_crashed:
            raise ViolationError("the owner has stopped writing: a bug")
        self.owner.check()
        if not self.owner.is_recovering:
            self.model.holds(self.owner)

    def fail_if_failed(self) -> None:
        """Raise what went wrong in the background."""
        if self._failed is not None:
            raise self._failed
        if self.setup.forbids_late_writes and any(each.kind is Befell.LATE for each in self.flash.mishaps):
            raise ViolationError("space was used again while a write to it could still land")

    async def settle(self) -> None:
        """Wait for every mover."""
        while self._movers:
            await asyncio.wait(set(self._movers))

    def _path(self) -> SimulatedDrive:
        return SimulatedDrive(DRIVE, self.flash, admits_its_cache=self.setup.admits_its_cache)

    def _spawn(self, moving: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(moving)
        self._movers.add(task)
        task.add_done_callback(self._movers.discard)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and self._failed is None:
            self._failed = task.exception()
