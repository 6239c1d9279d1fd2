"""A fabric that comes to rest by itself once nothing goes wrong any more, and what must be found there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.simulation.fabric.world.volume_records import check_volume_records
from tests.simulation.fabric.world.worker import Ended
from tests.simulation.shard.model import ViolationError

from ostraca_fabric.model.ids import drive_of, enclosure_of
from ostraca_fabric.model.outcome import BlockState, Reason

if TYPE_CHECKING:
    from tests.simulation.fabric.oracle.oracle import Place
    from tests.simulation.fabric.world.world import World

    from ostraca_fabric.model.ids import ShardId

REST_WITHIN_S = 900.0
_GET_BLOCKS = 16
_GET_TRIES = 12
_TRIES_ALONE = 2
_AGAIN_S = 4.0
"""What was held off is tried again within half a minute."""


def restlessness(world: World) -> str:
    """Say why the fabric is not at rest; nothing when it is."""
    truth = world.map
    for name, process in world.agents.items():
        is_up = process.is_alive and process.has_started and not process.is_ending
        if not is_up or process.host.is_paused:
            return f"{name} is not up"
        known = process.agent._routes.newest().map
        if (known.claims, known.placement_epoch) != (truth.claims, truth.placement_epoch):
            return f"{name} does not know all claims"
    for shard in truth.shards():
        if world.drives.why_gone(shard.id, shard.drive):
            continue
        owners = [name for name, process in world.agents.items() if shard.id in process.shards]
        claim = truth.claims.get(shard.id)
        if claim is None or owners != [claim.agent]:
            return f"{shard.id} is claimed by {claim and claim.agent}, and answered for by {owners}"
        core = world.agents[owners[0]].shards[shard.id].core
        if core.is_recovering:
            return f"{owners[0]} is reading what {shard.id} holds"
        if core.grants.is_fenced:
            return f"{owners[0]} owns {shard.id} and never writes there again"
    return ""


async def rest(world: World) -> None:
    """Wait until the fabric is at rest, and stays so for a second; it must get there by itself."""
    until_s = world.loop.now_s + REST_WITHIN_S
    while why := restlessness(world) or await _stirring(world):
        if world.loop.now_s > until_s:
            raise ViolationError(f"the fabric comes to no rest: {why}")
        world.check()
        await asyncio.sleep(0.5)
    world.check_closely()
    for process in world.agents.values():
        if not world.setup.expects_all:
            break
        compared = check_volume_records(process, world.drives.flashes, world.drives.superblocks)
        world.story.happened["volume records compared"] += compared
    world.story.tell("-", "the fabric is at rest")


async def _stirring(world: World) -> str:
    """Wait for a second, and say why the fabric is not at rest any more; nothing when it is.

    The lease of an agent that stood still may end in it.
    """
    await asyncio.sleep(1.0)
    return restlessness(world)


async def everything_is_found(world: World) -> None:
    """Get every block that must be there, when the fabric is at rest.

    What is missing and not excused is asked for again, at last one by one: blocks that lie beside a page that
    can't be read are read with it in one I/O, and are misses then. A transfer that failed says nothing of a
    block: what was said of it before counts.
    """
    if not world.setup.expects_all:
        return
    for volume in world.blocks.volumes:
        listed = [number for number in world.oracle.listed if world.blocks.volume_of(number) == volume]
        for begin in range(0, len(listed), _GET_BLOCKS):
            await _are_found(world, listed[begin : begin + _GET_BLOCKS])


async def _are_found(world: World, left: list[int]) -> None:
    """Get blocks of one volume that must be there."""
    said = dict[int, int]()
    for attempt in range(_GET_TRIES):
        is_last = attempt == _GET_TRIES - 1
        at_once = len(left) if attempt < _GET_TRIES - _TRIES_ALONE else 1
        some = [left[first : first + at_once] for first in range(0, len(left), at_once)]
        left = [number for each in some for number in await _left(world, each, said, is_last=is_last)]
        if not left:
            break


async def _left(world: World, numbers: list[int], said: dict[int, int], *, is_last: bool) -> list[int]:
    """Get blocks; return those that were missing, and must be there. *said*: why each was missing so far."""
    left = []
    for number, state, reason in await _missing(world, numbers):
        why = excuse(world, number)
        if reason != Reason.TRANSFER_FAILED:
            said[number] = reason
        if why or is_last:
            world.oracle.must_be_found(number, state, said.get(number, reason), why)
        else:
            left.append(number)
    if left:
        await asyncio.sleep(_AGAIN_S)
    return left


async def _missing(world: World, numbers: list[int]) -> list[tuple[int, int, int]]:
    """Get blocks by any worker of their tenant; return those that were no HITs, with state and reason."""
    ends: list[Ended] = []
    name = world.dice.choice(world.workers_of(world.blocks.volume_of_all(numbers).tenant))
    world.begin_get(name, numbers, 5.0, lambda _, end: ends.append(end))
    await world.settle()
    world.check()
    (end,) = ends
    outcomes = zip(numbers, end.states, end.reasons, strict=True)
    return [each for each in outcomes if each[1] != BlockState.HIT]


def excuse(world: World, number: int) -> str:
    """Say why a block that was committed may be a miss; nothing when it must be found."""
    places, live = world.oracle.places(number), world.placed.shards(world.map, number)
    asked = [shard for shard in places or live if shard in live]
    if not asked:
        return _unasked(world, places)
    return next(filter(None, (_damage(world, number, shard) for shard in asked)), "")


def _damage(world: World, number: int, shard: ShardId) -> str:
    """Say what has befallen a block where it was committed."""
    why = world.drives.why_gone(shard, drive_of(shard))
    owned = next((each.shards[shard] for each in world.agents.values() if shard in each.shards), None)
    if why or owned is None:
        return why
    place = world.oracle.places(number).get(shard)
    mishaps = 0 if place is None else place.mishaps
    return world.drives.excuse(owned, world.oracle.key_of(number), mishaps)


def _unasked(world: World, places: dict[ShardId, Place]) -> str:
    """Say why no live epoch places a block where it is; nothing when its epoch had to be asked still."""
    if world.has_forgotten_placements:
        return "an earlier placement that was forced out or forgotten"
    if not world.drained.isdisjoint(enclosure_of(shard) for shard in places):
        return "drained, and passed over"
    if any(world.drives.why_gone(shard, drive_of(shard)) for shard in places):
        return "a dead drive, of an earlier placement"
    return "" if all(place.is_current for place in places.values()) else "put by an agent that was behind"
