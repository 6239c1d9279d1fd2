"""Carrying blocks forward on a drive: what is read, checked, written and found again."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    FAR_S,
    SETTINGS,
    SLOT_BYTES,
    Assembly,
    HeldDrive,
    MemoryWorker,
    assembled,
    chain_of,
    content_of,
    get_states,
    put_states,
    stop,
    until,
)

from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_fabric.flash.summary import SummaryLog
from ostraca_fabric.model.outcome import BlockState, PutState
from ostraca_fabric.policies.circuit_breaker import BreakerSettings
from ostraca_fabric.tables.digests import derive_keys

REINSERTING = replace(SETTINGS, owner=OwnerSettings(reinsertion_share=1.0))
WARY = replace(
    REINSERTING,
    health=replace(SETTINGS.health, breaker=BreakerSettings(failures_max=1, open_s=2 * FAR_S)),
)
"""One write that fails holds off all others for the rest of a test."""

FIRST = [0, 1, 2, 3]


async def put_until_reinsertion(fabric: Assembly, worker: MemoryWorker, read: list[int]) -> int:
    """Put blocks, and get these after each, until copying has begun; returns the number to go on with."""
    core, number = fabric.shard.core, 100
    while not (core.reinsertion.is_active or core.counts().blocks_reinserted):
        assert put_states(await fabric.put(worker, [number])) == [PutState.COMMITTED]
        core.resolve(time.monotonic(), keys_of_blocks(fabric, read), pin_s=0.0)
        number += 1
    return number


async def until_copied(fabric: Assembly) -> None:
    """Wait until copying has ended."""
    core = fabric.shard.core
    await until(lambda: not (core.reinsertion.is_active or core.reinsertion.is_due))


async def put_until_evicted(fabric: Assembly, worker: MemoryWorker, number: int) -> None:
    """Put more blocks until two segments have gone."""
    while fabric.shard.core.counts().segments_evicted < 2:
        assert put_states(await fabric.put(worker, [number])) == [PutState.COMMITTED]
        number += 1


def keys_of_blocks(fabric: Assembly, numbers: list[int]) -> NDArray[np.uint8]:
    return derive_keys(fabric.volume.secret, chain_of(numbers))


def used_of(fabric: Assembly) -> list[tuple[int, int]]:
    """Return what was handed out of each segment: bytes, and reservations."""
    return [(segment.bytes_used, segment.entries_used) for segment in fabric.shard.core.ring.segments]


async def assert_got(fabric: Assembly, worker: MemoryWorker, numbers: list[int]) -> None:
    """Get blocks, and compare every byte."""
    assert get_states(await fabric.get(worker, numbers)) == [BlockState.HIT] * len(numbers)
    for slot, number in enumerate(numbers):
        at = slot * SLOT_BYTES
        assert worker.arena.bytes[at : at + BLOCK_BYTES] == content_of(number)


async def test_blocks_that_are_read_are_copied_and_stay_the_same_bytes() -> None:
    async with assembled(REINSERTING) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, FIRST)
        number = await put_until_reinsertion(fabric, worker, FIRST[:2])
        await until_copied(fabric)
        counts = fabric.shard.core.counts()
        assert (counts.blocks_reinserted, counts.bytes_reinserted) == (2, 2 * SLOT_BYTES)
        await put_until_evicted(fabric, worker, number)
        await assert_got(fabric, worker, FIRST[:2])
        assert get_states(await fabric.get(worker, FIRST[2:])) == [BlockState.MISS] * 2
        await fabric.at_rest()


async def test_copies_are_found_by_the_next_owner() -> None:
    drive = HeldDrive()
    async with assembled(REINSERTING, drive=drive) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, FIRST)
        number = await put_until_reinsertion(fabric, worker, FIRST)
        await until_copied(fabric)
        await put_until_evicted(fabric, worker, number)
        assert await stop(fabric.agent)
        async with assembled(REINSERTING, drive=drive) as later:
            await assert_got(later, later.worker(), FIRST)


async def test_a_damaged_block_is_not_reinserted_along() -> None:
    async with assembled(REINSERTING) as fabric:
        worker, core = fabric.worker(), fabric.shard.core
        await fabric.put(worker, FIRST)
        fabric.drive.flip_bit(core.geometry.data_offset(int(np.argmax(core.ring.generations > 0))) + 7)
        number = await put_until_reinsertion(fabric, worker, FIRST)
        await until_copied(fabric)
        assert core.counts().blocks_reinserted == len(FIRST) - 1
        await put_until_evicted(fabric, worker, number)
        assert get_states(await fabric.get(worker, FIRST)) == [BlockState.MISS, *[BlockState.HIT] * 3]
        await fabric.at_rest()


@pytest.mark.parametrize("broken", ["summary", "entries", "read", "write"])
async def test_what_can_not_be_copied_is_evicted_and_puts_go_on(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with assembled(REINSERTING) as fabric:
        worker, core = fabric.worker(), fabric.shard.core
        await fabric.put(worker, FIRST)
        first, geometry = int(np.argmax(core.ring.generations > 0)), core.geometry
        fabric.drive.holds_reads = True
        number = await put_until_reinsertion(fabric, worker, FIRST)
        current = core.ring.pools.common.current
        assert current is not None
        match broken:
            case "summary":
                fabric.drive.fail_reads(geometry.summary_offset(first), geometry.summary_bytes)
            case "entries":
                made, area = core.ring.segments[first].generation, geometry.summary_offset(first)
                log = SummaryLog(geometry, core.superblock.identity, first, made, core.epoch)
                fabric.drive.bytes[area : area + geometry.summary_bytes] = bytes(geometry.summary_bytes)
                for offset, pages in log.opening():
                    fabric.drive.bytes[offset : offset + len(pages)] = pages
            case "read":
                fabric.drive.fail_reads(geometry.data_offset(first), geometry.data_bytes)
            case _:
                fabric.drive.fail_writes(geometry.data_offset(current.number) + current.bytes_used, 4096)
        fabric.drive.let_go()
        await until_copied(fabric)
        assert core.counts().blocks_reinserted == 0
        is_quiet_later = current.quiet_at_s > time.monotonic() + 60
        assert is_quiet_later == (broken == "write"), "a path may deliver a write that failed"
        fabric.drive.mend()
        await put_until_evicted(fabric, worker, number)
        assert get_states(await fabric.get(worker, FIRST)) == [BlockState.MISS] * 4
        assert all(map(len, fabric.drive.writes)), "a drive is asked to write something"
        await fabric.at_rest()
    assert "crashed" not in caplog.text


async def test_nothing_is_copied_to_a_drive_that_writes_are_held_off_from() -> None:
    async with assembled(WARY) as fabric:
        worker, core = fabric.worker(), fabric.shard.core
        await fabric.put(worker, FIRST)
        fabric.drive.holds_reads = True
        number = await put_until_reinsertion(fabric, worker, FIRST)
        await until(lambda: bool(core.ring.ready) and not core.has_writes_due)
        for segment in range(core.geometry.segments):
            fabric.drive.fail_writes(core.geometry.data_offset(segment), core.geometry.data_bytes)
        assert put_states(await fabric.put(worker, [number])) == [PutState.DECLINED]
        fabric.drive.mend()
        assert fabric.context.drives[fabric.drive.id].refuses_writes
        assert core.reinsertion.is_active
        used, spent_bytes = used_of(fabric), core.budget.written_bytes
        fabric.drive.let_go()
        await until_copied(fabric)
        assert (used_of(fabric), core.budget.written_bytes) == (used, spent_bytes), "no space was taken"
        assert core.counts().blocks_reinserted == 0
        await assert_got(fabric, worker, FIRST)
        await fabric.at_rest()


async def test_a_drive_that_does_not_answer_a_copy_holds_up_no_put() -> None:
    async with assembled(REINSERTING) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, FIRST)
        fabric.drive.holds_reads = True
        number = await put_until_reinsertion(fabric, worker, FIRST)
        await put_until_evicted(fabric, worker, number)
        assert fabric.shard.core.reinsertion.is_active
        fabric.drive.let_go()
        await until_copied(fabric)
        await fabric.at_rest()
