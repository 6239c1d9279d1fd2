"""One history of a whole fabric: what happens to a world, drawn from a seed."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import secrets
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.fabric.history.drawn import STRIKES_IN_CALM, drawn_setup
from tests.simulation.fabric.history.story import Overheard, Story
from tests.simulation.fabric.history.strikes import (
    DIRECT,
    BadDrives,
    DirectReadSwitches,
    Enclosures,
    HarshOutages,
    NarrowLinks,
    OrderlyEnds,
)
from tests.simulation.fabric.oracle.own_reads import everything_is_returned
from tests.simulation.fabric.oracle.resting import everything_is_found, rest
from tests.simulation.fabric.world.watched import Watched
from tests.simulation.fabric.world.world import Setup, World
from tests.support.simulated.drives.drive_faults import DriveFaults
from tests.support.simulated.virtual_hosts import HostsLoop

from ostraca_fabric.model.outcome import Ack
from ostraca_fabric.runtime import memory

if TYPE_CHECKING:
    from tests.simulation.fabric.world.process import AgentProcess

    from ostraca_fabric.model.extent import Pieces
    from ostraca_fabric.model.ids import DriveId

STEPS = 60
STORY_LINES = 120
_BY_CHAINS, _LOOK_UPS_BY_CHAINS = 0.3, 0.6
"""Of puts and gets, and of look-ups: those for a part of a chain, of one rank or of all."""

_OF_SUMMARY = 0.5
"""Of the writes that an agent stands still before: those of which only summaries count."""

_LEASE_S = 5.0
_DEADLINES_S = (0.05, 0.5, 0.5, 2.0, 2.0, 5.0)
_PINS_S = (0.0, 0.0, 1.0, 2.0, 3.0)
_PAUSES_S = (0.05, 1.0, 3.0, 8.0, 8.0, 20.0, 20.0, 70.0, 200.0)
_PAUSES_BEFORE_S = (0.05, 1.0, 3.0, 8.0, 8.0, 20.0, 20.0, 60.0)
"""Between a check and what is done upon it: what waits longer than ``pause_max_s`` there may be later than
``late_write_s``."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a history was."""

    happened: Counter[str]
    excused: Counter[str]
    story: str
    """Its end, word for word."""


