"""Staging between tenants: what each may hold, whose turn it is, and whose cached blocks make room."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ostraca_dpu_agent.datapath.staging.cache import CacheOffer
from ostraca_dpu_agent.datapath.staging.leases import Purpose, StagingLease
from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_dpu_agent.settings import MemorySettings
from ostraca_dpu_agent.tenants import Tenants
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.outcome import Reason

UNIT = 1 << 16
A, B, C = (TenantId(name) for name in "abc")
SETTINGS = MemorySettings(
    staging_bytes=16 * UNIT,
    reserve_bytes=16 * UNIT,
    cache_bytes=16 * UNIT,
    chunk_bytes=4 * UNIT,
    put_share=0.5,
    quarantine_share=0.5,
    worker_share=1.0,
    drive_share=1.0,
)


def staging_of(*members: TenantId, memory: MemorySettings = SETTINGS) -> Staging:
    tenants = Tenants()
    for tenant in members:
        tenants.add(tenants.connections, tenant)
    return Staging(memory, tenants)


async def ask(
    staging: Staging,
    tenant: TenantId,
    count: int = 1,
    purpose: Purpose = Purpose.GET,
    *,
    within_s: float = 0.0,
    holder: str = "",
    drive: str | None = None,
) -> StagingLease | Reason:
    holder = holder or f"worker of {tenant}"
    return await staging.lease(
        count, UNIT, purpose, holder=holder, tenant=tenant, within_s=within_s, drive=drive
    )


async def leased(
    staging: Staging, tenant: TenantId, count: int = 1, purpose: Purpose = Purpose.GET, **how: str
) -> StagingLease:
    lease = await ask(staging, tenant, count, purpose, **how)  # type: ignore[arg-type]  # names only
    assert isinstance(lease, StagingLease)
    return lease


async def flood(staging: Staging, tenant: TenantId, purpose: Purpose = Purpose.GET) -> list[StagingLease]:
    """Take slot by slot all that can be had, for four workers."""
    leases: list[StagingLease] = []
    while isinstance(
        lease := await ask(staging, tenant, purpose=purpose, holder=f"{tenant}{len(leases) % 4}"),
        StagingLease,
    ):
        leases.append(lease)
    return leases


async def waiting(
    staging: Staging, tenant: TenantId, count: int = 1, purpose: Purpose = Purpose.GET, **how: str
) -> asyncio.Task[StagingLease | Reason]:
    task = asyncio.create_task(ask(staging, tenant, count, purpose, within_s=30, **how))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def served(*tasks: asyncio.Task[StagingLease | Reason]) -> list[bool]:
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.done() and isinstance(task.result(), StagingLease) for task in tasks]


async def test_a_flood_leaves_each_tenant_its_part() -> None:
    staging = staging_of(A, B)
    assert len(await flood(staging, A)) == 12
    assert len(await flood(staging, B)) == 4


async def test_alone_a_tenant_has_it_all() -> None:
    staging = staging_of(A)
    assert len(await flood(staging, A)) == 16


async def test_a_tenant_has_it_all_again_once_the_other_has_gone() -> None:
    staging = staging_of(A, B)
    leases = await flood(staging, A)
    more = await waiting(staging, A, 4)
    staging.tenants.remove(staging.tenants.connections, B)
    assert await served(more) == [True]
    assert len(leases) == 12


async def test_puts_of_a_flood_leave_room_for_those_of_others() -> None:
    staging = staging_of(A, B)
    assert len(await flood(staging, A, Purpose.PUT)) == 6
    assert len(await flood(staging, B, Purpose.PUT)) == 2
    assert len(await flood(staging, A)) == 6, "12 of the slots in all"
    assert len(await flood(staging, B)) == 2


async def test_the_right_to_hold_cached_blocks_is_shared_as_slots_are() -> None:
    staging = staging_of(A, B)
    assert len(await flood(staging, A)) == 12
    assert len(await flood(staging, A, Purpose.CACHED)) == 12
    assert len(await flood(staging, B, Purpose.CACHED)) == 4


async def test_what_comes_free_is_for_the_tenant_that_holds_least() -> None:
    staging = staging_of(A, B)
    leases = await flood(staging, A)
    floods = [await waiting(staging, A, holder=f"a{number}") for number in range(20)]
    await flood(staging, B)
    late = [await waiting(staging, B) for _ in range(2)]
    for lease in leases[:2]:
        staging.release(lease)
    assert await served(*late, *floods[:2]) == [True, True, False, False]
    for lease in leases[2:6]:
        staging.release(lease)
    assert sum(await served(*floods)) == 4
    assert await served(*floods[:4]) == [True] * 4, "within a tenant in order of arrival"


async def test_nobody_slips_past_the_tenant_whose_turn_it_is() -> None:
    """What is large waits until so much is free, and small ones of who holds more don't take it meanwhile."""
    staging = staging_of(A, B, C)
    leases = await flood(staging, A)
    assert len(leases) == 16 * 4 // 6
    large = await waiting(staging, B, 6)
    small = await waiting(staging, A, holder="another")
    for lease in leases[:3]:
        staging.release(lease)
        assert isinstance(await ask(staging, A, holder="a third"), Reason)
    assert await served(large, small) == [True, False]
    assert len(await flood(staging, C)) == 3


