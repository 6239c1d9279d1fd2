"""Gets of workers that read drives themselves: the agent locates, pins and delivers the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    DRIVE,
    SETTINGS,
    SLOT_BYTES,
    TENANT,
    Assembly,
    HeldDrive,
    MemoryWorker,
    assembled,
    content_of,
    get_states,
    reasons_of,
    unsettled_of,
    until,
    with_cache,
)

from ostraca_dpu_agent.datapath.location.extents import ExtentOffer
from ostraca_dpu_agent.server.dispatcher import WorkerSession
from ostraca_dpu_agent.settings import MIB, AgentSettings
from ostraca_fabric.errors import MalformedError
from ostraca_fabric.model.ids import AgentId, DriveId, FabricId, TenantId
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.model.overrides import LiveSettings, Overrides
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.messages import (
    AgentRequest,
    AnnouncedDrive,
    AnswerToAgent,
    ExtentsRead,
    GetDone,
    GetExtents,
    Hello,
)

if TYPE_CHECKING:
    from ostraca_fabric.connection import ServerConnection

HIT, MISS, LATE = BlockState.HIT, BlockState.MISS, BlockState.LATE
NUMBERS = range(6)


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


async def test_the_worker_reads_what_the_agent_located_and_pinned() -> None:
    async with stored() as fabric:
        worker = with_drive(fabric)
        fabric.drive.holds_reads = True
        getting = asyncio.create_task(fabric.get(worker, [*NUMBERS, 99]))
        offer = await offered(worker)
        positions = codec.positions(offer.positions, 7).tolist()
        assert sorted(positions) == list(NUMBERS)
        assert codec.u32(offer.drives, 6).tolist() == [3] * 6
        for position, offset in zip(positions, codec.u64(offer.offsets, 6).tolist(), strict=True):
            assert on_flash(fabric.drive, offset) == content_of(position)
        assert fabric.shard.core.counts().pins == 1
        worker.reports[offer.request].set_result(ExtentsRead(offer.request, u32(NUMBERS), b""))
        done = await getting
        assert get_states(done) == [HIT] * 6 + [MISS]
        assert not fabric.drive.held
        fabric.drive.let_go()
        assert not any(worker.arena.bytes)
        counters = fabric.context.counters
        assert (counters.snapshot().get_hits_direct, counters.hits_on[DRIVE]) == (6, 6)
        await fabric.at_rest()


async def test_the_agent_delivers_blocks_that_the_worker_could_not_read() -> None:
    async with stored() as fabric:
        worker = with_drive(fabric)
        getting = asyncio.create_task(fabric.get(worker, NUMBERS))
        offer = await offered(worker)
        worker.reports[offer.request].set_result(ExtentsRead(offer.request, u32([0, 1, 3]), u32([2, 5])))
        done = await getting
        assert get_states(done) == [HIT, HIT, HIT, HIT, MISS, HIT]
        assert reasons_of(done)[4] == Reason.DRIVE_SUSPECT
        for number in NUMBERS:
            found = bytes(worker.arena.bytes[number * SLOT_BYTES : number * SLOT_BYTES + BLOCK_BYTES])
            assert (found == content_of(number)) is (number in (2, 5))
        assert fabric.context.counters.snapshot().get_hits_direct == 3
        await fabric.at_rest()


async def test_blocks_of_the_cache_cross_as_always() -> None:
    async with stored(with_cache(2 * MIB)) as fabric:
        worker = with_drive(fabric)
        assert get_states(await fabric.get(worker, NUMBERS)) == [HIT] * 6
        assert not offers_to(worker)
        assert fabric.context.counters.get_hits_from_cache == 6


@pytest.mark.parametrize(
    ("tenant", "drive"), [(TenantId("other"), DRIVE), (TenantId(""), DRIVE), (TENANT, DriveId("elsewhere/d"))]
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


async def ended_while_reading(fabric: Assembly, *, is_cancelled: bool) -> GetDone:
    worker = with_drive(fabric)
    getting = asyncio.create_task(fabric.get(worker, NUMBERS, deadline_s=5.0 if is_cancelled else 0.1))
    offer = await offered(worker)
    if is_cancelled:
        worker.stopped(offer.request).set_result(None)
    done = await getting
    assert worker.reports[offer.request].cancelled()
    assert not unsettled_of(done)
    await fabric.at_rest()
    return done


async def test_a_get_ends_while_the_worker_reads() -> None:
    async with stored() as fabric:
        done = await ended_while_reading(fabric, is_cancelled=False)
        assert (get_states(done), set(reasons_of(done))) == ([LATE] * 6, {Reason.DEADLINE})
        done = await ended_while_reading(fabric, is_cancelled=True)
        assert (get_states(done), set(reasons_of(done))) == ([LATE] * 6, {Reason.CANCELLED})


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
        staging._pool.drop(staging.cache.shrink(0))
        cached = range(10, 20)
        await fabric.put(fabric.worker(), cached)
        worker = with_drive(fabric)
        worker.arena.is_held = True
        getting = asyncio.create_task(fabric.get(worker, [*cached, *NUMBERS]))
        offer = await offered(worker)
        worker.reports[offer.request].set_result(ExtentsRead(offer.request, offer.positions, b""))
        await until(lambda: len(worker.arena.held) == 2)
        staging._pool.drop(staging.cache.shrink(0))
        worker.arena.let_go()
        assert get_states(await getting) == [HIT] * 16
        assert len(offers_to(worker)) == 1
        counters = fabric.context.counters
        assert (counters.get_hits_direct, counters.get_hits_from_cache) == (6, 8)
        await fabric.at_rest()


def test_drives_of_other_fabrics_and_suspended_ones_are_not_read_by_the_worker() -> None:
    ours, theirs = FabricId(bytes(16)), bytes([1] * 16)
    hello = Hello(1, 1, "worker", TENANT, "", "", client=bytes(16))
    session = WorkerSession(cast("ServerConnection", None), hello, None)
    announced = [(theirs, "e/a"), (ours, "e/b"), (ours, ""), (ours, "e/c")]
    session.read_directly([AnnouncedDrive(*each) for each in announced], ours)
    assert session.direct_drives == {"e/b": 1, "e/c": 3}
    session.read_directly([], ours)
    assert not session.direct_drives


OFFER = ExtentOffer(
    np.array([4, 0, 2], np.intp),
    np.array([8192, 0, 4096], np.int64),
    np.arange(48, dtype=np.uint8).reshape(3, 16),
    [(DriveId("e/a"), 1), (DriveId("e/b"), 2)],
)


def test_an_offer_names_drives_by_the_workers_numbers() -> None:
    message = OFFER.message(7, {DriveId("e/b"): 0, DriveId("e/a"): 9})
    assert codec.u32(message.drives, 3).tolist() == [9, 0, 0]
    assert codec.u64(message.offsets, 3).tolist() == [8192, 0, 4096]
    assert message.tags == bytes(range(48))


@pytest.mark.parametrize(
    ("verified", "failed", "expected"),
    [
        ([0, 2, 4], [], ([0, 2, 4], [], [])),
        ([4], [0], ([4], [0], [2])),
        ([4, 4, 1, 3], [4, 5], ([4], [], [0, 2])),
        ([], [], ([], [], [0, 2, 4])),
    ],
)
def test_a_report_divides_the_offered_blocks_and_no_others(
    verified: list[int], failed: list[int], expected: tuple[list[int], list[int], list[int]]
) -> None:
    read = OFFER.read(ExtentsRead(7, u32(verified), u32(failed)), 6)
    assert tuple(part.tolist() for part in (read.verified, read.failed, read.lost)) == expected
    hits = [(DriveId("e/a"), 4 in verified), (DriveId("e/b"), len({0, 2} & set(verified)))]
    assert OFFER.hits(read.verified) == hits


def test_a_report_beyond_the_request_is_refused() -> None:
    with pytest.raises(MalformedError):
        OFFER.read(ExtentsRead(7, u32([6]), b""), 6)