class History(OrderlyEnds, NarrowLinks, DirectReadSwitches, BadDrives, Enclosures, HarshOutages):
    """Steps of one world."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world = world
        self.dice = self._dice = dice

    async def step(self) -> None:
        """Let one thing happen, and a little time pass."""
        dice, world = self._dice, self.world
        roll = dice.random()
        name = dice.choice(sorted(world.workers))
        deadline_s = dice.choice(_DEADLINES_S)
        if roll < 0.42:
            ack = dice.choice([Ack.STAGED, Ack.COMMITTED, Ack.COMMITTED])
            world.begin_put(name, self._numbers(name), deadline_s, ack)
        elif roll < 0.66:
            world.begin_get(name, self._numbers(name), deadline_s)
        elif roll < 0.74:
            numbers = self._numbers(name, by_chains=_LOOK_UPS_BY_CHAINS)
            world.begin_lookup(name, numbers, deadline_s, pin_s=dice.choice(_PINS_S))
        elif roll < 0.84:
            await asyncio.sleep(dice.choice([0.001, 0.01, 0.1, 0.5, 2.0]))
        elif roll < 0.86:
            await asyncio.sleep(dice.choice([8.0, 40.0, 160.0]))
        elif roll < 0.88:
            await self.settle_and_look()
        else:
            await self.strike()
        await asyncio.sleep(dice.choice([0.0, 0.0, 0.0005, 0.002, 0.02]))
        world.check()

    def _numbers(self, name: str, by_chains: float = _BY_CHAINS) -> list[int]:
        """Draw what a worker asks for: blocks of one volume of its tenant."""
        dice, world = self._dice, self.world
        tenant = world.workers[name].worker.tenant
        volumes = [volume for volume in world.blocks.volumes if volume.tenant == tenant]
        volume = volumes[0] if len(volumes) == 1 else dice.choice(volumes)
        chains = world.blocks.chains(volume)
        if chains and dice.random() < by_chains:
            return self._part(chains)
        numbers = world.blocks.of_volume(volume)
        return dice.sample(numbers, min(len(numbers), dice.choice(world.setup.blocks)))

    def _part(self, chains: list[range]) -> list[int]:
        """Draw a part of a chain, often from its first block on, or to its end; of one rank, or of all."""
        dice, blocks_max, length = self._dice, max(self.world.setup.blocks), len(chains[0])
        begin = dice.choice([0, 0, dice.randrange(length)])
        end = dice.choice([length, dice.randrange(begin, length) + 1])
        ranks = dice.choice([chains, [dice.choice(chains)]])
        end = min(end, begin + blocks_max // len(ranks))
        return [number for chain in ranks for number in chain[begin:end]]

    async def strike(self) -> None:
        """Let something go wrong."""
        name = self._dice.choice(self.world.setup.strikes)
        if name not in (*STRIKES_IN_CALM, *DIRECT):
            self.world.calm.end()
        struck = getattr(self, name)()
        if struck is not None:
            await struck

    def later(self, at_most_s: float, act: Callable[..., object], *arguments: object) -> None:
        after_s = self._dice.choice([0.2, 1.0, at_most_s / 2, at_most_s])
        self.world.loop.call_later(after_s, act, *arguments)

    def tell(self, who: str, what: str) -> None:
        self.world.story.happened[what] += 1
        self.world.story.tell(who, what)

    def _living(self) -> str | None:
        names = [name for name, each in sorted(self.world.agents.items()) if each.is_alive]
        return self._dice.choice(names) if names else None

    def agent_stops(self) -> None:
        """Stop an agent's loop; its lease is still kept alive."""
        name = self._living()
        if name is not None:
            self.tell(name, "its loop stands still")
            self._pause(self.world.agents[name], self._dice.choice(_PAUSES_S))

    def _pause(self, process: AgentProcess, for_s: float) -> bool:
        """Stop a process, but not for longer where it stands still just before it acts; say whether.

        What waits there for longer than ``pause_max_s`` would be later than ``late_write_s``.
        """
        if process.host.holds_acts:
            return False
        process.host.pause(for_s)
        return True

    def machine_stops(self) -> None:
        """Stop a whole process for a while."""
        name = self._living()
        if name is not None:
            self.tell(name, "stands still")
            self._stand_still(self.world.agents[name], self._dice.choice(_PAUSES_S))

    def _stand_still(self, process: AgentProcess, for_s: float) -> None:
        """Let a process stand still, with what keeps its lease alive."""
        if self._pause(process, for_s):
            process.membership.keeps_alive = False
            self._goes_on(process)

    def _goes_on(self, process: AgentProcess) -> None:
        """Have its lease kept alive once it is not paused any more, however long that grows."""
        if process.host.is_dead:
            return
        if process.host.is_paused:
            Context().run(self.world.loop.call_at, process.host.goes_on_at_s, self._goes_on, process)
        else:
            process.membership.keeps_alive = True

    def agent_stops_before_it_acts(self) -> None:
        """Stop an agent between a check and the act that follows."""
        name = self._living()
        if name is None:
            return
        host, after = self.world.agents[name].host, self._dice.randrange(1, 60)
        for_s = self._pause_before_s()

        def count() -> None:
            nonlocal after
            after -= 1
            if not after:
                host.before_acting = None
                self.world.story.happened["stopped before it acted"] += 1
                self.world.story.tell(name, f"stands still for {for_s} s just before it acts")
                host.pause(for_s)

        host.before_acting = count

    def _pause_before_s(self) -> float:
        at_most_s = self.world.outside.settings.owner.pause_max_s
        return min(self._dice.choice(_PAUSES_BEFORE_S), at_most_s)

    def agent_stops_before_it_writes(self) -> None:
        """Stop an agent just before a write to flash: any write, or an owner's of a summary.

        The write lands when another owner may have read the page.
        """
        name = self._living()
        if name is None:
            return
        process, after = self.world.agents[name], self._dice.randrange(1, 4)
        for_s, is_of_summary = self._pause_before_s(), self._dice.random() < _OF_SUMMARY

        def count(drive: DriveId, pieces: Pieces) -> None:
            nonlocal after
            if is_of_summary and not self.world.drives.are_of_summaries(drive, pieces):
                return
            after -= 1
            if not after:
                self._let_it_write(process)
                self.world.story.happened["stopped before it wrote"] += 1
                self.world.story.tell(name, f"stands still for {for_s} s just before it writes")
                self._stand_still(process, for_s)

        for drive in process.drives:
            drive.before_write = partial(count, drive.id)

    def _let_it_write(self, process: AgentProcess) -> None:
        for drive in process.drives:
            drive.before_write = None

    def store_is_cut_off(self) -> None:
        """One agent does not reach the store, or does not hear it, or both."""
        name = self._living()
        if name is not None:
            self.tell(name, "is cut off from the store")
            way = self.world.agents[name].membership
            requests, answers = self._dice.choice([(True, True), (True, False), (False, True)])
            way.cut(requests=requests, answers=answers)
            self.later(20.0, way.heal)

    def store_goes_down(self) -> None:
        store = self.world.outside.store
        if store.is_up:
            self.tell("-", "the store goes down")
            store.go_down()
            self.world.calm.store_went_down()
            self.later(self._dice.choice([20.0, 20.0, 90.0]), self.store_goes_up)

    def store_goes_up(self) -> None:
        if not self.world.outside.store.is_up:
            self.world.story.tell("-", "the store is up again")
            self.world.outside.store.go_up()
            self.world.calm.store_went_up()

    def hosts_are_parted(self) -> None:
        """Between two hosts, agents' or workers', nothing passes, one way or both."""
        world = self.world
        one = self._dice.choice(sorted(world.agents))
        other = self._dice.choice(sorted({*world.agents, *world.workers} - {one}))
        self.tell(one, "is parted from another host")
        ways = [(one, other), (other, one)][self._dice.choice([slice(0, 1), slice(1, 2), slice(0, 2)])]
        is_lost = self._dice.random() < 0.5
        for way in ways:
            world.story.tell(one, f"nothing passes from {way[0]} to {way[1]}")
            world.outside.network.cut(*way)
            self.later(12.0, partial(world.outside.network.heal, *way, is_lost=is_lost))

    def worker_is_reset(self) -> None:
        """Cut the connections between a worker and an agent, and restore them."""
        world = self.world
        agent, worker = self._dice.choice(sorted(world.agents)), self._dice.choice(sorted(world.workers))
        self.tell(worker, "is reset")
        world.outside.network.cut(worker, agent)
        world.outside.network.heal(worker, agent, is_lost=True)

    def link_is_slow(self) -> None:
        world = self.world
        one = self._dice.choice(sorted(world.agents))
        other = self._dice.choice(sorted({*world.agents, *world.workers} - {one}))
        delay_s = self._dice.choice([0.0, 0.005, 0.1])
        self.tell(one, "has a slow link")
        world.outside.network.slow_down(one, other, delay_s=delay_s)

    def agent_dies(self) -> None:
        """Kill an agent's process, and start it again after a while."""
        world, dice = self.world, self._dice
        name = dice.choice(sorted(world.agents))
        if not world.agents[name].is_alive:
            return
        world.story.happened["agents died"] += 1
        world.crash_agent(name)
        world.loop.call_later(dice.choice([0.2, _LEASE_S + 1.0, 30.0]), self.restart, name)

    def restart(self, name: str) -> None:
        """Start an agent where it does not live."""
        if not self.world.agents[name].is_alive:
            self.world.start_agent(name)

    def worker_dies(self) -> None:
        world = self.world
        name = self._dice.choice(sorted(world.workers))
        world.story.happened["workers died"] += 1
        world.crash_worker(name)
        world.start_worker(name)

    async def settle_and_look(self) -> None:
        """Let everything come to rest, and find everything that must be there."""
        world = self.world
        self.heal()
        await world.settle()
        world.calm.end()
        await rest(world)
        world.story.happened["rests"] += 1
        await everything_is_found(world)
        world.drives.all_as_usual()
        if world.host_paths is not None:
            world.host_paths.as_usual()
        if world.memories is not None:
            world.memories.as_usual()
        world.calm.begin()

    def heal(self) -> None:
        """End everything that goes wrong."""
        world = self.world
        world.drives.all_well()
        for name, process in list(world.agents.items()):
            if process.is_alive and process.has_given_up(world.drives.living):
                self.tell(name, "is started anew, as it leaves a drive alone that works")
                world.crash_agent(name)
            self.restart(name)
            process = world.agents[name]  # noqa: PLW2901
            process.host.before_acting = None
            self._let_it_write(process)
            process.membership.heal()
            for other in (*world.agents, *world.workers):
                if name != other:
                    world.outside.network.join(name, other)
                    world.outside.network.slow_down(name, other, delay_s=0.0)
        self.store_goes_up()
        if world.host_paths is not None:
            world.host_paths.well()
            world.let_read_directly(is_on=True)
        if world.memories is not None:
            world.memories.well()

    async def end(self) -> None:
        await self.settle_and_look()
        await everything_is_returned(self.world)


