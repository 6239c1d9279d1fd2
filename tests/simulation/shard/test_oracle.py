"""That the oracle sees what it is for: each mistake below is made on purpose, and must be found soon."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.simulation.shard.history import play
from tests.simulation.shard.model import ViolationError
from tests.simulation.shard.world import Fate, Setup, World
from tests.support.simulated.drives.drive_faults import DriveFaults
from tests.support.simulated.virtual_time import VirtualLoop

from ostraca_dpu_agent.shards.core import ShardCore, SummaryWrite
from ostraca_dpu_agent.shards.core.reservations import ReservationTable
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_dpu_agent.shards.group_commit import GroupCommit
from ostraca_fabric.flash import recovery
from ostraca_fabric.flash.summary import Entries, Pages
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.wire.codec import Outcomes

HISTORIES = 25
SLOW = DriveFaults(service_s=0.002)
"""So that what dies often has something under way."""

LASTING = Setup(faults=SLOW)
VOLATILE = Setup(faults=SLOW, has_volatile_cache=True)
STALLING = Setup(
    waits_for_late_writes=False,
    forbids_late_writes=False,
    faults=replace(SLOW, stalls=0.3, stall_s=1.5),
)
SMALL = Setup(segments=2, faults=SLOW)


def found(setup: Setup) -> str:
    """Play until something is found, and return what."""
    for seed in range(HISTORIES):
        try:
            play(seed, setup=setup)
        except AssertionError as violation:
            return str(violation)
    return ""


@pytest.mark.parametrize(
    "setup", [LASTING, VOLATILE, STALLING, SMALL], ids=["lasting", "volatile", "stalling", "small"]
)
def test_nothing_is_found_where_nothing_is_wrong(setup: Setup) -> None:
    assert found(setup) == ""


def test_a_drive_that_lies_about_flushes_loses_what_was_committed() -> None:
    lying = replace(VOLATILE, faults=replace(SLOW, lies_about_flush=True))
    assert found(lying)


def test_a_volatile_cache_that_nobody_flushes_loses_what_was_committed() -> None:
    """What an owner that forgot its flushes would do."""
    assert found(replace(VOLATILE, admits_its_cache=False))


def test_an_index_that_is_ahead_of_flash_promises_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    write, end = GroupCommit._write, GroupCommit._end

    async def eager(self: GroupCommit, writes: list[SummaryWrite], begun_s: float) -> None:
        for each in writes:
            end(self, each, is_ok=True)
        await write(self, writes, begun_s)

    def silent(self: GroupCommit, write: SummaryWrite, *, is_ok: bool, is_dropped: bool = False) -> None:
        """Return an earlier answer."""

    monkeypatch.setattr(GroupCommit, "_write", eager)
    monkeypatch.setattr(GroupCommit, "_end", silent)
    assert found(LASTING)


def test_a_tail_of_a_lower_sequence_leaves_blocks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = recovery._listed

    def lowest_first(pages: Pages, is_current: NDArray[np.bool_]) -> tuple[NDArray[np.intp], Entries]:
        turned = pages.copy()
        turned["sequence"] = ~turned["sequence"]
        return listed(turned, is_current)

    monkeypatch.setattr(recovery, "_listed", lowest_first)
    assert "was not recovered" in found(LASTING)


def trusting(
    self: ShardCore,
    now_s: float,
    reservations: NDArray[np.uint64],
    tags: NDArray[np.uint8],
    seeds: NDArray[np.uint64],
    *,
    epoch: OwnerEpoch,
) -> Outcomes:
    """Commit whatever the epoch."""
    return _COMMIT(self, now_s, reservations, tags, seeds, epoch=self.epoch)


_COMMIT = ShardCore.commit


async def commit_to_a_successor() -> World:
    """Reserve, let the owner die while the write is under way, and commit to the next one."""
    world = World(replace(LASTING, forbids_late_writes=False), random.Random(1))
    world.begin_taking_over()
    await world.owned()
    await asyncio.sleep(1.0)
    world.flash.faults = DriveFaults(service_s=0.5)
    world.begin_put([(1, 4096)], Fate.COMMIT)
    await asyncio.sleep(0.01)
    world.kill_owner()
    world.flash.faults = DriveFaults()
    world.begin_taking_over()
    await world.owned()
    await asyncio.sleep(0.1)
    world.flash.faults = DriveFaults(service_s=1.8)
    world.begin_put([(2, 4096)], Fate.COMMIT)
    await world.settle()
    world.check()
    return world


def test_a_commit_to_a_successor_is_refused() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        world = runner.run(commit_to_a_successor())
        assert list(world.model.must) == [2]
        runner.run(killed(world))


def test_a_commit_under_an_ended_epoch_lists_what_nobody_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two things forbid it: the epoch, and that no owner gives a number that one before it gave."""
    monkeypatch.setattr(ShardCore, "commit", trusting)
    monkeypatch.setattr(ReservationTable, "number_from", lambda table, count: None)
    with (
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
        pytest.raises(ViolationError, match=r"block [12] "),
    ):
        runner.run(commit_to_a_successor())


