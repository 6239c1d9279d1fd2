"""One history: what happens to a world, drawn from a seed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.simulation.shard.blocks import LENGTH_MAX
from tests.simulation.shard.model import ViolationError
from tests.simulation.shard.world import Fate, Setup, World
from tests.support.simulated.drives.drive_faults import DriveFaults
from tests.support.simulated.virtual_time import VirtualLoop

from ostraca_fabric.model.extent import MIB

STEPS = 100
NUMBERS = 48
POOLS = 3
"""Number 0 is the common one. A block is of one pool, as it is of one tenant."""

_PUTS_MAX = 60
_FOREVER_S = 30.0

_MEDIA: tuple[Callable[[DriveFaults, float], DriveFaults], ...] = (
    lambda faults, chance: replace(faults, unreadable=chance),
    lambda faults, chance: replace(faults, misdirected=chance),
    lambda faults, chance: replace(faults, rot=chance),
    lambda faults, chance: replace(faults, rot_on_read=chance),
)
_ERRORS: tuple[Callable[[DriveFaults, float], DriveFaults], ...] = (
    lambda faults, chance: replace(faults, read_errors=chance),
    lambda faults, chance: replace(faults, write_errors=chance),
    lambda faults, chance: replace(faults, no_space=chance),
)


@dataclass(frozen=True, slots=True)
class Told:
    """What a history was."""

    steps: int
    happened: Counter[str]
    mishaps: Counter[str]
    excused: Counter[str]


def drawn_setup(dice: random.Random) -> Setup:
    """Draw what a history is played on: half of the drives have no faults of their own."""
    base = Setup()
    faults = DriveFaults(
        stalls=dice.choice([0.0, 0.0, 0.05]),
        late=dice.choice([0.0, 0.5, 1.0]),
        late_failures=dice.choice([0.0, 0.5, 1.0]),
        service_s=dice.choice([0.0001, 0.001, 0.003]),
    )
    for kinds in (_MEDIA, _ERRORS):
        if dice.random() < 0.4:
            for kind in dice.sample(kinds, dice.randint(1, len(kinds))):
                faults = kind(faults, dice.choice([0.003, 0.01, 0.04]))
    waits, is_beyond = dice.random() < 0.6, dice.random() < 0.15
    if is_beyond:
        faults = replace(faults, late_s=40.0, stall_s=20.0, late=1.0)
    return replace(
        base,
        segments=dice.choice([2, 3, 4, 4, 5, 8, 12]),
        segment_bytes=MIB * dice.choice([1, 1, 1, 1, 1, 4]),
        block_bytes=dice.choice([4096, 16384, 65536]),
        has_volatile_cache=dice.random() < 0.5,
        faults=faults,
        owner=replace(
            base.owner,
            blocks_max=dice.choice([4096, 4096, 4096, 32]),
            free_segments=dice.choice([0, 1, 1, 2]),
        ),
        shares=drawn_shares(dice),
        waits_for_late_writes=waits,
        forbids_late_writes=waits and not is_beyond,
    )


def drawn_shares(dice: random.Random) -> dict[int, float]:
    """Draw what pools may take of the shard: often nothing, and not always what there is."""
    if dice.random() < 0.3:
        return {}
    return {pool: dice.choice([0.1, 0.25, 0.5]) for pool in range(1, POOLS) if dice.random() < 0.8}


class History:
    """Steps of one world."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world = world
        self._dice = dice
        self._lengths = dice.choice([(4096, 4096), (1, 20_000), (1, 400_000), (60_000, 70_000)])

    def lengths(self) -> int:
        """Draw a block's length; a long one now and then."""
        data_bytes = self.world.model.geometry.data_bytes
        if self._dice.random() < 0.03:
            return min(LENGTH_MAX, self._dice.randint(1, data_bytes))
        return min(data_bytes, self._dice.randint(*self._lengths))

    async def step(self) -> None:
        """Let one thing happen, and a little time pass."""
        dice, world = self._dice, self.world
        roll = dice.random()
        if roll < 0.45:
            self.put()
        elif roll < 0.72:
            self.get()
        elif roll < 0.90:
            await asyncio.sleep(dice.choice([0.0005, 0.003, 0.003, 0.1, 0.1, 1.5]))
        elif roll < 0.93:
            world.check()
        elif roll < 0.94:
            world.happened["shares changed"] += 1
            world.share_out(drawn_shares(dice))
        elif roll < 0.945:
            await self.pass_long()
        else:
            await self.strike()
        await asyncio.sleep(dice.choice([0.0, 0.0, 0.0002, 0.001, 0.003]))
        world.fail_if_failed()

    def put(self) -> None:
        dice = self._dice
        pool = dice.randrange(POOLS)
        numbers = dice.sample(range(pool, NUMBERS, POOLS), dice.choice([1, 1, 2, 3, 6]))
        fate = dice.choices([Fate.COMMIT, Fate.RELEASE, Fate.FORGET], [0.9, 0.05, 0.05])[0]
        self.world.begin_put([(number, self.lengths()) for number in numbers], fate, pool)

    def get(self) -> None:
        dice = self._dice
        numbers = dice.sample(range(NUMBERS), dice.choice([1, 2, 6]))
        pin_s = dice.uniform(0.1, self.world.setup.owner.pin_max_s)
        keeps_pin_s = pin_s * dice.random() if dice.random() < 0.2 else 0.0
        self.world.begin_get(numbers, pin_s=pin_s, keeps_pin_s=keeps_pin_s)

    async def pass_long(self) -> None:
        """Longer than any reservation, pin or late write."""
        await asyncio.sleep(self.world.setup.owner.hold_max_s + self.world.setup.owner.late_write_s)

    async def strike(self) -> None:
        """Something dies."""
        kinds = (self.owner_dies, self.process_dies, self.machine_goes_dark, self.drive_goes_dark, self.stops)
        await self._dice.choice(kinds)()

    async def owner_dies(self) -> None:
        world = self.world
        world.happened["owners died"] += 1
        world.kill_owner()
        world.begin_taking_over(
            earlier_pins_s=world.setup.owner.pin_max_s, waits=world.setup.waits_for_late_writes
        )
        await self._perhaps_wait()

    async def process_dies(self) -> None:
        world = self.world
        world.happened["processes died"] += 1
        world.kill_all()
        world.begin_taking_over(waits=world.setup.waits_for_late_writes)
        await self._perhaps_wait()

    async def machine_goes_dark(self) -> None:
        """Agent and drive lose power at one moment. Nothing is left that could land late."""
        world = self.world
        world.happened["machines went dark"] += 1
        world.kill_all()
        world.flash.power_cut()
        world.begin_taking_over()
        await self._perhaps_wait()

    async def drive_goes_dark(self) -> None:
        """Cut a drive's power under a living agent."""
        self.world.happened["drives went dark"] += 1
        self.world.flash.power_cut()

    async def stops(self) -> None:
        """End in order, and start again."""
        world = self.world
        await world.settle()
        await world.owned()
        if world.owner is not None:
            world.happened["owners stopped"] += 1
            owner, world.owner = world.owner, None
            await owner.close()
            # In order or not: a write that failed may land.
            waits = world.setup.waits_for_late_writes and world.setup.faults.late_failures > 0
            world.begin_taking_over(earlier_pins_s=world.setup.owner.pin_max_s, waits=waits)

    async def _perhaps_wait(self) -> None:
        if self._dice.random() < 0.7:
            await self.world.owned()

    async def end(self) -> None:
        """Let everything come to rest: what was found is there, and the shard takes blocks again."""
        world = self.world
        await world.settle()
        await world.owned()
        world.flash.faults = DriveFaults()
        await asyncio.sleep(_FOREVER_S)
        world.check()
        world.kill_all()
        world.flash.power_cut()
        world.begin_taking_over()
        await world.owned()
        world.fail_if_failed()
        if world.is_shard_gone:
            return
        for number in range(NUMBERS, NUMBERS + _PUTS_MAX):
            world.begin_put([(number, 4096)], Fate.COMMIT)
            await world.settle()
            world.fail_if_failed()
            if number in world.model.must:
                break
            await asyncio.sleep(1.0)
        else:
            raise ViolationError("a good drive takes no block any more")
        world.begin_get(list(range(NUMBERS)), pin_s=1.0)
        await world.settle()
        world.check()
        assert world.owner is not None, "somebody took the block"
        await world.owner.close()


