"""What workers ask of a fabric, and the judgement of each answer.

Behind a look-up in calm goes a get of what it has found: at once, or with a pin at some time within it,
counted from before the look-up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.model.outcome import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.fabric.world.worker import Ended
    from tests.simulation.fabric.world.world import World

    from ostraca_fabric.model.outcome import Ack

_GET_WITHIN_S = 0.55
"""Where nothing stalls a get needs less; it resolves within the pin."""


async def put(world: World, name: str, numbers: list[int], deadline_s: float, ack: Ack) -> None:
    """Play one put, of new bytes, in the worker's process."""
    versions = [world.oracle.new_version(number) for number in numbers]
    asked_s, seen = world.loop.time(), Seen(world, numbers)
    end = await world.workers[name].worker.put(versions, deadline_s, ack)
    world.told(name, "put", numbers, end)
    world.oracle.ended("put", world.loop.time() - asked_s - deadline_s)
    world.oracle.put(versions, end, ack, seen.had())


async def get(
    world: World, name: str, numbers: list[int], deadline_s: float, then: Callable[[list[int], Ended], None]
) -> None:
    """Play one get, in the worker's process; tell *then* how it ended."""
    asked = world.calm.asked(name, numbers)
    end = await _got(world, name, numbers, deadline_s)
    world.calm.answered(asked, numbers, end, deadline_s)
    then(numbers, end)


async def _got(world: World, name: str, numbers: list[int], deadline_s: float) -> Ended:
    asked_s = world.loop.time()
    end = await world.workers[name].worker.get(numbers, deadline_s)
    world.told(name, "get", numbers, end)
    world.oracle.ended("get", world.loop.time() - asked_s - deadline_s)
    world.oracle.got(numbers, end)
    return end


async def look_up(world: World, name: str, numbers: list[int], deadline_s: float, pin_s: float) -> None:
    """Play one look-up, and the get behind it, in the worker's process."""
    calm, seen = world.calm, Seen(world, numbers, in_staging=True, in_cache=not pin_s)
    asked_s, asked = world.loop.time(), calm.asked(name, numbers)
    end = await world.workers[name].worker.lookup(numbers, deadline_s, pin_s)
    world.told(name, "pinned lookup" if pin_s else "lookup", numbers, end)
    world.oracle.ended("lookup", world.loop.time() - asked_s - deadline_s)
    world.oracle.looked_up(numbers, end, seen.had())
    if end.agent and world.oracle.found_prefix(numbers, end):
        world.story.happened["prefixes found"] += 1
    found = [number for number, state in zip(numbers, end.states, strict=True) if state == BlockState.HIT]
    if not pin_s:
        calm.answered(asked, numbers, end, deadline_s, "lookup")  # an owner need not promise what it has
        found = sorted(_known(world, found))  # a cache promises nothing
    else:
        found = [number for number in found if world.oracle.places(number)]  # nor does staging (ADR 0038)
    if asked is None or not found or not calm.is_calm:
        return
    if pin_s:
        left_s = asked_s + pin_s - _GET_WITHIN_S - world.loop.time()
        if left_s < 0:
            return
        await asyncio.sleep(world.dice.uniform(0, left_s))
    departures = {number: seen.departures[number] for number in found}
    behind = calm.asked_behind(name, departures, is_pinned=pin_s > 0)
    end = await _got(world, name, found, _GET_WITHIN_S)
    what = "get behind a pinned lookup" if pin_s else "get behind a lookup"
    calm.answered(behind, found, end, _GET_WITHIN_S, what)


class Seen:
    """Which of some blocks agents have had since this was made: list, or, if so asked, have in their DRAM."""

    def __init__(
        self, world: World, numbers: list[int], *, in_staging: bool = False, in_cache: bool = False
    ) -> None:
        self.departures = {number: world.oracle.departures(number) for number in numbers}
        self._arrivals = {number: world.oracle.arrivals(number) for number in numbers}
        self._stagings = {number: world.oracle.stagings(number) for number in numbers}
        self._world = world
        self._in_staging, self._in_cache = in_staging, in_cache
        self._partings = world.partings
        self._had = _known(world, numbers, in_staging=in_staging, in_cache=in_cache)

    def had(self) -> set[int]:
        """Return those that some agent has had until now, or may have."""
        world, numbers = self._world, list(self.departures)
        if self._partings != world.partings:  # nobody can ask who is gone
            return set(numbers)
        gone = {number for number in numbers if self.departures[number] != world.oracle.departures(number)}
        # An owner says that it has evicted some when it does the next thing, which may be a while later.
        came = {number for number in numbers if self._arrivals[number] != world.oracle.arrivals(number)}
        if self._in_staging:
            came |= {number for number in numbers if self._stagings[number] != world.oracle.stagings(number)}
        has = _known(world, numbers, in_staging=self._in_staging, in_cache=self._in_cache)
        return self._had | gone | came | has


def _known(world: World, numbers: list[int], *, in_staging: bool = False, in_cache: bool = False) -> set[int]:
    """Return those of these blocks that some agent has now."""
    if not numbers:
        return set()
    keys = np.frombuffer(b"".join(map(world.oracle.key_of, numbers)), np.uint8).reshape(-1, 16)
    has = np.zeros(len(numbers), np.bool_)
    for process in world.agents.values():
        has |= process.has(keys, in_staging=in_staging, in_cache=in_cache)
    return {number for number, is_here in zip(numbers, has.tolist(), strict=True) if is_here}
