"""Gets of workers that read drives themselves: the agent locates, pins, and answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    DRIVE,
    FAR_S,
    SETTINGS,
    SLOT_BYTES,
    TENANT,
    Assembly,
    HeldDrive,
    MemoryWorker,
    assembled,
    chain_of,
    content_of,
    get_states,
    reasons_of,
    unsettled_of,
    until,
    with_cache,
)
from tests.support.invariants import evict_all

from ostraca_dpu_agent.datapath.location.extents import OfferedBlocks
from ostraca_dpu_agent.settings import MIB, AgentSettings
from ostraca_fabric.errors import MalformedError
from ostraca_fabric.model.ids import AgentId, DriveId, TenantId
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.model.overrides import LiveSettings, Overrides, Switch
from ostraca_fabric.tables.digests import derive_keys
from ostraca_fabric.telemetry.requests import labelled
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import (
    AgentRequest,
    AnswerToAgent,
    ExtentsRead,
    GetExtents,
)

HIT, MISS, LATE = BlockState.HIT, BlockState.MISS, BlockState.LATE
NUMBERS = range(6)
OTHER = DriveId("elsewhere/d")


def u32(positions: Iterable[int]) -> bytes:
    return np.array(list(positions), codec.U32).tobytes()


@asynccontextmanager
async def stored(settings: AgentSettings = SETTINGS, tenant: TenantId = TENANT) -> AsyncIterator[Assembly]:
    """Put blocks in a fabric whose operator lets the workers of *tenant* read drives."""
    async with assembled(settings) as fabric:
        await fabric.ready()
        await fabric.put(fabric.worker(), NUMBERS)
        fabric.membership.rule(Overrides(live=LiveSettings(direct_reads_tenant=tenant), revision=1))
        yield fabric


def with_drive(fabric: Assembly, drive: DriveId = DRIVE, number: int = 3) -> MemoryWorker:
    """Return a worker that has opened a drive."""
    return replace(fabric.worker(), direct_drives={drive: number})


def offers_to(worker: MemoryWorker) -> list[GetExtents]:
    return [message for message in worker.said if isinstance(message, GetExtents)]


async def offered(worker: MemoryWorker) -> GetExtents:
    await until(lambda: bool(offers_to(worker)))
    (offer,) = offers_to(worker)
    return offer


def on_flash(drive: HeldDrive, offset: int) -> bytes:
    return bytes(drive.bytes[offset : offset + BLOCK_BYTES])


def pins(fabric: Assembly) -> int:
    return fabric.shard.core.counts().pins


def reads_of(fabric: Assembly) -> tuple[int, int]:
    """Return the recorded gets of blocks, and the hits among them that were read directly."""
    counters = fabric.context.counters
    blocks = sum(each.blocks for each in counters.tallies["get"].snapshot().blocks)
    return blocks, counters.get_hits_direct


async def test_the_worker_reads_what_the_agent_located_and_pinned() -> None:
    async with stored() as fabric:
        worker = with_drive(fabric)
        fabric.drive.holds_reads = True
        done = await fabric.get(worker, [*NUMBERS, 99])
        assert get_states(done) == [HIT] * 6 + [MISS]
        offer = await offered(worker)
        positions = codec.positions(offer.positions, 7).tolist()
        assert sorted(positions) == list(NUMBERS)
        assert codec.u32(offer.drives, 6).tolist() == [3] * 6
        for position, offset in zip(positions, codec.u64(offer.offsets, 6).tolist(), strict=True):
            assert on_flash(fabric.drive, offset) == content_of(position)
        assert (pins(fabric), reads_of(fabric)) == (1, (1, 0)), "and the answer does not end the pin"
        assert fabric.context.staging.tenants.requests == {TENANT: 1}
        worker.end_reads(offer.request, ExtentsRead(offer.request, u32(NUMBERS), b""))
        assert (pins(fabric), reads_of(fabric)) == (0, (7, 6))
        assert not fabric.context.staging.tenants.requests
        assert not fabric.drive.held
        fabric.drive.let_go()
        assert not any(worker.arena.bytes)
        counters = fabric.context.counters
        assert (counters.snapshot().get_hits_direct, counters.hits_on[DRIVE]) == (6, 6)
        assert counters.snapshot().get_bytes == 6 * BLOCK_BYTES
        await fabric.at_rest()


async def test_the_agent_delivers_blocks_that_the_worker_asks_for_again() -> None:
    async with stored() as fabric:
        worker = with_drive(fabric)
        await fabric.get(worker, NUMBERS)
        offer = await offered(worker)
        worker.end_reads(offer.request, ExtentsRead(offer.request, u32([0, 1, 3]), u32([2, 5])))
        assert reads_of(fabric) == (4, 3)
        counted = fabric.context.counters.snapshot()
        assert (counted.get_hits, counted.get_misses) == (3, 1), "the lost block is a miss"
        message = msgspec.structs.replace(fabric.get_message([2, 5]), is_again=True)
        assert get_states(await fabric.data_path.get(worker, fabric.volume, message)) == [HIT] * 2
        for row, number in enumerate([2, 5]):
            found = bytes(worker.arena.bytes[row * SLOT_BYTES : row * SLOT_BYTES + BLOCK_BYTES])
            assert found == content_of(number)
        assert (len(offers_to(worker)), reads_of(fabric)) == (1, (6, 3))
        await fabric.at_rest()


async def test_blocks_of_the_cache_cross_as_always() -> None:
    async with stored(with_cache(2 * MIB)) as fabric:
        worker = with_drive(fabric)
        assert get_states(await fabric.get(worker, NUMBERS)) == [HIT] * 6
        assert not offers_to(worker)
        assert fabric.context.counters.snapshot().get_hits_from_cache == 6


@pytest.mark.parametrize(
    ("tenant", "drive"), [(TenantId("other"), DRIVE), (TenantId(""), DRIVE), (TENANT, OTHER)]
)
async def test_without_permission_or_the_drive_the_agent_delivers_all(
    tenant: TenantId, drive: DriveId
) -> None:
    async with stored(tenant=tenant) as fabric:
        worker = with_drive(fabric, drive)
        assert get_states(await fabric.get(worker, NUMBERS)) == [HIT] * 6
        assert not offers_to(worker)
        await fabric.at_rest()


async def test_a_second_tenant_ends_direct_reads_at_once() -> None:
    async with stored() as fabric:
        record = replace(fabric.volume.record, tenant=TenantId("second"), name="another")
        fabric.membership.store.create_volume(record)
        worker = with_drive(fabric)
        assert get_states(await fabric.get(worker, NUMBERS)) == [HIT] * 6
        assert not offers_to(worker)


@pytest.mark.parametrize("reason", [Reason.DEADLINE, Reason.CANCELLED])
async def test_pins_end_with_the_get_of_a_worker_that_reports_nothing(reason: Reason) -> None:
    async with stored() as fabric:
        worker = with_drive(fabric)
        with labelled("worker/7"):
            done = await fabric.get(worker, NUMBERS, deadline_s=0.2 if reason is Reason.DEADLINE else FAR_S)
        assert get_states(done) == [HIT] * 6
        assert pins(fabric) == 1
        if reason is Reason.CANCELLED:
            worker.end_reads(done.request)
        await until(lambda: pins(fabric) == 0)
        key = derive_keys(fabric.volume.secret, chain_of([0]))[0].tobytes()
        event = fabric.context.events.of(key)[-1]
        assert (event.kind, event.state, event.reason) == ("GOT", "LATE", reason.name)
        assert event.label == "worker/7", "the label of the get"
        assert reads_of(fabric) == (6, 0)
        await fabric.at_rest()


async def test_a_get_that_is_cancelled_while_the_agent_delivers_ends_the_workers_reads_too() -> None:
    async with stored(with_cache(2 * MIB)) as fabric:
        staging = fabric.context.staging
        staging._pool.drop(evict_all(staging.cache))
        await fabric.put(fabric.worker(), [10])
        worker = with_drive(fabric)
        worker.arena.is_held = True
        getting = asyncio.create_task(fabric.get(worker, [10, *NUMBERS]))
        offer = await offered(worker)
        worker.stopped(offer.request).set_result(None)
        done = await getting
        assert (get_states(done), set(reasons_of(done))) == ([LATE] * 7, {Reason.CANCELLED})
        assert (pins(fabric), unsettled_of(done)) == (0, [0])
        worker.arena.let_go()
        await fabric.at_rest()


async def test_a_worker_is_offered_nothing_at_the_limit_of_requests() -> None:
    async with stored(replace(SETTINGS, flow=replace(SETTINGS.flow, requests_max=2))) as fabric:
        worker = with_drive(fabric)
        for _ in range(2):
            assert get_states(await fabric.get(worker, [0])) == [HIT]
        assert len(offers_to(worker)) == 1, "the second one would be a third request"
        worker.end_reads(offers_to(worker)[0].request)
        await fabric.get(worker, [0])
        assert len(offers_to(worker)) == 2
        worker.end_reads(offers_to(worker)[1].request)
        await fabric.at_rest()


async def test_a_volume_in_shadow_mode_leaves_no_reads_to_workers() -> None:
    async with stored() as fabric:
        switches = {(TENANT, "v"): Switch.SHADOW}
        live = LiveSettings(direct_reads_tenant=TENANT)
        fabric.membership.rule(Overrides(live=live, switches=switches, revision=2))
        worker = with_drive(fabric)
        assert set(get_states(await fabric.get(worker, NUMBERS))) == {BlockState.DECLINED}
        await fabric.at_rest()
        assert not worker.said
        assert fabric.context.counters.tallies["shadow_get"].of(HIT) == 6


async def test_a_get_that_ends_before_its_blocks_are_located_offers_nothing() -> None:
    async with stored() as fabric:
        asked, may_answer, ask = asyncio.Event(), asyncio.Event(), fabric.owners.ask
        fabric.ask_by_message()

        async def slowly(agent: AgentId, request: AgentRequest) -> AnswerToAgent:
            answer = await ask(agent, request)
            asked.set()
            await may_answer.wait()
            return answer

        fabric.owners.ask = slowly  # type: ignore[method-assign]  # it comes between
        worker = with_drive(fabric)
        message = fabric.get_message(NUMBERS)
        getting = asyncio.create_task(fabric.data_path.get(worker, fabric.volume, message))
        await asked.wait()
        worker.stopped(message.request).set_result(None)
        assert get_states(await getting) == [LATE] * 6
        may_answer.set()
        await fabric.at_rest()
        assert not offers_to(worker)


async def test_blocks_that_leave_the_cache_are_not_offered_after_an_offer() -> None:
    async with stored(with_cache(2 * MIB)) as fabric:
        staging = fabric.context.staging
        staging._pool.drop(evict_all(staging.cache))
        cached = range(10, 20)
        await fabric.put(fabric.worker(), cached)
        worker = with_drive(fabric)
        worker.arena.is_held = True
        getting = asyncio.create_task(fabric.get(worker, [*cached, *NUMBERS]))
        offer = await offered(worker)
        worker.end_reads(offer.request, ExtentsRead(offer.request, offer.positions, b""))
        await until(lambda: len(worker.arena.held) == 2)
        staging._pool.drop(evict_all(staging.cache))
        worker.arena.let_go()
        assert get_states(await getting) == [HIT] * 16
        assert len(offers_to(worker)) == 1
        counters = fabric.context.counters
        assert (counters.get_hits_direct, counters.snapshot().get_hits_from_cache) == (6, 8)
        await fabric.at_rest()


def offered_blocks() -> OfferedBlocks:
    """Offer blocks of two drives."""
    tags = np.arange(48, dtype=np.uint8).reshape(3, 16)
    by_drive = {DRIVE: np.array([4], np.intp), OTHER: np.array([0, 2], np.intp)}
    numbers, offsets = np.array([9, 0, 0], np.uint32), np.array([8192, 0, 4096])
    is_offered = np.array([True, False, True, False, True, False])
    return OfferedBlocks(by_drive, np.array([4, 0, 2], np.intp), numbers, offsets, tags, is_offered)


def test_an_offer_names_sources_by_the_workers_numbers() -> None:
    message = offered_blocks().message(7)
    assert codec.u32(message.drives, 3).tolist() == [9, 0, 0]
    assert codec.u64(message.offsets, 3).tolist() == [8192, 0, 4096]
    assert message.tags == bytes(range(48))


@pytest.mark.parametrize(
    ("verified", "failed", "expected"),
    [
        ([0, 2, 4], [], ([0, 2, 4], [])),
        ([4], [0], ([4], [2])),
        ([4, 4, 1, 3], [4, 5], ([4], [0, 2])),
        ([], [], ([], [0, 2, 4])),
    ],
)
def test_a_report_divides_the_offered_blocks_and_no_others(
    verified: list[int], failed: list[int], expected: tuple[list[int], list[int]]
) -> None:
    offered = offered_blocks()
    is_verified, is_lost = offered.divide(ExtentsRead(7, u32(verified), u32(failed)))
    assert (np.flatnonzero(is_verified).tolist(), np.flatnonzero(is_lost).tolist()) == expected
    assert offered.hits_on(is_verified) == {DRIVE: 4 in verified, OTHER: len({0, 2} & set(verified))}


def test_a_report_beyond_the_request_is_refused() -> None:
    with pytest.raises(MalformedError):
        offered_blocks().divide(ExtentsRead(7, u32([6]), b""))
