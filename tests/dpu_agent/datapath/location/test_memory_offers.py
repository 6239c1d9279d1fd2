"""Gets of workers that read the agent's memory: the agent says where blocks are, and holds nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.dpu_agent.datapath.location.test_extents import offered, offers_to, stored, u32
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
    reasons_of,
    until,
    with_cache,
)

from ostraca_dpu_agent.settings import MIB
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.model.overrides import Overrides, Switch
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import MEMORY_NUMBER, ExtentsRead, GetExtents

HIT, MISS, LATE = BlockState.HIT, BlockState.MISS, BlockState.LATE
CACHED = with_cache(2 * MIB)


@asynccontextmanager
async def cached() -> AsyncIterator[tuple[Assembly, MemoryWorker]]:
    """Put blocks 0 to 5 into the DRAM cache of an agent, and return a worker that reads its memory."""
    async with assembled(CACHED) as fabric:
        await fabric.ready()
        await fabric.put(fabric.worker(), range(6))
        yield fabric, replace(fabric.worker(), reads_memory=True)


def in_memory(fabric: Assembly, offer: GetExtents) -> dict[int, bytes]:
    """Return what lies at the offered places of memory, by position."""
    positions, memory = codec.positions(offer.positions, 100).tolist(), fabric.context.staging.array
    numbers = codec.u32(offer.drives, len(positions))
    found = {}
    for row, offset in enumerate(codec.u64(offer.offsets, len(positions)).tolist()):
        if numbers[row] == MEMORY_NUMBER:
            found[positions[row]] = memory[offset : offset + BLOCK_BYTES].tobytes()
    return found


async def test_the_worker_is_told_where_cached_blocks_lie() -> None:
    async with cached() as (fabric, worker):
        done = await fabric.get(worker, [3, 99, 0, 5])
        assert get_states(done) == [HIT, MISS, HIT, HIT]
        offer = await offered(worker)
        assert in_memory(fabric, offer) == {0: content_of(3), 2: content_of(0), 3: content_of(5)}
        assert not any(worker.arena.bytes), "the agent moves nothing"
        counters = fabric.context.counters
        assert counters.get_hits_from_cache == 0, "not before the worker's report"
        worker.end_reads(offer.request, ExtentsRead(offer.request, u32([0, 2]), u32([3])))
        assert (counters.get_hits_direct, counters.get_hits_from_cache) == (2, 2)
        assert counters.snapshot().get_bytes == 2 * BLOCK_BYTES
        assert not fabric.context.staging.tenants.requests
        await fabric.at_rest()


async def test_nothing_is_held_for_the_worker() -> None:
    async with cached() as (fabric, worker):
        staging = fabric.context.staging
        await fabric.get(worker, range(6))
        assert not staging.holds(worker)
        staging._pool.drop(staging.cache.shrink(0))
        assert not staging.cache.used_bytes, "evicted while the worker may read"
        offer = await offered(worker)
        worker.end_reads(offer.request, ExtentsRead(offer.request, b"", offer.positions))
        await fabric.at_rest()


async def test_offered_blocks_count_as_used() -> None:
    async with assembled(with_cache(6 * SLOT_BYTES)) as fabric:
        await fabric.ready()
        await fabric.put(fabric.worker(), range(6))
        worker = replace(fabric.worker(), reads_memory=True)
        for number in (0, 1):
            await fabric.get(worker, [number])
        await fabric.put(fabric.worker(), range(10, 14))
        worker.said.clear()
        await fabric.get(worker, [0, 1, 2])
        assert len(in_memory(fabric, await offered(worker))) == 2


async def test_blocks_asked_for_again_are_delivered() -> None:
    async with cached() as (fabric, worker):
        message = msgspec.structs.replace(fabric.get_message([2, 5]), is_again=True)
        assert get_states(await fabric.data_path.get(worker, fabric.volume, message)) == [HIT] * 2
        assert not offers_to(worker)
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
        worker = replace(fabric.worker(), reads_memory=True)
        assert get_states(await fabric.get(worker, range(4))) == [HIT] * 4
        offer = await offered(worker)
        assert in_memory(fabric, offer) == {number: content_of(number) for number in range(4)}
        worker.end_reads(offer.request, ExtentsRead(offer.request, offer.positions, b""))
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
        offer = await offered(worker)
        assert in_memory(fabric, offer) == {1: content_of(10), 3: content_of(11)}
        positions = codec.positions(offer.positions, 4).tolist()
        assert sorted(positions) == ([0, 1, 2, 3] if reads_drives else [1, 3])
        assert any(worker.arena.bytes) != reads_drives
        worker.end_reads(offer.request, ExtentsRead(offer.request, offer.positions, b""))
        counters = fabric.context.counters
        assert counters.get_hits_from_cache == 2
        assert counters.get_hits_direct == len(positions)
        assert counters.hits_on[DRIVE] == 2
        assert fabric.shard.core.counts().pins == 0
        await fabric.at_rest()


async def test_blocks_in_memory_are_told_though_none_on_flash_is_found() -> None:
    async with stored(CACHED) as fabric:
        worker = replace(fabric.worker(), reads_memory=True, direct_drives={DRIVE: 3})
        assert get_states(await fabric.get(worker, [99, 1])) == [MISS, HIT]
        assert in_memory(fabric, await offered(worker)) == {1: content_of(1)}


async def test_a_get_without_a_report_ends_by_its_deadline() -> None:
    async with cached() as (fabric, worker):
        assert get_states(await fabric.get(worker, range(6), deadline_s=0.1)) == [HIT] * 6
        assert fabric.context.staging.tenants.requests == {TENANT: 1}
        await until(lambda: not fabric.context.staging.tenants.requests)
        late = fabric.context.counters.tallies["get"].of(LATE)
        assert (late, fabric.context.counters.get_hits_direct) == (6, 0)


@pytest.mark.parametrize("is_reported", [True, False])
async def test_reads_that_take_longer_than_computing_are_declined_once_measured(*, is_reported: bool) -> None:
    async with cached() as (fabric, worker):
        hasty = msgspec.structs.replace(fabric.get_message(range(6)), recompute_s=1e-9)
        assert get_states(await fabric.data_path.get(worker, fabric.volume, hasty)) == [HIT] * 6
        offer = await offered(worker)
        report = ExtentsRead(offer.request, offer.positions, b"") if is_reported else None
        worker.end_reads(offer.request, report)
        queue = fabric.context.estimator.worker_queue(worker)
        assert (queue.active_bytes, queue.waiting_bytes) == (0, 0)
        again = msgspec.structs.replace(hasty, request=hasty.request + 1)
        done = await fabric.data_path.get(worker, fabric.volume, again)
        assert get_states(done) == [BlockState.DECLINED if is_reported else HIT] * 6
        assert is_reported == (Reason.TOO_SLOW in reasons_of(done))
        worker.end_reads(again.request)
        await fabric.at_rest()


async def test_no_reads_are_left_to_a_worker_beyond_the_limit_of_requests() -> None:
    limited = replace(CACHED, flow=replace(CACHED.flow, requests_max=2))
    async with assembled(limited) as fabric:
        await fabric.ready()
        await fabric.put(fabric.worker(), range(6))
        worker = replace(fabric.worker(), reads_memory=True)
        tenants = fabric.context.staging.tenants
        tenants.add(tenants.requests, TENANT)
        assert get_states(await fabric.get(worker, range(6))) == [HIT] * 6
        assert not offers_to(worker)
        assert np.frombuffer(bytes(worker.arena.bytes[:BLOCK_BYTES]), np.uint8).any()
        tenants.remove(tenants.requests, TENANT)
        await fabric.at_rest()


async def test_a_volume_in_shadow_mode_leaves_no_reads_to_workers() -> None:
    async with cached() as (fabric, worker):
        switches = {(TENANT, "v"): Switch.SHADOW}
        fabric.membership.rule(Overrides(switches=switches, revision=1))
        assert set(get_states(await fabric.get(worker, range(6)))) == {BlockState.DECLINED}
        await fabric.at_rest()
        assert not worker.said
        assert fabric.context.counters.tallies["shadow_get"].of(HIT) == 6
