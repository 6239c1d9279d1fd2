"""A read that advances: its first blocks move to the worker while the others are still being read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.agent.assembly import (
    SETTINGS,
    Assembly,
    HeldDrive,
    assembled,
    get_states,
    reasons_of,
    until,
)

from ostraca_dpu_agent.settings import MIB
from ostraca_fabric.drives.drive_health import HealthSettings
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.policies.circuit_breaker import BreakerSettings
from ostraca_fabric.tables.digests import TagCheck
from ostraca_fabric.wire.messages import GetProgress

COUNT = 8
"""Blocks of one part."""

FIRST = 3
HASTY = replace(
    SETTINGS,
    health=HealthSettings(
        overdue_s=0.1, file_overdue_s=0.1, breaker=BreakerSettings(open_s=0.05, open_max_s=0.1)
    ),
)


class PartlyDrive(HeldDrive):
    """Reads the first pieces of a held batch at once, and tells so."""

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[NDArray[np.bool_]]:
        held = super().submit_read(pieces, check)
        if self.holds_reads and check is not None:
            self.holds_reads = False
            its = slice(0, FIRST)
            part = TagCheck(pieces.some(its), check.lengths[its], check.seeds[its], check.tags[its])

            def tell(_: object) -> None:
                check.states[its] = part.states
                check.tell()

            super().submit_read(part.pieces, part).add_done_callback(tell)
            self.holds_reads = True
        return held


async def test_first_blocks_are_reported_while_the_rest_of_the_read_hangs() -> None:
    async with assembled(drive=PartlyDrive()) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(COUNT))
        fabric.drive.holds_reads = True
        getting = asyncio.create_task(fabric.get(worker, range(COUNT)))
        await until(lambda: reported(worker.said) == FIRST)
        assert not getting.done()
        fabric.drive.let_go()
        assert get_states(await getting) == [BlockState.HIT] * COUNT
        assert [len(wave.lengths) for wave in worker.arena.moved[-5:]] == [2, 1, 2, 2, 1]
        await fabric.at_rest()


async def test_first_blocks_are_hits_when_the_drive_leaves_the_rest_unanswered() -> None:
    async with assembled(HASTY, drive=PartlyDrive()) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(COUNT))
        fabric.drive.holds_reads = True
        done = await fabric.get(worker, range(COUNT))
        states = get_states(done)
        assert (states.count(BlockState.HIT), states.count(BlockState.MISS)) == (FIRST, COUNT - FIRST)
        assert set(reasons_of(done)) == {Reason.NONE, Reason.DRIVE_SUSPECT}
        assert is_all_quarantined(fabric), "the drive may still write to the slots"
        fabric.drive.let_go()
        await fabric.at_rest()


def reported(said: Sequence[object]) -> int:
    return sum(len(message.positions) // 4 for message in said if isinstance(message, GetProgress))


def is_all_quarantined(fabric: Assembly) -> bool:
    staging = fabric.context.staging
    return 0 < staging.quarantined_bytes == staging.held_bytes


async def test_blocks_of_an_abandoned_read_that_arrive_later_do_not_move() -> None:
    async with assembled(HASTY, drive=PartlyDrive()) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(COUNT))
        before = len(worker.arena.moved)
        fabric.drive.holds_reads = worker.arena.is_held = True
        getting = asyncio.create_task(fabric.get(worker, range(COUNT)))
        await until(lambda: fabric.context.drives[fabric.drive.id].refuses_reads)
        await asyncio.sleep(0)  # the get hears of it
        await asyncio.sleep(0)
        fabric.drive.let_go()
        await until(lambda: not fabric.drive.queued)
        worker.arena.let_go()
        assert get_states(await getting).count(BlockState.HIT) == FIRST
        assert len(worker.arena.moved) - before == 2
        await fabric.at_rest()


async def test_the_staging_of_a_part_outlives_a_crash_of_its_delivery() -> None:
    async with assembled(drive=PartlyDrive()) as fabric:
        worker, staging = fabric.worker(), fabric.context.staging
        await fabric.put(worker, range(COUNT))
        fabric.drive.holds_reads = worker.arena.is_held = True
        getting = asyncio.create_task(fabric.get(worker, range(COUNT)))
        await until(lambda: bool(worker.arena.held))
        (delivery,) = fabric.context.tasks._tasks
        held_bytes = staging.held_bytes
        delivery.cancel()
        worker.arena.let_go()
        for _ in range(20):
            await asyncio.sleep(0)
        assert staging.held_bytes == held_bytes > 0, "the drive still writes to the slots"
        assert not delivery.done()
        fabric.drive.let_go()
        await asyncio.wait([delivery, getting])
        assert delivery.cancelled()
        assert getting.cancelled()
        await fabric.at_rest()


@pytest.mark.parametrize("asked", [COUNT, COUNT + 1])
async def test_the_last_wave_is_part_of_the_answer(asked: int) -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(COUNT))
        done = await fabric.get(worker, range(asked))
        last = len(done.positions) // 4
        assert last > 0
        assert reported(worker.said) + last == COUNT
        await fabric.at_rest()


async def test_news_of_good_and_failed_waves_together_tells_them_apart() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(4))
        worker.arena.is_held = True
        getting = asyncio.create_task(fabric.get(worker, range(4)))
        await until(lambda: len(worker.arena.held) == 2)
        (failing, landing), worker.arena.held = worker.arena.held, []
        worker.arena.fails = True
        failing()
        worker.arena.fails = False
        landing()
        done = await getting
        assert get_states(done) == [BlockState.MISS] * 2 + [BlockState.HIT] * 2
        assert np.frombuffer(done.positions, np.uint32).tolist() == [2, 3]
        assert reasons_of(done)[:2] == [Reason.TRANSFER_FAILED] * 2
        await fabric.at_rest()


@pytest.mark.parametrize("tells", [False, True])
async def test_moves_to_a_worker_are_measured(tells: bool) -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        worker.arena.tells = tells
        await fabric.put(worker, range(4))
        to_worker = fabric.context.estimator.worker_queue(worker)
        assert to_worker.serve_s(fabric.context.clock(), MIB) == 0
        await fabric.get(worker, range(4))
        assert to_worker.serve_s(fabric.context.clock(), MIB) > 0


@pytest.mark.parametrize("asked", [COUNT, COUNT + 1])
async def test_blocks_told_in_the_transports_thread_are_hits(asked: int) -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(COUNT))
        worker.arena.tells = True
        done = await fabric.get(worker, range(asked))
        assert get_states(done)[:COUNT] == [BlockState.HIT] * COUNT
        assert reported(worker.said) == COUNT
        assert not done.positions, "the worker knows all of them"
        assert fabric.context.counters.hits_on[fabric.drive.id] == COUNT
        assert fabric.context.estimator.worker_queue(worker).active_bytes == 0
        await fabric.at_rest()


async def test_blocks_told_to_a_worker_are_hits_in_an_answer_at_the_deadline() -> None:
    async with assembled(drive=PartlyDrive()) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(COUNT))
        worker.arena.tells = fabric.drive.holds_reads = True
        getting = asyncio.create_task(fabric.get(worker, range(COUNT)))
        await until(lambda: reported(worker.said) == FIRST)
        worker.stopped(fabric.requests).set_result(None)
        done = await getting
        assert get_states(done).count(BlockState.HIT) == FIRST
        assert not done.positions
        assert fabric.context.counters.hits_on[fabric.drive.id] == FIRST
        fabric.drive.let_go()
        await fabric.at_rest()


async def test_delivered_blocks_without_a_report_are_hits_in_an_answer_at_the_deadline() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(4))
        worker.arena.is_held = True
        getting = asyncio.create_task(fabric.get(worker, range(4)))
        await until(lambda: len(worker.arena.held) == 2)
        worker.stopped(fabric.requests).set_result(None)
        worker.arena.held.pop(0)()
        done = await getting
        assert get_states(done) == [BlockState.HIT] * 2 + [BlockState.LATE] * 2
        assert np.frombuffer(done.positions, np.uint32).tolist() == [0, 1]
        assert not reported(worker.said)
        worker.arena.let_go()
        await fabric.at_rest()
