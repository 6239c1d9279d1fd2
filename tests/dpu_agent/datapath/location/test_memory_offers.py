"""Gets of workers that read the agent's memory: the agent says where blocks are, and holds nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
from tests.dpu_agent.datapath.location.test_extents import offered, stored
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    DRIVE,
    SLOT_BYTES,
    TENANT,
    Assembly,
    MemoryWorker,
    assembled,
    content_of,
    get_states,
    put_states,
    with_cache,
)

from ostraca_dpu_agent.settings import MIB
from ostraca_fabric.model.outcome import Ack, BlockState, PutState
from ostraca_fabric.model.overrides import Overrides, Switch
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import ExtentsRead, GetDone, GetProgress

HIT, MISS = BlockState.HIT, BlockState.MISS
CACHED = with_cache(2 * MIB)


@asynccontextmanager
async def cached() -> AsyncIterator[tuple[Assembly, MemoryWorker]]:
    """Put blocks 0 to 5 into the DRAM cache of an agent, and return a worker that reads its memory."""
    async with assembled(CACHED) as fabric:
        await fabric.ready()
        await fabric.put(fabric.worker(), range(6))
        yield fabric, replace(fabric.worker(), reads_memory=True)


def in_memory(fabric: Assembly, told: GetProgress | GetDone) -> dict[int, bytes]:
    """Return what lies at the places in memory that a worker was told, by position."""
    positions, memory = codec.positions(told.positions, 100).tolist(), fabric.context.staging.array
    offsets = codec.u64(told.places, len(positions)).tolist()
    return {
        position: memory[offset : offset + BLOCK_BYTES].tobytes()
        for position, offset in zip(positions, offsets, strict=True)
    }


def told_aside(worker: MemoryWorker) -> GetProgress:
    """Return the only message before the answer with places in memory."""
    (told,) = (each for each in worker.said if isinstance(each, GetProgress) and each.places)
    return told


async def test_the_answer_says_where_cached_blocks_lie() -> None:
    async with cached() as (fabric, worker):
        done = await fabric.get(worker, [3, 0, 5])
        assert get_states(done) == [HIT] * 3
        assert in_memory(fabric, done) == {0: content_of(3), 1: content_of(0), 2: content_of(5)}
        assert not any(worker.arena.bytes), "the agent moves nothing"
        assert not worker.said
        assert not len(fabric.context.tasks), "and needs no task"
        counters = fabric.context.counters
        assert (counters.get_hits_direct, counters.get_hits_from_cache) == (3, 3)
        assert counters.snapshot().get_bytes == 3 * BLOCK_BYTES
        await fabric.at_rest()


async def test_places_in_memory_are_told_before_other_blocks_are_looked_for() -> None:
    async with cached() as (fabric, worker):
        done = await fabric.get(worker, [3, 99, 0])
        assert get_states(done) == [HIT, MISS, HIT]
        assert in_memory(fabric, told_aside(worker)) == {0: content_of(3), 2: content_of(0)}
        assert (done.positions, done.places) == (b"", b"")
        await fabric.at_rest()


async def test_nothing_is_held_for_the_worker() -> None:
    async with cached() as (fabric, worker):
        staging = fabric.context.staging
        await fabric.get(worker, range(6))
        assert not staging.holds(worker)
        staging._pool.drop(staging.cache.shrink(0))
        assert not staging.cache.used_bytes, "evicted while the worker may read"
        await fabric.at_rest()


async def test_told_blocks_count_as_used() -> None:
    async with assembled(with_cache(6 * SLOT_BYTES)) as fabric:
        await fabric.ready()
        await fabric.put(fabric.worker(), range(6))
        worker = replace(fabric.worker(), reads_memory=True)
        for number in (0, 1):
            await fabric.get(worker, [number])
        await fabric.put(fabric.worker(), range(10, 14))
        await fabric.get(worker, [0, 1, 2])
        assert len(in_memory(fabric, told_aside(worker))) == 2


async def test_blocks_asked_for_again_are_delivered() -> None:
    async with cached() as (fabric, worker):
        message = msgspec.structs.replace(fabric.get_message([2, 5]), is_again=True)
        done = await fabric.data_path.get(worker, fabric.volume, message)
        assert get_states(done) == [HIT] * 2
        assert not done.places
        for row, number in enumerate([2, 5]):
            at = row * SLOT_BYTES
            assert worker.arena.bytes[at : at + BLOCK_BYTES] == content_of(number)
        await fabric.at_rest()


async def test_staged_blocks_are_told_while_they_wait_for_flash() -> None:
    async with assembled() as fabric:
        await fabric.ready()
        fabric.drive.holds_writes = True
        put = await fabric.put(fabric.worker(), range(4), ack=Ack.STAGED)
        assert put_states(put) == [PutState.STAGED] * 4
        done = await fabric.get(replace(fabric.worker(), reads_memory=True), range(4))
        assert get_states(done) == [HIT] * 4
        assert in_memory(fabric, done) == {number: content_of(number) for number in range(4)}
        counters = fabric.context.counters
        assert (counters.get_hits_direct, counters.get_hits_from_staging) == (4, 4)
        fabric.drive.let_go()
        await fabric.at_rest()


@pytest.mark.parametrize("reads_drives", [False, True])
async def test_blocks_on_flash_are_read_by_whom_may_read_the_drive(*, reads_drives: bool) -> None:
    async with stored(CACHED) as fabric:
        staging = fabric.context.staging
        staging._pool.drop(staging.cache.shrink(0))
        await fabric.put(fabric.worker(), range(10, 14))
        drives = {DRIVE: 3} if reads_drives else {}
        worker = replace(fabric.worker(), reads_memory=True, direct_drives=drives)
        assert get_states(await fabric.get(worker, [0, 10, 1, 11])) == [HIT] * 4
        assert in_memory(fabric, told_aside(worker)) == {1: content_of(10), 3: content_of(11)}
        assert any(worker.arena.bytes) != reads_drives
        if reads_drives:
            offer = await offered(worker)
            assert sorted(codec.positions(offer.positions, 4).tolist()) == [0, 2]
            worker.end_reads(offer.request, ExtentsRead(offer.request, offer.positions, b""))
        counters = fabric.context.counters
        assert counters.get_hits_from_cache == 2
        assert counters.get_hits_direct == (4 if reads_drives else 2)
        assert counters.hits_on[DRIVE] == 2
        assert counters.tallies["get"].of(HIT) == 4
        assert fabric.shard.core.counts().pins == 0
        await fabric.at_rest()


async def test_places_are_told_however_fast_computing_is() -> None:
    async with cached() as (fabric, worker):
        hasty = msgspec.structs.replace(fabric.get_message(range(6)), recompute_s=1e-9)
        deliverer = fabric.worker()
        await fabric.get(deliverer, range(6))  # measured, and slower than that
        assert set(get_states(await fabric.data_path.get(deliverer, fabric.volume, hasty))) == {
            BlockState.DECLINED
        }
        fast = msgspec.structs.replace(hasty, request=hasty.request + 1)
        assert get_states(await fabric.data_path.get(worker, fabric.volume, fast)) == [HIT] * 6
        await fabric.at_rest()


async def test_a_volume_in_shadow_mode_tells_no_places() -> None:
    async with cached() as (fabric, worker):
        switches = {(TENANT, "v"): Switch.SHADOW}
        fabric.membership.rule(Overrides(switches=switches, revision=1))
        done = await fabric.get(worker, range(6))
        assert set(get_states(done)) == {BlockState.DECLINED}
        await fabric.at_rest()
        assert (worker.said, done.places) == ([], b"")
        assert fabric.context.counters.tallies["shadow_get"].of(HIT) == 6
