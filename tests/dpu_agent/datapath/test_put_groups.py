"""A group of a put: waves that cross one behind the other, and are written and committed together.

Or blocks that the agent reads out of a worker's memory.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    SETTINGS,
    SLOT_BYTES,
    Assembly,
    MemoryWorker,
    assembled,
    content_of,
    get_states,
    put_states,
    reasons_of,
    unsettled_of,
    until,
)
from tests.support.agent.held_copies import HeldCopies

from ostraca_dpu_agent.adapters.transports.worker_memory import WorkerMemoryReader
from ostraca_dpu_agent.datapath.put import MovedGroup, PutRun
from ostraca_dpu_agent.datapath.staging import arrivals as arrivals_module
from ostraca_dpu_agent.datapath.staging.arrivals import Arrivals
from ostraca_dpu_agent.datapath.staging.leases import StagingLease
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.errors import MalformedError, UsageError
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.tables.digests import PieceState, TagCheck, tags_of
from ostraca_fabric.wire.messages import Put

SOON_S = 0.1
GROUPED = replace(
    SETTINGS, flow=replace(SETTINGS.flow, wave_bytes=SLOT_BYTES, put_group_bytes=4 * SLOT_BYTES)
)


def check_of_two_pages() -> TagCheck:
    memory = np.zeros(2 * PAGE_BYTES, np.uint8)
    offsets, lengths = np.array([0, PAGE_BYTES], np.int64), np.full(2, PAGE_BYTES, np.uint32)
    seeds = np.arange(2, dtype=np.uint64)
    pieces = Pieces(memory, offsets, offsets, lengths)
    return TagCheck(pieces, lengths, seeds, tags_of(memory, offsets, lengths, seeds))


async def quiet(fabric: Assembly) -> None:
    """Store a block, and wait until nothing else is written."""
    ring = fabric.shard.core.ring
    await fabric.put(fabric.worker(), [9])
    await fabric.recorded()
    await until(lambda: ring.opening is None and not ring.wants_opening)
    fabric.drive.asked.clear()


async def test_waves_of_a_group_are_written_and_committed_together() -> None:
    async with assembled(GROUPED) as fabric:
        worker = fabric.worker()
        await quiet(fabric)
        before = fabric.shard.core.counters.summary_writes
        assert put_states(await fabric.put(worker, range(4))) == [PutState.COMMITTED] * 4
        assert len(worker.arena.moved) == 4
        assert fabric.drive.asked == ["write"] * 2, "the blocks, and a summary"
        assert fabric.shard.core.counters.summary_writes == before + 1
        assert get_states(await fabric.get(fabric.worker(), range(4))) == [BlockState.HIT] * 4
        await fabric.at_rest()


async def test_a_damaged_block_of_one_wave_keeps_no_other_from_being_stored() -> None:
    async with assembled(GROUPED) as fabric:
        worker = fabric.worker()
        message = fabric.put_message(worker, range(4))
        worker.arena.bytes[2 * SLOT_BYTES] ^= 1
        done = await fabric.data_path.put(worker, fabric.volume, message)
        assert reasons_of(done) == [Reason.NONE, Reason.NONE, Reason.DAMAGED, Reason.NONE]
        await until(lambda: fabric.shard.core.counts().reservations == 0)
        assert get_states(await fabric.get(fabric.worker(), [0, 1, 3])) == [BlockState.HIT] * 3
        await fabric.at_rest()


async def test_an_io_that_fails_declines_its_blocks_alone() -> None:
    async with assembled(GROUPED) as fabric:
        worker = fabric.worker()
        await fabric.ready()
        (first,) = (segment for segment in fabric.shard.core.ring.ready)
        begin = fabric.shard.core.geometry.data_offset(first.number)
        fabric.drive.fail_writes(begin, SLOT_BYTES)
        message = fabric.put_message(worker, range(4))
        worker.arena.bytes[SLOT_BYTES] ^= 1  # between two I/Os
        done = await fabric.data_path.put(worker, fabric.volume, message)
        assert put_states(done) == [PutState.DECLINED] * 2 + [PutState.COMMITTED] * 2
        assert reasons_of(done)[:2] == [Reason.DRIVE_ERROR, Reason.DAMAGED]
        await fabric.at_rest()


async def test_a_put_that_is_over_stores_what_was_checked_and_leaves_its_memory_to_waves_under_way() -> None:
    async with assembled(GROUPED) as fabric:
        worker, staging = fabric.worker(), fabric.context.staging
        worker.arena.is_held = True
        putting = asyncio.create_task(fabric.put(worker, range(4), deadline_s=SOON_S))
        await until(lambda: len(worker.arena.held) == 2)
        worker.arena.held.pop(0)()
        done = await putting
        assert put_states(done) == [PutState.LATE] * 4
        assert unsettled_of(done) == [1, 2]
        assert staging.quarantined_bytes == 4 * SLOT_BYTES
        assert worker.settled == [], "two waves may land yet"
        worker.arena.let_go()
        await fabric.at_rest()
        assert worker.settled == [done.request]
        assert fabric.shard.core.counts().blocks_committed == 1
        tally = fabric.context.counters.tallies["put"]
        assert (tally.of(PutState.COMMITTED), tally.of(PutState.LATE)) == (1, 3)


async def test_the_space_of_a_group_that_can_t_be_fetched_comes_back() -> None:
    async with assembled(GROUPED) as fabric:
        worker = fabric.worker()
        await quiet(fabric)
        worker.arena.fails = True
        assert reasons_of(await fabric.put(worker, range(4))) == [Reason.TRANSFER_FAILED] * 4
        await until(lambda: fabric.shard.core.counts().reservations == 0)
        await fabric.at_rest()
        assert fabric.context.staging.held_bytes == 0
        assert fabric.drive.asked == [], "there is nothing to write"


async def test_a_drive_that_becomes_suspect_during_a_fetch_stores_no_block_of_the_group() -> None:
    settings = replace(GROUPED, health=replace(GROUPED.health, suspect_faults=1))
    async with assembled(settings) as fabric:
        worker = fabric.worker()
        await fabric.ready()
        worker.arena.is_held = True
        putting = asyncio.create_task(fabric.put(worker, range(4)))
        await until(lambda: len(worker.arena.held) == 2)
        drive = fabric.context.drives[fabric.drive.id]
        assert isinstance(drive, GuardedDrive)
        drive.note_damage(0)
        worker.arena.let_go()
        assert reasons_of(await putting) == [Reason.DRIVE_SUSPECT] * 4
        await fabric.at_rest()


async def test_the_space_of_a_write_that_was_given_up_stays_reserved() -> None:
    settings = replace(GROUPED, health=replace(GROUPED.health, overdue_s=0.1, write_overdue_s=0.1))
    async with assembled(settings) as fabric:
        await fabric.ready()
        fabric.drive.holds_writes = True
        done = await fabric.put(fabric.worker(), range(4))
        assert reasons_of(done) == [Reason.DRIVE_SUSPECT] * 4
        assert fabric.shard.core.counts().reservations == 4, "the write may land yet"
        fabric.drive.let_go()
        await until(lambda: fabric.context.staging.held_bytes == 0)


async def test_memory_of_a_group_is_in_use_until_its_write_has_ended_also_after_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with assembled(GROUPED) as fabric:
        worker, staging = fabric.worker(), fabric.context.staging
        await fabric.put(worker, [9])
        await fabric.recorded()
        fabric.drive.holds_writes = True

        async def crash(*_writes: object) -> None:
            raise AssertionError("a bug")

        monkeypatch.setattr(PutRun, "_wait_for_write", crash)
        putting = asyncio.create_task(fabric.put(worker, range(4), deadline_s=SOON_S))
        await until(lambda: len(fabric.drive.held) == 1)
        assert put_states(await putting) == [PutState.LATE] * 4
        assert staging.held_bytes == 4 * SLOT_BYTES, "the write is under way"
        fabric.drive.let_go()
        await until(lambda: staging.held_bytes == 0)


async def test_blocks_whose_check_crashes_are_not_stored_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with assembled(GROUPED) as fabric:
        worker = fabric.worker()
        await fabric.ready()

        def crash(*_rows: object) -> None:
            raise AssertionError("a bug")

        monkeypatch.setattr(TagCheck, "receive", crash)
        assert reasons_of(await fabric.put(worker, range(4))) == [Reason.TRANSFER_FAILED] * 4
        assert "a check of blocks crashed" in caplog.text
        await fabric.at_rest()


@pytest.mark.parametrize("is_in_a_thread", [False, True])
async def test_blocks_that_arrive_after_the_checkers_stop_stay_unchecked(
    monkeypatch: pytest.MonkeyPatch, *, is_in_a_thread: bool
) -> None:
    monkeypatch.setattr(arrivals_module, "_SMALL_BYTES", 0)
    checkers = ThreadPoolExecutor(1)
    checkers.shutdown()
    arrivals = Arrivals(check_of_two_pages(), checkers)
    if is_in_a_thread:
        await asyncio.to_thread(arrivals.arrive, 0, 2)
    else:
        arrivals.arrive(0, 2)
    assert not arrivals.checked.done(), "more blocks may arrive"
    arrivals.end()
    await until(arrivals.checked.done)
    assert arrivals.check.states.tolist() == [PieceState.PENDING] * 2


@pytest.mark.parametrize("small_bytes", [2 * PAGE_BYTES, 2 * PAGE_BYTES - 1])
async def test_few_bytes_are_checked_where_they_arrive(
    monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    monkeypatch.setattr(arrivals_module, "_SMALL_BYTES", small_bytes)
    checked_by, check = [], check_of_two_pages()
    run = TagCheck.receive

    def running(self: TagCheck, rows: slice) -> None:
        checked_by.append(threading.current_thread().name)
        run(self, rows)

    monkeypatch.setattr(TagCheck, "receive", running)
    with ThreadPoolExecutor(1, "checker") as checkers:
        arrivals = Arrivals(check, checkers)
        await asyncio.to_thread(arrivals.arrive, 0, 1)
        arrivals.arrive(1, 2)
        arrivals.end()
        await arrivals.checked
    assert check.states.tolist() == [PieceState.GOOD] * 2
    assert [name == "checker_0" for name in checked_by] == [small_bytes < 2 * PAGE_BYTES] * 2


NOWHERE = 8
"""An address in the first page, which no process maps."""


class ReadWorker(MemoryWorker):
    """A worker whose memory the agent reads, and whose arena fails."""

    def __init__(self, fabric: Assembly) -> None:
        super().__init__(fabric.worker().arena, memory=WorkerMemoryReader(os.getpid()))
        self.source = np.zeros(0, np.uint8)

    def put_message(self, fabric: Assembly, count: int, *, first: int = 0, **how: float) -> Put:
        """Write blocks to this worker's memory, in reverse order at odd places, and name their addresses."""
        message = fabric.put_message(self, range(first, first + count), **how)  # type: ignore[arg-type]
        self.arena.bytes[:] = bytes(len(self.arena.bytes))
        self.arena.fails = True
        self.source = np.zeros(count * SLOT_BYTES, np.uint8)
        for number, place in enumerate(self.places(count).tolist()):
            self.source[place : place + BLOCK_BYTES] = np.frombuffer(content_of(first + number), np.uint8)
        return msgspec.structs.replace(message, addresses=self.addresses(count).tobytes())

    @staticmethod
    def places(count: int) -> NDArray[np.int64]:
        return np.arange(count, dtype=np.int64)[::-1] * SLOT_BYTES + 7

    def addresses(self, count: int) -> NDArray[np.uint64]:
        return self.places(count).astype(np.uint64) + np.uint64(self.source.ctypes.data)


