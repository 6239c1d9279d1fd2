"""A group of a put: waves that cross one behind the other, and are written and committed together."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from tests.support.agent.assembly import (
    GROUPED,
    SLOT_BYTES,
    assembled,
    get_states,
    put_states,
    reasons_of,
    unsettled_of,
    until,
)

from ostraca_dpu_agent.datapath.drive_io import DriveIO
from ostraca_dpu_agent.datapath.staging import arrivals as arrivals_module
from ostraca_dpu_agent.datapath.staging.arrivals import Arrivals
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.tables.digests import CheckState, TagCheck, tags_of

SOON_S = 0.1


def check_of_two_pages() -> TagCheck:
    memory = np.zeros(2 * PAGE_BYTES, np.uint8)
    offsets, lengths = np.array([0, PAGE_BYTES], np.int64), np.full(2, PAGE_BYTES, np.uint32)
    seeds = np.arange(2, dtype=np.uint64)
    pieces = Pieces(memory, offsets, offsets, lengths)
    return TagCheck(pieces, lengths, seeds, tags_of(memory, offsets, lengths, seeds))


async def test_waves_of_a_group_are_written_and_committed_together() -> None:
    async with assembled(GROUPED) as fabric:
        worker = fabric.worker()
        await fabric.quiet()
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
        await fabric.ready()
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
        await fabric.quiet()
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

        monkeypatch.setattr(DriveIO, "wait", crash)
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
    assert arrivals.check.states.tolist() == [CheckState.PENDING] * 2


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
    assert check.states.tolist() == [CheckState.GOOD] * 2
    assert [name == "checker_0" for name in checked_by] == [small_bytes < 2 * PAGE_BYTES] * 2
