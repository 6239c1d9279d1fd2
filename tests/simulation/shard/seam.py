"""One owner's process, as far as a shard is concerned: the real code, recovered as the controller does it.

Nothing else in the simulation knows how an owner is made, asked or told.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tests.simulation.shard.blocks import Block, key_of, keys_of, numbers_of, rows16, seed_of
from tests.support.agent.shard_invariants import check_core
from tests.support.simulated.drives.simulated_drive import SimulatedDrive

from ostraca_dpu_agent.controller.recovery import in_slices, read_summaries, read_superblock
from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_dpu_agent.shards.core import Allocations, ShardCore, ShardSettings
from ostraca_dpu_agent.shards.shard import OwnedShard
from ostraca_fabric.flash.recovery import RecoveredAreas
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.model.ids import FabricId, OwnerEpoch
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.telemetry.explain import EventKind
from ostraca_fabric.telemetry.requests import EventRing
from ostraca_fabric.wire.messages import Damage


class Listed(NamedTuple):
    """A block that an owner lists."""

    number: int
    tag: bytes
    offset: int
    length: int
    generation: int


def _one_by_one(part: RecoveredAreas) -> Iterator[RecoveredAreas]:
    """Cut what was recovered as a shard of many segments is: in the order on flash."""
    for some in in_slices(part):
        for segment in sorted(some.segments, key=lambda segment: segment.number):
            yield replace(some, segments=(segment,), areas=1)
        yield replace(some, segments=(), areas=some.areas - len(some.segments))


class _Told(EventRing):
    """Tells what left the index."""

    def __init__(self, clock: Callable[[], float], gone: Callable[[EventKind, list[int]], None]) -> None:
        super().__init__("owner", 64, clock)
        self._gone = gone

    def record(
        self,
        kind: EventKind,
        keys: NDArray[np.uint8],
        states: NDArray[np.uint8] | int = 255,
        reasons: NDArray[np.uint8] | int = Reason.NONE,
        *,
        label: str | None = None,
    ) -> None:
        super().record(kind, keys, states, reasons, label=label)
        if kind in (EventKind.EVICTED, EventKind.DROPPED):
            self._gone(kind, numbers_of(keys))


class Owner:
    """Begin with ``recover``, end with ``kill`` or ``close``."""

    def __init__(
        self,
        drive: SimulatedDrive,
        record: ShardRecord,
        fabric: FabricId,
        *,
        settings: ShardSettings,
        shares: dict[int, float],
        gone: Callable[[EventKind, list[int]], None],
    ) -> None:
        self.drive = drive
        self.record = record
        self._fabric = fabric
        self._settings = settings
        self._shares = shares
        self._clock = asyncio.get_running_loop().time
        self._gone = gone
        self._events = _Told(self._clock, gone)
        self._shard: OwnedShard | None = None
        self._is_over = False
        self._found_of: list[int] = []
        self.waiting: set[asyncio.Task[None]] = set()
        """Who waits for an answer of it."""

    async def recover(self, *, epoch_above: int, earlier_pins_s: float) -> None:
        """Take the shard over. Raises what the controller would log."""
        superblock = await read_superblock(self.drive, self.record, self._fabric)
        core = ShardCore(
            superblock, settings=self._settings, earlier_pins_end_s=self._clock() + earlier_pins_s
        )
        self._shard = OwnedShard(
            self.record,
            self.drive,
            core,
            settings=OwnerSettings(hold_s=self._settings.hold_max_s),
            clock=self._clock,
            events=self._events,
        )
        self._shard.share_out(self._shares)
        async with aclosing(read_summaries(self.drive, self.record, superblock)) as parts:
            async for part in parts:
                for some in _one_by_one(part):
                    core.take_in(some)
                    await asyncio.sleep(0)
        numbers = core.ring.pool_numbers.tolist()
        self._found_of = [core.ring.pools.of(number).number for number in numbers]
        self._shard.begin(OwnerEpoch(max(epoch_above, core.highest_epoch) + 1))
        self._shard.confirm(math.inf)
        self._shard.apply_grant(range(self._shard.core.geometry.segments))

    @property
    def shard(self) -> OwnedShard:
        assert self._shard is not None, "the superblock was not read yet"
        return self._shard

    @property
    def answers(self) -> bool:
        """Whether it answers movers: it does so while it recovers, too."""
        return self._shard is not None

    @property
    def is_recovering(self) -> bool:
        return self.shard.core.is_recovering

    @property
    def has_crashed(self) -> bool:
        """Whether a bug has ended its writing."""
        return self._shard is not None and not self.shard.core.is_writable

    @property
    def may_pin(self) -> bool:
        return len(self.shard.core.pins) < self._settings.pins_max

    @property
    def epoch(self) -> OwnerEpoch:
        return self.shard.epoch

    def generation_of(self, segment: int) -> int:
        return int(self.shard.core.ring.generations[segment])

    def found_of(self, segment: int) -> int:
        """Return the pool that had a segment when all was recovered, of those that had a share then."""
        return self._found_of[segment]

    def has_kept(self, segment: int) -> bool:
        """Say whether it let a segment go round again, as most of it was read of late."""
        return self.shard.core.ring.segments[segment].is_kept

    def resolve(self, numbers: list[int], pin_s: float) -> tuple[list[Listed | None], int]:
        """Return where blocks lie, and a pin, which is 0 where there is none."""
        answer = self.shard.core.resolve(self._clock(), keys_of(numbers), pin_s=pin_s)
        self.shard.wake()
        columns = answer.offsets.tolist(), answer.lengths.tolist(), answer.generations.tolist()
        found: list[Listed | None] = [None] * len(numbers)
        for row, extent in enumerate(zip(*columns, strict=True)):
            if answer.found[row]:
                found[row] = Listed(numbers[row], answer.tags[row].tobytes(), *extent)
        return found, answer.pin

    def share_out(self, shares: dict[int, float]) -> None:
        """Let pools have other shares, whether or not it has recovered yet."""
        self._shares = shares
        if self._shard is not None:
            self._shard.share_out(shares)

    async def reserve(self, blocks: list[Block], *, hold_s: float, within_s: float, pool: int) -> Allocations:
        lengths = np.array([block.length for block in blocks], np.uint32)
        keys = keys_of([block.number for block in blocks])
        return await self.shard.reserve(keys, lengths, hold_s=hold_s, within_s=within_s, pool=pool)

    async def commit(
        self, blocks: list[Block], reservations: NDArray[np.uint64], epoch: OwnerEpoch
    ) -> list[tuple[PutState, Reason]]:
        tags = rows16([block.tag for block in blocks])
        seeds = np.array([seed_of(block.number) for block in blocks], np.uint64)
        states, reasons = await self.shard.commit(reservations, tags, seeds, epoch=epoch)
        return [(PutState(state), Reason(reason)) for state, reason in zip(states, reasons, strict=True)]

    def release(self, pins: list[int], reservations: NDArray[np.uint64], *, may_land: bool) -> None:
        self.shard.core.release(self._clock(), pins, reservations, may_land=may_land)
        self.shard.wake()

    def report(self, listed: Listed) -> None:
        """Tell it of a block whose bytes did not fit its tag."""
        self.shard.check_damage(
            Damage(
                self.record.id,
                key_of(listed.number),
                listed.offset,
                listed.length,
                listed.generation,
                listed.tag,
                seed_of(listed.number),
            )
        )

    def listed(self) -> Iterator[Listed]:
        """Everything in the index, without counting as a read."""
        self.shard.wake()  # what was evicted is told first
        core = self.shard.core
        for segment in range(core.geometry.segments):
            rows = core.index.rows_of(segment)
            rows = rows[core.index.lengths(rows) > 0]
            numbers = numbers_of(core.index._keys[rows].view(np.uint8).reshape(-1, 16))
            offsets, lengths = core.index.offsets(rows).tolist(), core.index.lengths(rows).tolist()
            tags = core.index.tags(rows)
            generation = int(core.ring.generations[segment])
            for row, number in enumerate(numbers):
                yield Listed(number, tags[row].tobytes(), offsets[row], lengths[row], generation)

    def check(self) -> None:
        """Assert every invariant of its own."""
        if self._shard is not None:
            check_core(self._shard.core)

    async def close(self) -> None:
        """End in order."""
        assert await self.shard.close(within_s=60.0), "an orderly end takes no longer than its I/O"
        self.drive.close()
        self._part()

    def kill(self) -> None:
        """End at once: nothing of it happens any more, but for what it had submitted."""
        if self._is_over:
            return
        self.drive.crash()
        if self._shard is not None:
            for task in set(self._shard._tasks._tasks):
                task.cancel()
            self._shard._commits.pages.close()
        self._part()

    def _part(self) -> None:
        self._is_over = True
        if self._shard is not None:  # what it did last, and told nobody
            for keys in self._shard.core.catalog.take_evicted():
                self._gone(EventKind.EVICTED, numbers_of(keys))
        for task in self.waiting:
            task.cancel()