async def killed(world: World) -> None:
    world.kill_all()


async def read_while_others_put() -> World:
    """Read a block slowly, while as much is put as two segments hold."""
    world = World(SMALL, random.Random(1))
    world.begin_taking_over()
    await world.owned()
    await asyncio.sleep(1.0)
    world.begin_put([(0, 300_000)], Fate.COMMIT)
    await world.settle()
    world.flash.faults = DriveFaults(service_s=1.5)
    world.begin_get([0], pin_s=3.0)
    await asyncio.sleep(0.001)
    world.flash.faults = DriveFaults()
    for number in range(1, 12):
        world.begin_put([(number, 300_000)], Fate.COMMIT)
        await asyncio.sleep(0.02)
    await world.settle()
    world.fail_if_failed()
    return world


async def read_from_two_segments() -> World:
    """Read a block of each of two segments slowly, while as much is put as the others hold."""
    world = World(replace(SMALL, segments=5, owner=replace(SMALL.owner, free_segments=2)), random.Random(1))
    world.begin_taking_over()
    await world.owned()
    await asyncio.sleep(1.0)
    for number in range(1, 5):
        world.begin_put([(number, 300_000)], Fate.COMMIT)
        await world.settle()
    world.flash.faults = DriveFaults(service_s=1.5)
    world.begin_get([1, 4], pin_s=3.0)
    await asyncio.sleep(0.001)
    world.flash.faults = DriveFaults()
    for number in range(5, 24):
        world.begin_put([(number, 300_000)], Fate.COMMIT)
        await asyncio.sleep(0.02)
    await world.settle()
    world.fail_if_failed()
    return world


def test_no_segment_of_several_is_used_again_under_its_readers() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        world = runner.run(read_from_two_segments())
        assert world.happened["HIT"] == 2
        runner.run(killed(world))


def test_a_segment_is_not_used_again_under_its_readers() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        world = runner.run(read_while_others_put())
        assert world.happened["HIT"] == 1
        assert world.happened["no space"] > 0
        runner.run(killed(world))


def test_a_segment_that_is_used_again_under_its_readers_is_read_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end_draining = Ring.end_draining

    def ruthless(self: Ring, now_s: float, pins: NDArray[np.int64]) -> None:
        end_draining(self, now_s, np.zeros_like(pins))

    monkeypatch.setattr(Ring, "end_draining", ruthless)
    with (
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
        pytest.raises(ViolationError, match="can't be read"),
    ):
        runner.run(read_while_others_put())


def test_a_write_that_lands_later_than_an_owner_waits_is_seen() -> None:
    impatient = replace(LASTING.owner, late_write_s=0.0, hold_max_s=0.5)
    late = replace(SMALL, owner=impatient, faults=DriveFaults(stalls=0.3, stall_s=5.0))
    assert "could still land" in found(late)
