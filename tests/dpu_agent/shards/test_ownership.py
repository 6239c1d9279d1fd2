"""An owned shard that other owners know of: its fence, its grant, pauses, and what it takes over."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest
from tests.support.agent.assembly import (
    DRIVE,
    FABRIC,
    SETTINGS,
    SHARD,
    HeldDrive,
    assembled,
    committed,
    put_states,
    reasons_of,
    reserved,
    until,
)
from tests.support.agent.owned_shard import keys_of
from tests.support.agent.shard_invariants import check_core

from ostraca_dpu_agent.controller.recovery import read_slices, read_superblock
from ostraca_dpu_agent.controller.served_shard import adopt_late_commits
from ostraca_dpu_agent.datapath.staging.leases import StagingLease
from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_dpu_agent.shards.shard import OwnedShard, core_of
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.telemetry.requests import EventRing

RECORD = ShardRecord(SHARD, DRIVE, 0, 0, weight=1)
COMMITTED, DECLINED = PutState.COMMITTED, PutState.DECLINED


class Clock:
    """A clock that a test may set forward, as if the process had been stopped meanwhile."""

    def __init__(self) -> None:
        self.stopped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.stopped_s


class StoppingDrive(HeldDrive):
    """Its process is stopped for a while before each write that waits for a flush."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.has_volatile_cache = True
        self.stops_s = 0.0

    def submit_flush(self) -> asyncio.Future[bool]:
        self.clock.stopped_s += self.stops_s
        return super().submit_flush()


async def superblock_of(drive: HeldDrive) -> Superblock:
    return await read_superblock(drive, RECORD, FABRIC)


@asynccontextmanager
async def owned(
    drive: HeldDrive, clock: Callable[[], float], *, epoch: int = 1, withheld: frozenset[int] = frozenset()
) -> AsyncIterator[OwnedShard]:
    """Own a shard as the controller does, up to where it confirms and grants."""
    core = core_of(await superblock_of(drive), SETTINGS.owner)
    async with aclosing(read_slices(drive, RECORD, core.superblock)) as slices:
        async for areas in slices:
            core.take_in(areas)
    events = EventRing("a", 16, clock)
    shard = OwnedShard(RECORD, drive, core, settings=SETTINGS.owner, clock=clock, events=events)
    shard.begin(OwnerEpoch(epoch), withheld=withheld)
    yield shard
    drive.let_go()
    assert shard.is_closed or await shard.close(within_s=5)


def grant(shard: OwnedShard) -> frozenset[int]:
    """Have what is wanted recorded."""
    wanted = shard.wanted_grant()
    if wanted is not None:
        shard.apply_grant(wanted)
    return shard.core.grants.segments


async def ready(shard: OwnedShard) -> None:
    await until(lambda: bool(shard.core.ring.ready))


def found(shard: OwnedShard, numbers: list[int]) -> list[bool]:
    answer = shard.core.resolve(shard._clock(), keys_of(numbers), pin_s=0.0)
    return list(answer.found.tolist())


async def test_a_shard_asks_for_a_grant_and_writes_in_it_while_its_claim_stands() -> None:
    drive, clock = HeldDrive(), Clock()
    async with owned(drive, clock) as shard:
        await asyncio.wait_for(shard.grant_due.wait(), 1)
        assert (await reserved(shard, [1])).reasons.tolist() == [Reason.FENCED]
        shard.confirm(clock() + 60.0)
        assert (await reserved(shard, [1])).reasons.tolist() == [Reason.NO_SPACE]
        assert grant(shard) == {0, 1}
        assert not shard.grant_due.is_set()
        await ready(shard)
        assert await committed(shard, await reserved(shard, [1]), [1]) == [COMMITTED]
        await asyncio.wait_for(shard.grant_due.wait(), 5)
        assert grant(shard) == {0, 1, 2, 3}
        clock.stopped_s += 60.0
        assert (await reserved(shard, [2])).reasons.tolist() == [Reason.FENCED]
        assert found(shard, [1]) == [True]


