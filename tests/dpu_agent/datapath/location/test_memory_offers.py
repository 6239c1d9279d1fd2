"""Gets of workers that read the agent's memory: the agent says where blocks are, and holds nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

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
from tests.support.invariants import evict_all

from ostraca_dpu_agent.datapath.requests.worker import WorkerConnection
from ostraca_dpu_agent.settings import MIB
from ostraca_fabric.errors import RefusedError
from ostraca_fabric.model.outcome import Ack, BlockState, PutState
from ostraca_fabric.model.overrides import Overrides, Switch, TenantOverride
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import ExtentsRead, Get, GetDone, GetProgress

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
        assert (counters.get_hits_direct, counters.snapshot().get_hits_from_cache) == (3, 3)
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
        staging._pool.drop(evict_all(staging.cache))
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
        assert (counters.get_hits_direct, counters.snapshot().get_hits_from_staging) == (4, 4)
        fabric.drive.let_go()
        await fabric.at_rest()


@pytest.mark.parametrize("reads_drives", [False, True])
async def test_blocks_on_flash_are_read_by_whom_may_read_the_drive(*, reads_drives: bool) -> None:
    async with stored(CACHED) as fabric:
        staging = fabric.context.staging
        staging._pool.drop(evict_all(staging.cache))
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
        assert counters.snapshot().get_hits_from_cache == 2
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


# --- Gets of blocks in memory alone -------------------------------------------------------------------------


@dataclass(eq=False)
class ArenalessWorker(MemoryWorker):
    """A worker at a connection that has no arena."""

    def __getattribute__(self, name: str) -> Any:
        if name == "arena":
            raise RefusedError("no_arena", "there is none")
        return super().__getattribute__(name)


def arenaless(fabric: Assembly, *, reads_memory: bool = True) -> ArenalessWorker:
    return ArenalessWorker(fabric.worker().arena, reads_memory=reads_memory)


def of_memory(fabric: Assembly, numbers: Sequence[int]) -> Get:
    """Return a get that wants places of all blocks, and has no slots."""
    message = fabric.get_message(numbers)
    return msgspec.structs.replace(message, slots=bytes(len(message.slots)), in_memory=True)


async def test_a_get_of_memory_needs_no_arena() -> None:
    async with cached() as (fabric, _):
        worker = arenaless(fabric)
        done = await fabric.data_path.get(worker, fabric.volume, of_memory(fabric, [3, 0, 5]))
        assert get_states(done) == [HIT] * 3
        assert in_memory(fabric, done) == {0: content_of(3), 1: content_of(0), 2: content_of(5)}
        assert not worker.said
        assert not len(fabric.context.tasks)
        counters = fabric.context.counters
        assert (counters.get_hits_direct, counters.tallies["get"].of(HIT)) == (3, 3)
        with pytest.raises(RefusedError, match="there is none"):
            await fabric.data_path.get(worker, fabric.volume, fabric.get_message([3]))
        await fabric.at_rest()


async def test_a_get_of_memory_tells_of_staged_blocks_too() -> None:
    async with assembled() as fabric:
        await fabric.ready()
        fabric.drive.holds_writes = True
        await fabric.put(fabric.worker(), range(4), ack=Ack.STAGED)
        done = await fabric.data_path.get(arenaless(fabric), fabric.volume, of_memory(fabric, range(4)))
        assert in_memory(fabric, done) == {number: content_of(number) for number in range(4)}
        fabric.drive.let_go()
        await fabric.at_rest()


async def refused(fabric: Assembly, worker: WorkerConnection, message: Get) -> None:
    """Check that a get is refused, and that nothing is said, counted or held for it."""
    with pytest.raises(RefusedError) as failed:
        await fabric.data_path.get(worker, fabric.volume, message)
    assert failed.value.code == "not_in_memory"
    assert not len(fabric.context.tasks)
    counters = fabric.context.counters
    assert (counters.get_hits_direct, counters.snapshot().get_hits_from_cache) == (0, 0)
    assert not counters.tallies["get"].snapshot().blocks
    await fabric.at_rest()


async def test_a_get_of_memory_is_refused_unless_all_blocks_are_there() -> None:
    async with cached() as (fabric, _):
        worker = arenaless(fabric)
        await refused(fabric, worker, of_memory(fabric, [3, 99, 0]))
        assert not worker.said
        assert get_states(await fabric.get(fabric.worker(), [3, 99, 0])) == [HIT, MISS, HIT]


async def test_a_get_of_memory_is_refused_to_whom_reads_none_or_has_failed_to() -> None:
    async with cached() as (fabric, _):
        await refused(fabric, arenaless(fabric, reads_memory=False), of_memory(fabric, [3]))
        again = msgspec.structs.replace(of_memory(fabric, [3]), is_again=True)
        await refused(fabric, arenaless(fabric), again)


@pytest.mark.parametrize("switch", [Switch.SHADOW, Switch.OFF])
async def test_a_get_of_memory_is_refused_where_the_volume_is_not_on(switch: Switch) -> None:
    async with cached() as (fabric, _):
        fabric.membership.rule(Overrides(switches={(TENANT, "v"): switch}, revision=1))
        await refused(fabric, arenaless(fabric), of_memory(fabric, range(6)))
        assert fabric.context.counters.tallies["shadow_get"].of(HIT) == 0


async def test_a_refused_get_of_memory_takes_none_of_the_tenants_rate() -> None:
    async with cached() as (fabric, _):
        limited = Overrides(
            tenants={TENANT: TenantOverride(1, "t", agent_bytes_per_s=BLOCK_BYTES)}, revision=1
        )
        fabric.membership.rule(limited)
        for _ in range(10):
            await refused(fabric, arenaless(fabric), of_memory(fabric, [3, 99]))
        assert get_states(await fabric.get(fabric.worker(), [3])) == [HIT]