@asynccontextmanager
async def read_worker() -> AsyncIterator[tuple[Assembly, ReadWorker]]:
    async with assembled(GROUPED) as fabric:
        worker = ReadWorker(fabric)
        await quiet(fabric)
        yield fabric, worker
        assert isinstance(worker.memory, WorkerMemoryReader)
        worker.memory.close()


async def test_blocks_are_read_out_of_a_workers_memory_and_stored_without_bytes_of_others() -> None:
    async with read_worker() as (fabric, worker):
        fabric.context.staging.array[:] = 0x77  # of an earlier lease
        done = await fabric.data_path.put(worker, fabric.volume, worker.put_message(fabric, 8))
        assert put_states(done) == [PutState.COMMITTED] * 8
        assert (unsettled_of(done), worker.settled, worker.arena.moved) == ([], [], [])
        reader = fabric.worker()
        assert get_states(await fabric.get(reader, range(8))) == [BlockState.HIT] * 8
        for number in range(8):
            right, slot = content_of(number), number * SLOT_BYTES
            assert reader.arena.bytes[slot : slot + BLOCK_BYTES] == right
            place = fabric.drive.bytes.find(right)
            assert bytes(fabric.drive.bytes[place + BLOCK_BYTES : place + SLOT_BYTES]) == bytes(
                SLOT_BYTES - BLOCK_BYTES
            )
        await fabric.at_rest()


