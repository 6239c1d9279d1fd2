"""Blocks that workers read themselves: a pin holds what an agent located on a drive until the reads end.

So in calm a block read from there in time is what was put there. A block in an agent's memory is there when
the agent says so, and may give way at any time. And nothing holds memory once all reads have ended.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
from tests.simulation.shard.model import ViolationError
from tests.support.simulated.drives.drive_faults import Befell

from ostraca_dpu_agent.datapath.staging.leases import Purpose
from ostraca_fabric.tables.digests import are_good
from ostraca_fabric.wire import codec

if TYPE_CHECKING:
    from tests.simulation.fabric.world.direct import OwnBlock
    from tests.simulation.fabric.world.world import World

    from ostraca_dpu_agent.datapath.get import GetRun
    from ostraca_fabric.wire.messages import GetProgress

_EARLY_S = 0.1
"""A pin may end sooner, as agents' clocks differ and gets end before their deadlines."""

_RETURNS_WITHIN_S = 120.0


def check_bad_read(world: World, number: int, block: OwnBlock, asked_s: float, until_s: float) -> None:
    """Hear of a block that a worker read itself, and that its tag does not fit.

    The get began at *asked_s*, and ends by *until_s*.
    """
    why = _excuse(world, block, asked_s, until_s)
    if not why:
        raise ViolationError(
            f"block {number} was located and pinned, and its worker has read something else of "
            f"{block.path.drive} at {block.offset}"
        )
    world.story.happened[f"direct reads of wrong bytes: {why}"] += 1


def check_places(world: World, run: GetRun, told: GetProgress) -> None:
    """Hear of blocks that an agent is to leave in its memory for a worker to copy: they are there now."""
    memory, blocks = run._context.staging.memory.array, run._blocks
    its = codec.positions(told.positions, len(blocks))
    offsets = codec.u64(told.places, len(its)).astype(np.int64)
    tags = codec.rows16(told.tags, len(its))
    are_there = are_good(memory, offsets, blocks.lengths[its], blocks.seeds[its], tags)
    if not are_there.all() and not world.setup.lies:
        raise ViolationError("an agent leaves a block to a worker where its memory holds something else")


def _excuse(world: World, block: OwnBlock, asked_s: float, until_s: float) -> str:
    flash, begin, end = block.path.flash, block.offset, block.offset + block.length
    now_s = world.loop.time()  # by the worker's clock
    pinned_until_s = min(asked_s + world.outside.settings.owner.pin_max_s, until_s)
    faults = {
        "another device": block.path.is_stray,
        "a spoilt extent": flash.is_spoilt(begin, end)
        or flash.befell_since(block.mishaps, begin, end, Befell.ROT_ON_READ),
        "what a lie left in an agent's memory": world.setup.lies > 0,
        "its pin may have ended": now_s > pinned_until_s - _EARLY_S,
        "no calm": not world.calm.is_calm,
    }
    return next((why for why, is_so in faults.items() if is_so), "")


async def everything_is_returned(world: World) -> None:
    """Wait until nothing holds memory of workers, nor of agents for gets; it must come to that by itself."""
    until_s = world.loop.now_s + _RETURNS_WITHIN_S
    while why := _held(world):
        if world.loop.now_s > until_s:
            raise ViolationError(f"memory is held for good: {why}")
        await asyncio.sleep(1.0)


def _held(world: World) -> str:
    return _held_by_workers(world) or _held_by_agents(world)


def _held_by_workers(world: World) -> str:
    for name, process in world.workers.items():
        worker = process.worker
        if worker.direct is not None and worker.direct.is_reading:
            return f"{name} reads a drive"
        if worker.under_copy.total():
            return f"{name} copies blocks from memory"
        if any(entry.is_held for entry in worker.ledger._entries.values()):
            return f"{name} holds slots of a request"
        if worker.ledger.is_due():
            return f"{name} waits for its agent's word on slots"
    return ""


def _held_by_agents(world: World) -> str:
    for name, agent in world.agents.items():
        if not agent.is_alive:
            continue
        if any(session._reads for session in agent.agent._dispatcher._sessions.values()):
            return f"{name} waits for a report on extents"
        if agent.agent._staging.tenants.requests:
            return f"{name} counts requests"
        if agent.agent._staging._held[Purpose.GET].total():
            return f"{name} holds memory for gets"
    return ""