async def test_commits_that_wait_for_their_summary_are_declined_at_the_fence() -> None:
    drive, clock = HeldDrive(), Clock()
    async with owned(drive, clock) as shard:
        shard.confirm(clock() + 60.0)
        shard.apply_grant(range(6))
        await ready(shard)
        first, second = await reserved(shard, [1], hold_s=1e6), await reserved(shard, [2], hold_s=1e6)
        await ready(shard)
        drive.holds_writes = True
        written = asyncio.create_task(committed(shard, first, [1]))
        await until(lambda: len(drive.held) == 1)
        waiting = asyncio.create_task(committed(shard, second, [2]))
        await until(lambda: any(segment.queued for segment in shard.core.ring.segments))
        clock.stopped_s += 60.0
        shard.confirm(-math.inf)
        assert await asyncio.wait_for(waiting, 1) == [DECLINED]
        drive.let_go()
        assert await asyncio.wait_for(written, 1) == [COMMITTED], "it was begun in time"
        assert found(shard, [1, 2]) == [True, False]


async def test_a_shard_that_is_closed_behind_its_fence_leaves_no_commit_without_an_answer() -> None:
    drive, clock = HeldDrive(), Clock()
    async with owned(drive, clock) as shard:
        shard.confirm(clock() + 60.0)
        shard.apply_grant(range(6))
        await ready(shard)
        made = await reserved(shard, [1], hold_s=1e6)
        await ready(shard)
        committing = asyncio.create_task(committed(shard, made, [1]))
        await asyncio.sleep(0)
        clock.stopped_s += 60.0
        assert await shard.close(within_s=5)
        assert await asyncio.wait_for(committing, 1) == [DECLINED]


async def test_a_summary_that_was_begun_before_a_long_stop_is_not_written_after_it() -> None:
    clock = Clock()
    drive = StoppingDrive(clock)
    async with owned(drive, clock) as shard:
        shard.confirm(math.inf)
        shard.apply_grant(range(6))
        await ready(shard)
        made = await reserved(shard, [1])
        await ready(shard)
        before, drive.stops_s = len(drive.writes), SETTINGS.owner.pause_max_s + 1.0
        assert await committed(shard, made, [1]) == [DECLINED]
        assert len(drive.writes) == before
        drive.stops_s = 0.0
        await ready(shard)
        assert not shard.is_failing
        assert await committed(shard, await reserved(shard, [1]), [1]) == [COMMITTED]


async def test_a_put_writes_nothing_once_its_space_has_run_out_even_if_it_was_checked_just_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with assembled() as fabric:
        worker, clock = fabric.worker(), Clock()
        await fabric.ready()
        fabric.context.clock = clock
        charge_to_drive = Staging.charge_to_drive

        def stopped(self: Staging, lease: StagingLease, drive: object) -> None:
            clock.stopped_s += SETTINGS.owner.hold_s
            charge_to_drive(self, lease, drive)

        monkeypatch.setattr(Staging, "charge_to_drive", stopped)
        done = await fabric.put(worker, [1])
        assert (put_states(done), reasons_of(done)) == ([DECLINED], [Reason.EXPIRED])
        assert not any((pieces.lengths > PAGE_BYTES).any() for pieces in fabric.drive.writes), "pages alone"
        await fabric.at_rest()


async def test_a_fenced_owner_answers_look_ups_and_declines_puts_and_commits() -> None:
    drive, clock = HeldDrive(), Clock()
    async with owned(drive, clock) as shard:
        shard.confirm(math.inf)
        shard.apply_grant(range(shard.core.geometry.segments))
        await ready(shard)
        assert await committed(shard, await reserved(shard, [1]), [1]) == [COMMITTED]
        made = await reserved(shard, [2])
        shard.fence()
        assert await committed(shard, made, [2]) == [DECLINED]
        shard.confirm(math.inf)
        assert (await reserved(shard, [2])).reasons.tolist() == [Reason.FENCED]
        assert found(shard, [1, 2]) == [True, False]


async def test_a_successor_reads_again_what_its_predecessor_lists_until_its_grant_is_retired() -> None:
    drive, clock = HeldDrive(), Clock()
    async with owned(drive, clock) as before:
        before.confirm(math.inf)
        granted = grant(before)
        await ready(before)
        assert await committed(before, await reserved(before, [1]), [1]) == [COMMITTED]
        async with owned(drive, clock, epoch=2, withheld=granted) as after:
            after.confirm(math.inf)
            assert grant(after).isdisjoint(granted)
            await ready(after)
            assert await committed(before, await reserved(before, [2]), [2]) == [COMMITTED]
            assert found(after, [1, 2]) == [True, False]
            superblock = await superblock_of(drive)
            assert await adopt_late_commits(after, drive, superblock) == 1
            assert found(after, [1, 2]) == [True, True]
            assert await adopt_late_commits(after, drive, superblock) == 0
            after.retire(granted)
            assert after.withheld == frozenset()
            assert await adopt_late_commits(after, drive, superblock) == 0
            check_core(after.core)
