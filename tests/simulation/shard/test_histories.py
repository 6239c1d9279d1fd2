"""The short form of ``make simulate``, and the same steps as hypothesis chooses and shrinks them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.simulation.shard.history import NUMBERS, History, play
from tests.simulation.shard.world import Fate, Setup, World
from tests.support.simulated.drives.drive_faults import DriveFaults
from tests.support.simulated.virtual_time import VirtualLoop

BATCHES, BATCH = 4, 25

WANTED = st.lists(
    st.tuples(st.integers(0, NUMBERS - 1), st.integers(1, 300_000)),
    min_size=1,
    max_size=5,
    unique_by=lambda each: each[0],
)
STRIKES = ["owner_dies", "process_dies", "machine_goes_dark", "drive_goes_dark", "stops"]
FAULTS = st.builds(
    DriveFaults,
    read_errors=st.sampled_from([0.0, 0.0, 0.03]),
    write_errors=st.sampled_from([0.0, 0.0, 0.03]),
    misdirected=st.sampled_from([0.0, 0.0, 0.03]),
    rot=st.sampled_from([0.0, 0.0, 0.03]),
    stalls=st.sampled_from([0.0, 0.05]),
    late=st.sampled_from([0.0, 1.0]),
)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_history_shows_what_must_never_be(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        print(f"python -m tests.simulation --histories 1 --jobs 1 --seed {seed}")
        play(seed)


def test_a_seed_tells_all_of_a_history() -> None:
    assert play(7) == play(7)
    assert play(7) != play(8)


class ShardMachine(RuleBasedStateMachine):
    """One world; a rule for each thing that may happen."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.is_begun = False

    @initialize(
        seed=st.integers(0, 1 << 30),
        segments=st.integers(2, 5),
        has_volatile_cache=st.booleans(),
        faults=FAULTS,
        blocks_max=st.sampled_from([32, 4096]),
    )
    def begin(
        self, seed: int, segments: int, has_volatile_cache: bool, faults: DriveFaults, blocks_max: int
    ) -> None:
        setup = Setup(segments=segments, has_volatile_cache=has_volatile_cache, faults=faults)
        setup = replace(setup, owner=replace(setup.owner, blocks_max=blocks_max))
        self.runner.run(self.begun(setup, seed))
        self.is_begun = True

    async def begun(self, setup: Setup, seed: int) -> None:
        dice = random.Random(seed)
        world = World(setup, dice)
        self.history = History(world, dice)
        world.begin_taking_over()
        await world.owned()

    @rule(wanted=WANTED, fate=st.sampled_from([Fate.COMMIT, Fate.COMMIT, *Fate]), settles=st.booleans())
    def put(self, wanted: list[tuple[int, int]], fate: Fate, settles: bool) -> None:
        self.begins(lambda: self.world.begin_put(wanted, fate), settles=settles)

    @rule(
        numbers=st.lists(st.integers(0, NUMBERS - 1), min_size=1, max_size=6, unique=True),
        pin_s=st.sampled_from([0.5, 3.0]),
        keeps_pin_s=st.sampled_from([0.0, 0.4]),
        settles=st.booleans(),
    )
    def get(self, numbers: list[int], pin_s: float, keeps_pin_s: float, settles: bool) -> None:
        self.begins(
            lambda: self.world.begin_get(numbers, pin_s=pin_s, keeps_pin_s=keeps_pin_s), settles=settles
        )

    @rule(seconds=st.sampled_from([0.001, 0.1, 2.0, 8.0]))
    def time_passes(self, seconds: float) -> None:
        self.happens(asyncio.sleep(seconds))

    @rule(strike=st.sampled_from(STRIKES))
    def strikes(self, strike: str) -> None:
        self.happens(getattr(self.history, strike)())

    @rule()
    def check(self) -> None:
        self.begins(self.world.check, settles=False)

    @property
    def world(self) -> World:
        return self.history.world

    def begins(self, act: Callable[[], None], *, settles: bool) -> None:
        """Do something, and wait for every mover where *settles* says so."""

        async def beginning() -> None:
            act()
            await asyncio.sleep(0.0002)
            if settles:
                await self.world.settle()

        self.happens(beginning())

    def happens(self, happening: Coroutine[None, None, None]) -> None:
        """Run what waits for the loop's next turn."""
        self.runner.run(happening)
        self.world.fail_if_failed()

    def teardown(self) -> None:
        try:
            if self.is_begun:
                self.runner.run(self.ended())
        finally:
            self.runner.close()

    async def ended(self) -> None:
        try:
            await self.history.end()
        finally:
            self.world.kill_all()


TestShardAgainstAModel = ShardMachine.TestCase
TestShardAgainstAModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
