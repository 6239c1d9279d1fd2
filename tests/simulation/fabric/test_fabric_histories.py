"""Some histories of a whole fabric; ``make soak-sim`` plays many. A seed tells all of one."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tests.simulation.fabric.history.drawn import drawn_setup, drawn_strikes
from tests.simulation.fabric.history.history import STEPS, History, play
from tests.simulation.fabric.history.story import Story
from tests.simulation.fabric.history.strikes import BAD_DRIVES, DIRECT, ENCLOSURES, HARSH, NARROW
from tests.simulation.fabric.oracle.own_reads import check_bad_read
from tests.simulation.fabric.oracle.resting import _AGAIN_S, _GET_TRIES, everything_is_found, excuse, rest
from tests.simulation.fabric.world.agent_memory import MemoryReads
from tests.simulation.fabric.world.direct import DirectReads, OwnBlock
from tests.simulation.fabric.world.watched import Watched
from tests.simulation.fabric.world.world import STRIKES, Setup, World
from tests.simulation.mutants.mutants import PUSHED, READ_FROM_MEMORY
from tests.simulation.shard.model import ViolationError
from tests.support.simulated.simulated_transport import TransferFaults
from tests.support.simulated.virtual_hosts import HostsLoop

from ostraca_fabric.model.ids import EnclosureId, drive_id
from ostraca_fabric.model.outcome import Ack

BATCH = 10
WHOLE, SHORT = 3, 3
"""Batches of histories as long as those of ``make soak-sim``, and of those that end sooner."""

SHORT_STEPS = 20


@pytest.mark.parametrize("batch", range(WHOLE + SHORT))
def test_no_history_of_a_fabric_shows_what_must_never_be(batch: int) -> None:
    steps = STEPS if batch < WHOLE else SHORT_STEPS
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        print(f"python -m tests.simulation.fabric --histories 1 --jobs 1 --seed {seed} --steps {steps}")
        play(seed, steps)


@pytest.mark.parametrize(
    "seed", [pytest.param(901, id="stale owner"), pytest.param(20864, id="direct reads beyond the limit")]
)
def test_histories_that_failed_once_are_right(seed: int) -> None:
    play(seed, STEPS)


def test_a_seed_tells_all_of_a_fabrics_history() -> None:
    assert play(7) == play(7)
    assert play(7) != play(8)


def test_every_strike_is_something_that_a_history_can_do() -> None:
    struck = {*STRIKES, *BAD_DRIVES, *ENCLOSURES, *HARSH}
    assert {
        name for name in {*struck, *DIRECT, *NARROW} if not callable(getattr(History, name, None))
    } == set()
    drawn = {name for seed in range(100) for name in drawn_strikes(random.Random(seed))}
    assert drawn == struck


def test_some_histories_have_one_tenant_whose_workers_read_drives() -> None:
    drawn = [drawn_setup(random.Random(seed)) for seed in range(100)]
    direct = [setup for setup in drawn if setup.direct is not None]
    assert 10 < len(direct) < 50
    for setup in direct:
        assert len({volume.tenant for volume in setup.volumes}) == 1
        assert set(DIRECT) <= set(setup.strikes)


def test_some_histories_move_blocks_in_place_and_end_operations_in_mid_frame() -> None:
    drawn = [drawn_setup(random.Random(seed)) for seed in range(100)]
    assert {setup.regions > 0 for setup in drawn if setup.inline} == {True}
    assert 5 < sum(set(NARROW) <= set(setup.strikes) for setup in drawn) < 40


def test_operations_in_place_end_in_every_way() -> None:
    setup = Setup(hosts=1, inline=1.0, regions=0.5, numbers=256, blocks=(8, 16), strikes=NARROW)
    happened = play(3, setup=setup).happened + play(4, setup=setup).happened
    for what, most in (("get", "HIT"), ("put", "COMMITTED")):
        assert happened[f"{what} in place {most}"] > 20
        assert happened[f"{what} {most}"] > happened[f"{what} in place {most}"], "some cross the arena"
        assert happened[f"{what} in place LATE"] > 0


def test_some_histories_have_workers_to_whose_rows_agents_write() -> None:
    drawn = [drawn_setup(random.Random(seed)) for seed in range(100)]
    assert 40 < sum(setup.pushed > 0 for setup in drawn) < 90


def test_rows_that_agents_write_to_are_withheld_as_long_as_something_may_land_there() -> None:
    happened = play(1, setup=PUSHED).happened + play(2, setup=PUSHED).happened
    for what, most in (("get", "HIT"), ("put", "COMMITTED")):
        assert happened[f"{what} in place {most}"] > 20
        assert happened[f"{what} {most}"] > happened[f"{what} in place {most}"], "some cross the arena"
    assert happened["rows withheld"] > 10


def test_some_histories_have_workers_that_read_memory() -> None:
    drawn = [drawn_setup(random.Random(seed)) for seed in range(100)]
    read = [setup for setup in drawn if setup.memory is not None]
    assert 10 < len(read) < 50
    assert 5 < len([setup for setup in read if setup.has_small_cache]) < len(read)
    assert [setup for setup in read if setup.direct is not None]


def test_reads_from_memory_end_in_every_way() -> None:
    happened = Counter[str]()
    for seed in range(15, 22):
        happened += play(seed, setup=READ_FROM_MEMORY).happened
    assert happened["memory HITs"] > 20
    assert happened["memory HITs of blocks that gave way"]
    assert happened["memory reads of replaced blocks"]
    assert happened["memory reads not in time"]
    without = replace(READ_FROM_MEMORY, memory=MemoryReads(workers=0.0))
    assert not play(0, setup=without).happened["memory HITs"]


def test_copies_of_puts_out_of_workers_end_in_every_way() -> None:
    happened = Counter[str]()
    for seed in range(2):
        happened += play(seed, setup=replace(READ_FROM_MEMORY, inline=1.0, regions=0.7)).happened
    assert happened["blocks of puts copied"] > 20
    assert happened["blocks of puts changed meanwhile"], "agents may copy from rows of ended puts"
    without = replace(READ_FROM_MEMORY, memory=MemoryReads(workers=0.0))
    assert not play(0, setup=without).happened["blocks of puts copied"]


def copy_while(strike: Callable[[World], object], *, is_offered: bool) -> tuple[Counter[str], str]:
    """Let something happen before a block is offered, or before it is copied from memory.

    Return what happened, and the last words of the story.
    """

    async def scenario() -> tuple[Counter[str], str]:
        setup = Setup(hosts=1, drives=1, memory=MemoryReads(pauses=1.0))
        world = World(setup, random.Random(1), Story(loop))
        try:
            with Watched(world):
                await rest(world)
                world.begin_put("w0", [1], 2.0, Ack.COMMITTED)
                await world.settle()
                world.begin_get("w0", [1], 5.0)
                if is_offered:
                    await copy_begins(world)
                world.workers["w0"].worker.arena.array[:] ^= 255  # where the put has left the block
                strike(world)
                await world.settle()
                return world.story.happened, world.story.lines[-1]
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        return loop.run_until_complete(scenario())


async def copy_begins(world: World) -> None:
    for _ in range(1000):
        if world.workers["w0"].worker.under_copy.total():
            return
        await asyncio.sleep(0.001)
    pytest.fail("no copy has begun")


def scribble(world: World) -> None:
    world.agents["h0"].agent._staging.memory.array[:] ^= 255


@pytest.mark.parametrize(
    ("is_offered", "said"), [(False, "leaves a block to a worker"), (True, "their bytes are others")]
)
def test_blocks_that_an_agent_still_lists_are_in_its_memory(*, is_offered: bool, said: str) -> None:
    with pytest.raises(ViolationError, match=said):
        copy_while(scribble, is_offered=is_offered)


def test_memory_of_an_agent_that_has_died_is_not_copied() -> None:
    happened, last = copy_while(lambda world: world.crash_agent("h0"), is_offered=True)
    assert happened["copies from the memory of dead agents"] == 1
    assert not happened["memory HITs"]
    assert last.endswith("get [1] by h0: 1 DECLINED (1 DISCONNECTED)")


def read_directly(reads: DirectReads) -> Counter[str]:
    setup = Setup(has_cache=False, direct=reads, strikes=("link_is_slow",))
    return play(2, setup=setup).happened


def test_direct_reads_of_histories_end_in_every_way() -> None:
    happened = read_directly(DirectReads())
    assert happened["direct HITs"] == happened["blocks read directly"] > 50
    assert not happened["blocks failed directly"]
    happened = read_directly(DirectReads(failures=0.3, retry_s=0.01))
    assert happened["direct HITs"] > 10
    assert happened["blocks failed directly"] > 10
    happened = read_directly(DirectReads(strays=1.0, retry_s=0.01))
    assert happened["direct reads of wrong bytes: another device"] > 50
    assert not happened["direct HITs"]
    happened = read_directly(DirectReads(hangs=0.3, silent_s=0.1, retry_s=0.01))
    assert happened["blocks lost directly"] > 10


@pytest.mark.parametrize(
    ("excuse", "left_s"),
    [
        ("", 60.0),
        ("another device", 60.0),
        ("a spoilt extent", 60.0),
        ("its pin may have ended", 60.0),
        ("its pin may have ended", 0.0),
        ("no calm", 60.0),
    ],
)
def test_wrong_bytes_of_a_pinned_block_are_excused_by_what_has_befallen_its_read_alone(
    excuse: str, left_s: float
) -> None:
    async def scenario() -> None:
        reads = DirectReads(strays=float(excuse == "another device"))
        world = World(Setup(hosts=1, direct=reads), random.Random(1), Story(loop))
        try:
            await rest(world)
            world.calm.begin()
            direct = world.workers["w0"].worker.direct
            assert direct is not None
            path = direct.paths[0]
            block = OwnBlock(path, 4096, 4096, len(path.flash.mishaps))
            if excuse == "a spoilt extent":
                path.flash.rot(5000)
            if excuse == "no calm":
                world.calm.end()
            now_s = world.loop.time()
            asked_s = now_s - (10.0 if excuse == "its pin may have ended" and left_s else 1.0)
            with contextlib.nullcontext() if excuse else pytest.raises(ViolationError):
                check_bad_read(world, 1, block, asked_s, now_s + left_s)
            assert world.story.happened[f"direct reads of wrong bytes: {excuse}"] == bool(excuse)
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())


@pytest.mark.parametrize("is_spoilt", [True, False])
def test_only_what_a_fault_has_touched_is_excused(*, is_spoilt: bool) -> None:
    async def scenario() -> None:
        dice = random.Random(1)
        world = World(Setup(hosts=1, drives=1, has_cache=False), dice, Story(loop))
        (process,) = world.agents.values()
        try:
            with Watched(world):
                await rest(world)
                world.begin_put("w0", [1, 2], 2.0, Ack.COMMITTED)
                await world.settle()
                (owned,) = process.shards.values()
                row = owned.core.index.find(np.frombuffer(world.oracle.key_of(1), np.uint8).reshape(1, -1))
                begin, flash = int(owned.core.index.offsets(row)[0]), world.drives.flashes[owned.record.drive]
                if is_spoilt:
                    flash.rot(begin)
                assert [excuse(world, number) for number in (1, 2)] == ["a spoilt extent" * is_spoilt, ""]
                with contextlib.nullcontext() if is_spoilt else pytest.raises(ViolationError):
                    world.drives.check_damage(owned, begin, 1)
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())


@pytest.mark.parametrize("has_successor", [True, False])
def test_what_an_owner_drops_that_is_not_sure_of_its_shard_is_gone_unless_another_has_it(
    *, has_successor: bool
) -> None:
    async def scenario() -> None:
        dice = random.Random(1)
        world = World(Setup(drives=1, has_cache=False), dice, Story(loop))
        try:
            with Watched(world):
                await rest(world)
                (owner,) = (each for each in world.agents.values() if each.shards)
                beside = f"w{owner.name[1:]}"
                world.begin_put(beside, [1], 2.0, Ack.COMMITTED)
                await world.settle()
                (owned,) = owner.shards.values()
                row = owned.core.index.find(np.frombuffer(world.oracle.key_of(1), np.uint8).reshape(1, -1))
                world.drives.flashes[owned.record.drive].rot(int(owned.core.index.offsets(row)[0]))
                if has_successor:
                    owner.membership.cut()
                else:
                    world.outside.store.go_down()
                await asyncio.sleep(20.0)
                claim = world.map.claims[owned.record.id]
                assert (owned.is_exclusive, claim.agent != owner.id) == (False, has_successor)
                world.begin_get(beside, [1], 2.0)
                await world.settle()
                await asyncio.sleep(1.0)
                assert any(line.endswith("DROPPED [1]") for line in world.story.lines)
                assert world.oracle.listed == [1] * has_successor
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())


def test_what_an_owner_commits_that_owns_its_shard_no_more_is_held_against_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        world = World(Setup(hosts=1, drives=1, has_cache=False), random.Random(1), Story(loop))
        (process,) = world.agents.values()
        is_writing = asyncio.Event()

        def writes_due(take: Callable[[float], object], now_s: float) -> object:
            is_writing.set()
            return take(now_s)

        try:
            with Watched(world):
                await rest(world)
                ((shard, owned),) = process.shards.items()
                monkeypatch.setattr(owned.core, "writes_due", partial(writes_due, owned.core.writes_due))
                world.begin_put("w0", [1], 2.0, Ack.COMMITTED)
                await is_writing.wait()
                await process.agent._controller.shards.stop(shard)
                assert shard not in process.shards
                await world.settle()
                assert any(line.endswith("put [1] by h0: 1 COMMITTED") for line in world.story.lines)
                assert (world.oracle.arrivals(1), world.oracle.listed) == (1, [1])
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())


def test_what_a_lie_has_spoilt_is_excused_where_the_last_transfer_of_it_fails() -> None:
    async def scenario() -> None:
        dice = random.Random(1)
        world = World(Setup(hosts=1, drives=1, lies=1e-9), dice, Story(loop))
        (process,) = world.agents.values()
        try:
            with Watched(world):
                await rest(world)
                world.begin_put("w0", [1], 2.0, Ack.COMMITTED)
                await world.settle()
                process.agent._staging.memory.array[:] ^= 255

                def fail() -> None:
                    world.outside.plane.faults = TransferFaults(failures=1.0)

                began_s = loop.now_s
                loop.call_later((_GET_TRIES - 1.5) * _AGAIN_S, fail)
                await everything_is_found(world)
                assert loop.now_s - began_s > (_GET_TRIES - 1.5) * _AGAIN_S
                said = [line for line in world.story.lines if "get [1]" in line]
                assert ["DAMAGED" in line for line in said] == [True] * (len(said) - 1) + [False]
                assert "TRANSFER_FAILED" in said[-1]
                assert world.oracle.excused["what a lie left in an agent's memory"] == 1
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())


def test_an_enclosure_that_is_added_takes_no_other_ones_place() -> None:
    async def scenario() -> None:
        dice = random.Random(1)
        world = World(Setup(hosts=1, enclosures=2, drives=1), dice, Story(loop))
        history, flashes = History(world, dice), dict(world.drives.flashes)
        try:
            await rest(world)
            world.drives.die(drive_id(EnclosureId("e0"), "d0"))
            await history.store_is_emptied()
            history.enclosure_is_added()
            assert sorted(world.map.enclosures) == ["e1", "e2"]
            assert {drive: world.drives.flashes[drive] for drive in flashes} == flashes
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())


def test_a_process_that_stands_still_before_it_acts_is_not_stopped_for_longer() -> None:
    async def scenario() -> None:
        dice = random.Random(1)
        world = World(Setup(hosts=1), dice, Story(loop))
        history, (process,) = History(world, dice), world.agents.values()
        try:
            await rest(world)
            is_acting = asyncio.Event()

            def stop() -> None:
                process.host.before_acting = None
                process.host.pause(60.0)
                is_acting.set()

            process.host.before_acting = stop
            await is_acting.wait()
            assert process.host.holds_acts
            until_s = process.host.goes_on_at_s
            for _ in range(20):
                history.agent_stops()
                history.machine_stops()
            assert process.host.goes_on_at_s == until_s
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())


def test_a_lease_is_kept_alive_again_after_stops_that_overlap() -> None:
    async def scenario() -> None:
        dice = random.Random(1)
        world = World(Setup(hosts=1), dice, Story(loop))
        history, (process,) = History(world, dice), world.agents.values()
        try:
            await rest(world)
            history._stand_still(process, 8.0)
            history._pause(process, 20.0)
            await asyncio.sleep(19.0)
            kept = [process.membership.keeps_alive]
            await asyncio.sleep(2.0)
            kept.append(process.membership.keeps_alive)
            assert kept == [False, True]
            history._stand_still(process, 8.0)
            world.crash_agent(process.name)
            await asyncio.sleep(9.0)
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())
