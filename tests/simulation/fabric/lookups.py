"""Look-ups of a fabric: what one finds some agent has, and in calm it can be got.

Behind a look-up without a pin a get of what it has found goes at once; behind one with a pin at some time
within it, counted from before the look-up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.outcome import BlockState

if TYPE_CHECKING:
    from tests.simulation.fabric.worker import Ended
    from tests.simulation.fabric.world import World

_GET_WITHIN_S = 0.55
"""Where nothing stalls a get needs less; it resolves within the pin."""


async def look_up(world: World, name: str, numbers: list[int], deadline_s: float, pin_s: float) -> None:
    """Play one look-up, and the get behind it, in the worker's process."""
    oracle, calm, deaths = world.oracle, world.calm, world.deaths
    asked_s, asked = world.loop.time(), calm.asked(name, numbers)
    had = _had(world, numbers, in_memory=not pin_s)
    before = {number: oracle.departures(number) for number in numbers}
    end = await world.workers[name].worker.lookup(numbers, deadline_s, pin_s)
    world.told(name, "pinned lookup" if pin_s else "lookup", numbers, end)
    oracle.ended("lookup", world.loop.time() - asked_s - deadline_s)
    has = _had(world, numbers, in_memory=not pin_s)
    may_have_had = {number for number in numbers if before[number] != oracle.departures(number)}
    oracle.looked_up(numbers, end, set(numbers) if deaths != world.deaths else had | has | may_have_had)
    if not pin_s:  # an owner need not promise what it has
        calm.answered(asked, numbers, end, deadline_s, "lookup")
    found = {number: before[number] for number in _found(numbers, end)}
    if not pin_s:  # a cache promises nothing
        listed = _had(world, list(found), in_memory=False)
        found = {number: gone for number, gone in found.items() if number in listed}
    if not found or not calm.is_calm:
        return
    if pin_s:
        left_s = asked_s + pin_s - _GET_WITHIN_S - world.loop.time()
        if left_s < 0:
            return
        await asyncio.sleep(world.dice.uniform(0, left_s))
    behind = calm.asked_behind(name, found, is_pinned=pin_s > 0)
    end = await world.get(name, list(found), _GET_WITHIN_S)
    calm.answered(
        behind,
        list(found),
        end,
        _GET_WITHIN_S,
        "get behind a pinned lookup" if pin_s else "get behind a lookup",
    )


def _found(numbers: list[int], end: Ended) -> list[int]:
    return [number for number, state in zip(numbers, end.states, strict=True) if state == BlockState.HIT]


def _had(world: World, numbers: list[int], *, in_memory: bool) -> set[int]:
    """Return those of these blocks that some agent lists now, or, if so asked, has in its DRAM."""
    if not numbers:
        return set()
    keys = np.frombuffer(b"".join(map(world.oracle.key_of, numbers)), np.uint8).reshape(-1, 16)
    has = np.zeros(len(numbers), np.bool_)
    for process in world.agents.values():
        has |= process.has(keys, in_memory=in_memory)
    return {number for number, is_here in zip(numbers, has.tolist(), strict=True) if is_here}
