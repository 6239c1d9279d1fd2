"""Carrying blocks forward on a drive: what is read, checked, written and found again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.agent.assembly import (
    BLOCK_BYTES,
    SETTINGS,
    SLOT_BYTES,
    Assembly,
    HeldDrive,
    MemoryWorker,
    assembled,
    content_of,
    get_states,
    put_states,
    stop,
    until,
)

from ostraca_dpu_agent.owner.core import SegmentState
from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_fabric.outcome import BlockState, PutState

CARRYING = replace(SETTINGS, owner=OwnerSettings(carry_share=1.0))
FIRST = [0, 1, 2, 3]


async def put_until_carrying(fabric: Assembly, worker: MemoryWorker, first: int) -> int:
    """Put blocks until a segment is carried, or has been; returns the number to go on with."""
    number, counts = first, fabric.shard.core.counts
    while not (counts().segments[SegmentState.CARRYING] or counts().segments_evicted):
        assert put_states(await fabric.put(worker, [number])) == [PutState.COMMITTED]
        number += 1
    return number


async def assert_got(fabric: Assembly, worker: MemoryWorker, numbers: list[int]) -> None:
    """Get blocks, and compare every byte."""
    assert get_states(await fabric.get(worker, numbers)) == [BlockState.HIT] * len(numbers)
    for slot, number in enumerate(numbers):
        at = slot * SLOT_BYTES
        assert worker.peer.bytes[at : at + BLOCK_BYTES] == content_of(number)


async def test_blocks_that_were_got_are_copied_and_stay_the_same_bytes() -> None:
    async with assembled(CARRYING) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, FIRST)
        await assert_got(fabric, worker, FIRST[:2])
        await put_until_carrying(fabric, worker, 100)
        await until(lambda: fabric.shard.core.counts().segments_evicted == 1)
        counts = fabric.shard.core.counts()
        assert (counts.blocks_carried, counts.bytes_carried) == (2, 2 * SLOT_BYTES)
        await assert_got(fabric, worker, FIRST[:2])
        assert get_states(await fabric.get(worker, FIRST[2:])) == [BlockState.MISS] * 2
        await fabric.at_rest()


async def test_copies_are_found_by_the_next_owner() -> None:
    drive = HeldDrive()
    async with assembled(CARRYING, drive=drive) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, FIRST)
        await assert_got(fabric, worker, FIRST)
        await put_until_carrying(fabric, worker, 100)
        await until(lambda: fabric.shard.core.counts().segments_evicted == 1)
        assert await stop(fabric.agent)
        async with assembled(CARRYING, drive=drive) as later:
            await assert_got(later, later.worker(), FIRST)


async def test_a_damaged_block_is_not_carried_along() -> None:
    async with assembled(CARRYING) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, FIRST)
        await assert_got(fabric, worker, FIRST)
        first = fabric.shard.core.geometry.data_offset(int(np.argmax(fabric.shard.core.ring.generations > 0)))
        fabric.drive.flip_bit(first + 7)
        await put_until_carrying(fabric, worker, 100)
        await until(lambda: fabric.shard.core.counts().segments_evicted == 1)
        assert fabric.shard.core.counts().blocks_carried == len(FIRST) - 1
        assert get_states(await fabric.get(worker, FIRST)) == [BlockState.MISS, *[BlockState.HIT] * 3]
        await fabric.at_rest()


@pytest.mark.parametrize("broken", ["summary", "read", "write"])
async def test_what_can_not_be_copied_is_evicted_and_puts_go_on(broken: str) -> None:
    async with assembled(CARRYING) as fabric:
        worker, geometry = fabric.worker(), fabric.shard.core.geometry
        await fabric.put(worker, FIRST)
        await assert_got(fabric, worker, FIRST)
        fabric.drive.holds_reads = True
        number = await put_until_carrying(fabric, worker, 100)
        carrying = fabric.shard.core.ring.carrying
        assert carrying is not None
        match broken:
            case "summary":
                fabric.drive.fail_reads(geometry.summary_offset(carrying.number), geometry.summary_bytes)
            case "read":
                fabric.drive.fail_reads(geometry.data_offset(carrying.number), geometry.data_bytes)
            case _:
                current = fabric.shard.core.ring.current
                assert current is not None
                used = geometry.data_offset(current.number) + current.bytes_used
                fabric.drive.fail_writes(used, 4096)
        fabric.drive.let_go()
        await until(lambda: fabric.shard.core.counts().segments_evicted == 1)
        assert fabric.shard.core.counts().blocks_carried == 0
        fabric.drive.mend()
        await until(lambda: fabric.shard.core.counts().reservations == 0)
        assert put_states(await fabric.put(worker, [number])) == [PutState.COMMITTED]
        assert get_states(await fabric.get(worker, FIRST)) == [BlockState.MISS] * 4
        await fabric.at_rest()


async def test_a_drive_that_does_not_answer_a_copy_holds_up_no_put() -> None:
    async with assembled(CARRYING) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, FIRST)
        await assert_got(fabric, worker, FIRST)
        fabric.drive.holds_reads = True
        number = await put_until_carrying(fabric, worker, 100)
        for later in range(number, number + 60):
            assert put_states(await fabric.put(worker, [later])) == [PutState.COMMITTED]
        fabric.drive.let_go()
        await until(lambda: fabric.shard.core.counts().reservations == 0)
        await fabric.at_rest()