async def test_what_is_guaranteed_is_taken_past_one_that_waits_for_more() -> None:
    staging = staging_of(A, B, C)
    await flood(staging, A)
    large = await waiting(staging, B, 8)
    assert isinstance(await ask(staging, C, 2), StagingLease)
    assert not large.done()


async def test_a_drive_that_is_busy_with_one_tenant_is_next_for_the_other() -> None:
    staging = staging_of(A, B, memory=replace(SETTINGS, drive_share=0.25))
    leases = [await leased(staging, A, drive="d") for _ in range(4)]
    other = await waiting(staging, B, 2, drive="d")
    for lease in leases:
        small = await waiting(staging, A, drive="d", holder="another") if not other.done() else None
        staging.end_drive_io(lease)
        await served()
        if small is not None and not other.done():
            assert not small.done(), "a small one does not slip past"
    assert await served(other) == [True]


async def test_transfers_of_a_tenant_that_never_end_keep_others_from_nothing_of_theirs() -> None:
    staging = staging_of(A, B)
    for lease in await flood(staging, A):
        staging.quarantine(lease)
    assert staging.quarantined_bytes == 12 * UNIT
    assert await ask(staging, A) is Reason.QUARANTINED
    assert isinstance(await ask(staging, B, 4), StagingLease)
    assert await ask(staging, B) is Reason.QUARANTINED


async def test_what_a_drive_was_given_up_with_counts_for_nobody() -> None:
    staging = staging_of(A, B)
    given_up = [await leased(staging, A, drive="d") for _ in range(6)]
    for lease in given_up:
        staging.abandon_to_drive(lease)
    assert staging.slots_of == {"d": 6 * UNIT}
    leases = await flood(staging, A)
    assert len(leases) == 6, "16 less those of the drive, and less what is b's"
    leases += await flood(staging, B)
    assert len(leases) == 6 + 4
    for lease in given_up + leases:
        staging.release(lease)
    assert not any(staging._held.values())


async def cached(staging: Staging, tenant: TenantId, numbers: range) -> None:
    for number in numbers:
        lease = await leased(staging, tenant)
        column = np.frombuffer(number.to_bytes(16, "big"), np.uint8)[None]
        offer = CacheOffer(column, column, np.array([UNIT], np.uint32), np.ones(1, np.bool_), tenant=tenant)
        staging.release(lease, keep=offer)


async def test_leases_of_a_flood_take_memory_from_its_own_blocks_and_then_wait() -> None:
    staging = staging_of(A, B, memory=replace(SETTINGS, reserve_bytes=0))
    await cached(staging, A, range(8))
    await cached(staging, B, range(100, 108))
    leases = await flood(staging, A)
    assert staging.cache.bytes_of == {B: 8 * UNIT}
    assert len(leases) == 8
    more = await waiting(staging, A)
    staging.release(leases[0])
    assert await served(more) == [True]
    assert isinstance(await ask(staging, B, 1), StagingLease), "while b's own blocks make room for b"
    assert staging.cache.bytes_of == {B: 7 * UNIT}


async def test_who_has_less_than_an_equal_part_of_memory_gets_it_from_blocks_of_one_who_has_more() -> None:
    staging = staging_of(A, B, memory=replace(SETTINGS, reserve_bytes=0))
    await cached(staging, A, range(16))
    assert len(await flood(staging, B)) == 8
    assert staging.cache.bytes_of == {A: 8 * UNIT}


steps = st.lists(
    st.tuples(
        st.sampled_from([A, A, A, B, C]),
        st.integers(1, 4),
        st.sampled_from(list(Purpose)),
        st.sampled_from(["ask", "ask", "release", "quarantine"]),
    ),
    max_size=60,
)


@given(steps)
@settings(deadline=None, max_examples=60)
def test_what_is_guaranteed_is_given_at_once_whatever_others_hold(
    steps: list[tuple[TenantId, int, Purpose, str]],
) -> None:
    async def run() -> None:
        staging, held = staging_of(A, B, C), list[StagingLease]()
        for tenant, count, purpose, step in steps:
            if step == "ask":
                before = {each: staging._held[each][tenant] for each in Purpose}
                lease = await ask(staging, tenant, count, purpose)
                slots = before[Purpose.GET] + before[Purpose.PUT]
                own = before[purpose] if purpose is Purpose.CACHED else slots
                is_within = own + count * UNIT <= 16 * UNIT / 6
                if purpose is Purpose.PUT:
                    is_within = is_within and before[purpose] + count * UNIT <= 8 * UNIT / 6
                stuck = any(each.holder == f"worker of {tenant}" for each in staging._quarantined)
                assert isinstance(lease, StagingLease) or not is_within or stuck
                held += [lease] if isinstance(lease, StagingLease) else []
            elif held and step == "release":
                staging.release(held.pop(count % len(held)))
            elif held:
                staging.quarantine(held[count % len(held)])
        for lease in held:
            staging.release(lease)
        assert not staging.slots_of
        assert not any(staging._queues.values())

    asyncio.run(run())
