"""Some histories of a whole fabric; ``make soak-sim`` plays many. A seed tells all of one."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from tests.simulation.fabric.history import History, play
from tests.simulation.fabric.story import Story
from tests.simulation.fabric.world import Setup, World

from ostraca_fabric.testing.virtual_hosts import HostsLoop

BATCH = 5
BATCHES = 4


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_history_of_a_fabric_shows_what_must_never_be(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        print(f"python -m tests.simulation.fabric --histories 1 --jobs 1 --seed {seed}")
        play(seed)


def test_a_seed_tells_all_of_a_fabrics_history() -> None:
    assert play(7) == play(7)
    assert play(7) != play(8)


def test_a_process_that_stands_still_before_it_acts_is_not_stopped_for_longer() -> None:
    async def scenario() -> None:
        dice = random.Random(1)
        world = World(Setup(hosts=1), dice, Story(loop))
        history, (process,) = History(world, dice), world.agents.values()
        try:
            await world.rest()
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
            await world.rest()
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
