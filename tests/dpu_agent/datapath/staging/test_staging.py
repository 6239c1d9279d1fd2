from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.invariants import check_cache, check_slots
from tests.support.stalls import Stopwatch

from ostraca_dpu_agent.datapath.staging.cache import CacheOffer
from ostraca_dpu_agent.datapath.staging.leases import Purpose, StagingLease
from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_dpu_agent.settings import MemorySettings
from ostraca_fabric.model.outcome import Reason

MIB = 1 << 20
SETTINGS = MemorySettings(
    staging_bytes=8 * MIB,
    reserve_bytes=4 * MIB,
    cache_bytes=4 * MIB,
    chunk_bytes=2 * MIB,
    put_share=0.5,
    quarantine_share=0.25,
    worker_share=1.0,
)


@pytest.fixture
def staging() -> Staging:
    return Staging(SETTINGS)


def key(number: int) -> NDArray[np.uint8]:
    return np.frombuffer(number.to_bytes(16, "big"), np.uint8)[None]


def offered(number: int, length: int) -> CacheOffer:
    return CacheOffer(key(number), key(number), np.array([length], np.uint32), np.ones(1, np.bool_))


async def leased(staging: Staging, count: int, purpose: Purpose = Purpose.GET) -> StagingLease:
    lease = await staging.lease(count, MIB, purpose, holder=None, within_s=0)
    assert isinstance(lease, StagingLease)
    return lease


async def test_puts_leave_room_for_gets(staging: Staging) -> None:
    await leased(staging, 4, Purpose.PUT)
    assert await staging.lease(1, MIB, Purpose.PUT, holder=None, within_s=0) is Reason.DEADLINE
    await leased(staging, 4, Purpose.GET)
    assert await staging.lease(1, MIB, Purpose.GET, holder=None, within_s=0) is Reason.DEADLINE


async def test_what_never_fits_is_refused_at_once(staging: Staging) -> None:
    assert await staging.lease(9, MIB, Purpose.GET, holder=None, within_s=60) is Reason.OVERLOADED
    assert await staging.lease(1, 4 * MIB, Purpose.GET, holder=None, within_s=60) is Reason.OVERLOADED


async def test_a_lease_waits_for_another_to_end(staging: Staging) -> None:
    first = await leased(staging, 8)
    waiting = asyncio.create_task(staging.lease(2, MIB, Purpose.GET, holder=None, within_s=30))
    await asyncio.sleep(0)
    assert not waiting.done()
    staging.release(first)
    assert isinstance(await waiting, StagingLease)


async def test_waiters_are_served_in_order_and_none_slips_past(staging: Staging) -> None:
    first = await leased(staging, 8)
    large = asyncio.create_task(staging.lease(8, MIB, Purpose.GET, holder=None, within_s=30))
    await asyncio.sleep(0)
    small = asyncio.create_task(staging.lease(1, MIB, Purpose.GET, holder=None, within_s=30))
    await asyncio.sleep(0)
    staging.release(first)
    got = await large
    assert isinstance(got, StagingLease)
    assert not small.done()
    staging.release(got)
    assert isinstance(await small, StagingLease)


async def test_a_waiter_whose_deadline_passed_lets_the_next_go_on(staging: Staging) -> None:
    held = await leased(staging, 4)
    impatient = asyncio.create_task(staging.lease(8, MIB, Purpose.GET, holder=None, within_s=0.01))
    await asyncio.sleep(0)
    modest = asyncio.create_task(staging.lease(4, MIB, Purpose.GET, holder=None, within_s=30))
    assert await impatient is Reason.DEADLINE
    assert isinstance(await modest, StagingLease)
    staging.release(held)


async def test_memory_in_quarantine_comes_back_only_with_its_release(staging: Staging) -> None:
    lease = await leased(staging, 3)
    staging.quarantine(lease)
    assert staging.quarantined_bytes == 3 * MIB
    assert await staging.lease(1, MIB, Purpose.GET, holder=None, within_s=60) is Reason.QUARANTINED, (
        "above the limit of 2 MiB"
    )
    staging.release(lease)
    assert staging.quarantined_bytes == 0
    assert staging.held_bytes == 0
    await leased(staging, 8)


async def test_cached_blocks_make_room_for_staging(staging: Staging) -> None:
    for number in range(4):
        lease = await leased(staging, 1)
        staging.release(lease, keep=offered(number, MIB))
    assert len(staging.cache) == 4
    await leased(staging, 4)
    assert len(staging.cache) == 4, "the reserve is not the cache's"
    await leased(staging, 3)
    assert len(staging.cache) == 1, "and what staging needs beyond it, the cache lends"
    assert staging.cache.contains(key(3)).all()