class _Bugs(logging.Handler):
    """Collects what the code under test calls a bug."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


async def played(seed: int, steps: int, setup: Setup | None) -> Told:
    """Play one history. Raises ViolationError, or whatever the code raises."""
    dice = random.Random(seed)
    world = World(setup or drawn_setup(dice), dice)
    history = History(world, dice)
    world.begin_taking_over()
    await world.owned()
    try:
        for _ in range(steps):
            await history.step()
            if world.is_shard_gone:
                break
        await history.end()
    finally:
        world.kill_all()
    mishaps = Counter(each.kind.name for each in world.flash.mishaps)
    return Told(steps, world.happened, mishaps, world.model.excused)


def play(seed: int, steps: int = STEPS, setup: Setup | None = None) -> Told:
    """Play one history on virtual time; everything in it follows from its seed."""
    bugs, log = _Bugs(), logging.getLogger()
    quiet = [logging.getLogger(name) for name in ("ostraca_dpu_agent", "ostraca_fabric")]
    log.addHandler(bugs)
    levels = [each.level for each in quiet]
    for each in quiet:
        each.setLevel(logging.ERROR)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            told = runner.run(played(seed, steps, setup))
    finally:
        log.removeHandler(bugs)
        for each, level in zip(quiet, levels, strict=True):
            each.setLevel(level)
    if bugs.said:
        raise ViolationError("\n".join(bugs.said))
    return told