async def test_blocks_that_change_their_order_on_the_way_to_flash_are_read_from_their_own_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group has the order of its places: where the ring begins anew, later blocks have earlier ones."""
    reordered, expect = list[bool](), PutRun._expect

    def expecting(self: PutRun, group: MovedGroup, lease: StagingLease) -> TagCheck:
        check = expect(self, group, lease)
        reordered.append(bool((np.diff(group.positions) < 0).any()))
        return check

    monkeypatch.setattr(PutRun, "_expect", expecting)
    async with read_worker() as (fabric, worker):
        for first in range(100, 450, 7):
            message = worker.put_message(fabric, 7, first=first)
            done = await fabric.data_path.put(worker, fabric.volume, message)
            assert put_states(done) == [PutState.COMMITTED] * 7
        assert any(reordered)
        await fabric.at_rest()


async def test_addresses_in_a_memory_that_is_not_read_are_refused() -> None:
    async with read_worker() as (fabric, worker):
        message = worker.put_message(fabric, 2)
        for addresses in (message.addresses[:-1], message.addresses[8:], message.addresses * 2):
            wrong = msgspec.structs.replace(message, addresses=addresses)
            with pytest.raises(MalformedError):
                await fabric.data_path.put(worker, fabric.volume, wrong)
        with pytest.raises(UsageError, match="does not reach: name slots alone"):
            await fabric.data_path.put(fabric.worker(), fabric.volume, message)
        await fabric.at_rest()


@pytest.mark.parametrize("ack", Ack)
async def test_a_block_that_changed_in_a_workers_memory_is_damaged_and_no_other(ack: Ack) -> None:
    async with read_worker() as (fabric, worker):
        message = worker.put_message(fabric, 8, ack=ack)
        worker.source[int(worker.places(8)[5]) + BLOCK_BYTES - 1] ^= 1
        done = await fabric.data_path.put(worker, fabric.volume, message)
        stored = PutState.COMMITTED if ack is Ack.COMMITTED else PutState.STAGED
        assert put_states(done) == [PutState.DECLINED if number == 5 else stored for number in range(8)]
        assert reasons_of(done)[5] == Reason.DAMAGED
        await fabric.at_rest()
        found = get_states(await fabric.get(fabric.worker(), range(8)))
        assert found == [BlockState.MISS if number == 5 else BlockState.HIT for number in range(8)]


async def test_a_block_that_can_not_be_read_is_declined_and_its_space_comes_back() -> None:
    async with read_worker() as (fabric, worker):
        message = worker.put_message(fabric, 8)
        addresses = worker.addresses(8)
        addresses[5] = NOWHERE
        wrong = msgspec.structs.replace(message, addresses=addresses.tobytes())
        done = await fabric.data_path.put(worker, fabric.volume, wrong)
        failed = [reason == Reason.TRANSFER_FAILED for reason in reasons_of(done)]
        assert failed[5]
        assert put_states(done) == [PutState.DECLINED if each else PutState.COMMITTED for each in failed]
        assert failed.count(True) <= 4, "the other group is stored"
        await fabric.at_rest()
        again = await fabric.data_path.put(worker, fabric.volume, message)
        assert put_states(again) == [PutState.COMMITTED if each else PutState.EXISTS for each in failed]


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
async def test_a_put_that_is_over_during_reads_names_their_blocks_and_stores_none(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with read_worker() as (fabric, worker):
        held, staging = HeldCopies(monkeypatch), fabric.context.staging
        message = worker.put_message(fabric, 8, deadline_s=SOON_S if how == "deadline" else 30.0)
        putting = asyncio.create_task(fabric.data_path.put(worker, fabric.volume, message))
        await until(lambda: len(held.parts) == 2)
        if how == "cancelled":
            worker.stopped(message.request).set_result(None)
        done = await putting
        assert put_states(done) == [PutState.LATE] * 8
        assert unsettled_of(done) == [*range(8)]
        assert staging.quarantined_bytes == 8 * SLOT_BYTES
        assert worker.settled == [], "blocks may be copied yet"
        worker.source[:] = 0
        held.let_go()
        await fabric.at_rest()
        assert worker.settled == [done.request]
        assert fabric.shard.core.counts().blocks_committed == 1, "the one before"


@pytest.mark.parametrize("first", [0, 4])
async def test_a_put_that_is_over_during_reads_stores_the_group_that_was_checked(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    async with read_worker() as (fabric, worker):
        message = worker.put_message(fabric, 8, ack=Ack.STAGED)
        checked = [*range(first, first + 4)]
        held = HeldCopies(monkeypatch, passing=message.tags[16 * first : 16 * (first + 4)])
        putting = asyncio.create_task(fabric.data_path.put(worker, fabric.volume, message))
        await until(lambda: "write" in fabric.drive.asked and len(held.parts) == 1)
        worker.stopped(message.request).set_result(None)
        done = await putting
        staged = [position for position in range(8) if done.states[position] == PutState.STAGED]
        assert staged == checked
        assert unsettled_of(done) == [position for position in range(8) if position not in staged]
        held.let_go()
        await fabric.at_rest()
        found = get_states(await fabric.get(fabric.worker(), range(8)))
        assert [position for position in range(8) if found[position] == BlockState.HIT] == staged


@pytest.mark.parametrize("is_read", [True, False], ids=["memory", "arena"])
async def test_a_staged_put_is_answered_before_its_last_group_is_written(*, is_read: bool) -> None:
    async with read_worker() as (fabric, reading):
        worker = reading if is_read else fabric.worker()
        message = (
            reading.put_message(fabric, 4, ack=Ack.STAGED)
            if is_read
            else fabric.put_message(worker, range(4), ack=Ack.STAGED)
        )
        done = await fabric.data_path.put(worker, fabric.volume, message)
        assert put_states(done) == [PutState.STAGED] * 4
        assert fabric.drive.asked == [], "the write comes after the answer"
        await fabric.at_rest()
        assert fabric.drive.asked == ["write"] * 2
        assert get_states(await fabric.get(fabric.worker(), range(4))) == [BlockState.HIT] * 4