async def test_a_cache_of_small_slots_gives_way_to_large_ones() -> None:
    staging = Staging(SETTINGS)
    for number in range(4 * MIB // 4096):
        lease = await staging.lease(1, 4096, Purpose.GET, holder=None, within_s=0)
        assert isinstance(lease, StagingLease)
        staging.release(lease, keep=offered(number, 4096))
    for _ in range(4):
        await staging.lease(1, 2 * MIB, Purpose.GET, holder=None, within_s=0)
    assert staging.held_bytes == 8 * MIB


SIZES = (4096, 28_672, 65_536, MIB)


async def scattered(staging: Staging, slot_bytes: int) -> list[StagingLease]:
    """Fill staging with slots of a size; leave one of them in each chunk, in quarantine."""
    per_chunk = SETTINGS.chunk_bytes // slot_bytes
    leases = []
    while True:
        lease = await staging.lease(1, slot_bytes, Purpose.GET, holder=None, within_s=0)
        if isinstance(lease, Reason):
            break
        leases.append(lease)
    assert len(leases) == 4 * per_chunk
    left = leases[per_chunk // 3 :: per_chunk]
    for lease in leases:
        if lease in left:
            staging.quarantine(lease)
        else:
            staging.release(lease)
    assert len(left) == 4
    return left


@pytest.mark.parametrize("slot_bytes", SIZES)
async def test_what_is_in_quarantine_in_every_chunk_keeps_no_size_out(slot_bytes: int) -> None:
    staging = Staging(replace(SETTINGS, quarantine_share=1.0))
    left = await scattered(staging, slot_bytes)
    for size in SIZES:
        lease = await staging.lease(4, size, Purpose.GET, holder="another", within_s=0)
        assert isinstance(lease, StagingLease), size
        staging.release(lease)
    for lease in left:
        staging.release(lease)
    check_slots(staging._pool)
    assert staging._pool.free_bytes == 8 * MIB


async def cached(staging: Staging, numbers: range, slot_bytes: int) -> None:
    for number in numbers:
        lease = await staging.lease(1, slot_bytes, Purpose.GET, holder=None, within_s=0)
        assert isinstance(lease, StagingLease)
        staging.release(lease, keep=offered(number, slot_bytes))


async def test_the_cache_keeps_what_would_go_for_nothing() -> None:
    staging = Staging(replace(SETTINGS, quarantine_share=1.0))
    await scattered(staging, MIB)
    await cached(staging, range(64), 65_536)
    assert await staging.lease(1, 2 * MIB, Purpose.GET, holder="another", within_s=0) is Reason.QUARANTINED
    assert len(staging.cache) == 64, "quarantine is in the way"
    held = await staging.lease(3, MIB, Purpose.GET, holder="another", within_s=0)
    assert isinstance(held, StagingLease)
    assert len(staging.cache) == 16
    assert await staging.lease(2, MIB, Purpose.GET, holder="another", within_s=0) is Reason.DEADLINE
    assert len(staging.cache) == 16, "and then so are other leases"


async def test_a_lease_that_quarantine_keeps_out_is_refused_at_once_and_those_behind_it_go_on() -> None:
    staging = Staging(replace(SETTINGS, quarantine_share=1.0))
    left = await scattered(staging, 4096)
    all_else = await staging.lease(7, MIB, Purpose.GET, holder=None, within_s=0)
    assert all_else is Reason.QUARANTINED, "of eight places four are pinned"
    watch = Stopwatch()
    assert await staging.lease(1, 2 * MIB, Purpose.GET, holder=None, within_s=60) is Reason.QUARANTINED
    assert watch.took_s < 1.0
    for lease in left:
        staging.release(lease)
    await leased(staging, 4)


async def test_waiters_are_refused_when_quarantine_comes_to_keep_them_out() -> None:
    staging = Staging(replace(SETTINGS, quarantine_share=1.0))
    held = [await leased(staging, 2) for _ in range(4)]
    large = asyncio.create_task(staging.lease(4, 2 * MIB, Purpose.GET, holder="large", within_s=60))
    await asyncio.sleep(0)
    small = asyncio.create_task(staging.lease(1, MIB, Purpose.GET, holder="small", within_s=60))
    await asyncio.sleep(0)
    staging.quarantine(held[0])
    assert await large is Reason.QUARANTINED
    assert not small.done()
    staging.release(held[1])
    assert isinstance(await small, StagingLease)


async def test_cached_blocks_in_quarantine_hold_their_places_until_the_last_is_released() -> None:
    staging = Staging(replace(SETTINGS, quarantine_share=1.0))
    await cached(staging, range(4), MIB)
    _, rows = staging.cache.find(np.concatenate([key(n) for n in range(4)]), np.full(4, MIB, np.uint32))
    readers = []
    for chosen in (rows[:3], rows[1:]):
        reader = await staging.lease(len(chosen), MIB, Purpose.CACHED, holder=None, within_s=0)
        assert isinstance(reader, StagingLease)
        staging.hold(reader, chosen)
        staging.quarantine(reader)
        readers.append(reader)
    assert staging._pool.taken_bytes == 4 * MIB
    staging.release(readers[0])
    assert staging._pool.taken_bytes == 3 * MIB
    assert await staging.lease(4, 2 * MIB, Purpose.GET, holder="another", within_s=0) is Reason.DEADLINE
    assert len(staging.cache) == 4, "to drop one would not have helped"
    staging.release(readers[1])
    assert staging._pool.kept_bytes == 4 * MIB
    await leased(staging, 8)
    check_slots(staging._pool)
    check_cache(staging.cache)