async def played(seed: int, steps: int, setup: Setup | None, story: Story) -> Counter[str]:
    """Play one history. Raises ViolationError, or whatever the code raises."""
    dice = random.Random(seed)
    secrets.token_bytes = lambda nbytes=None: dice.randbytes(nbytes or 32)
    world = World(setup or drawn_setup(dice), dice, story)
    history = History(world, dice)
    with Watched(world):
        try:
            await rest(world)
            world.calm.begin()
            for _ in range(steps):
                await history.step()
            await history.end()
        finally:
            world.end()
    return world.oracle.excused


class FailedHistoryError(Exception):
    """A history found something; what happened before is told with it."""


def play(seed: int, steps: int = STEPS, setup: Setup | None = None) -> Told:
    """Play one history on virtual time; everything in it follows from its seed.

    Raises FailedHistoryError, which tells the story up to there.
    """
    loop = HostsLoop()
    story = Story(loop)
    overheard = Overheard(story)
    log, token_bytes = logging.getLogger(), secrets.token_bytes
    quiet = [logging.getLogger(name) for name in ("ostraca_dpu_agent", "ostraca_fabric")]
    levels = [each.level for each in quiet]
    for each in quiet:
        each.setLevel(logging.INFO)
    log.addHandler(overheard)
    kept = set(memory._kept)
    try:
        excused = loop.run_until_complete(played(seed, steps, setup, story))
        overheard.check()
    except Exception as error:
        raise FailedHistoryError(f"{story.text(STORY_LINES)}\n{type(error).__name__}: {error}") from error
    finally:
        loop.close()
        gc.collect()  # tens of megabytes; what is said of what was never heard of is said now, not later
        log.removeHandler(overheard)
        for each, level in zip(quiet, levels, strict=True):
            each.setLevel(level)
        secrets.token_bytes = token_bytes
        for address in set(memory._kept) - kept:
            del memory._kept[address]
    return Told(story.happened, excused, story.text(STORY_LINES))


LASTING = replace(Setup(), drive_faults=DriveFaults(service_s=0.002))
