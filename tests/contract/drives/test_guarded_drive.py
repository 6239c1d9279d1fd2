"""A drive that is watched: what it refuses, what it gives up, and how it comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from tests.contract.drives.drive_contract import at_page, pages, pieces, read, tag_check, written
from tests.support.agent.assembly import HeldDrive, until
from tests.support.invariants import check_health

from ostraca_fabric.drives.drive_health import DriveCondition, HealthSettings, IoKind
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.policies.circuit_breaker import BreakerSettings
from ostraca_fabric.tables.digests import CheckState

HASTY = HealthSettings(
    overdue_s=0.02,
    write_overdue_s=0.02,
    breaker=BreakerSettings(open_s=0.1, open_max_s=0.2),
    suspect_faults=2,
    failed_faults=5,
)


@pytest.fixture
def held() -> HeldDrive:
    return HeldDrive()


@pytest.fixture
def drive(held: HeldDrive) -> Iterator[GuardedDrive]:
    made = GuardedDrive(held, HASTY, time.monotonic)
    yield made
    check_health(made.health)
    made.unwatch()


async def test_a_drive_that_hangs_gives_up_what_it_has_and_is_asked_nothing_more(
    drive: GuardedDrive, held: HeldDrive
) -> None:
    held.holds_reads = True
    reading, given_up = drive.submit_read(at_page(pages(1), 0)), drive.reads_given_up
    await given_up
    assert not reading.done(), "its memory is still in use"
    assert drive.refuses_reads
    refused = drive.submit_read(pieces(pages(3), range(3), range(3)))
    assert refused.done()
    assert refused.result().tolist() == [False] * 3
    assert not drive.reads_given_up.done(), "that was about what was under way then"
    await until(lambda: len(held.held) > 1)
    probes = len(held.held) - 1
    await asyncio.sleep(0.2)
    assert (probes, len(held.held) - 1) == (1, 1), "a probe that hangs is the only one"


async def test_a_write_that_is_stuck_is_given_up_and_reads_that_are_answered_are_waited_for(
    held: HeldDrive,
) -> None:
    drive = GuardedDrive(held, replace(HASTY, stuck_s=0.1), time.monotonic)
    held.holds_writes = True
    writing, given_up = drive.submit_write(at_page(pages(1), 0)), drive.writes_given_up
    reads_given_up = drive.reads_given_up
    while not given_up.done():
        assert await read(drive, at_page(pages(1), 0)) == [True]
    assert not writing.done()
    assert not reads_given_up.done()
    assert (drive.refuses_reads, drive.refuses_writes) == (False, True)
    drive.unwatch()


async def test_a_file_is_waited_for_while_a_drive_of_flash_is_given_up(
    drive: GuardedDrive, held: HeldDrive
) -> None:
    held.holds_reads = True
    file = HeldDrive()
    file.is_file = file.holds_reads = True
    patient = GuardedDrive(file, HASTY, time.monotonic)
    assert patient.is_file
    waiting, given_up = patient.submit_read(at_page(pages(1), 0)), drive.reads_given_up
    drive.submit_read(at_page(pages(1), 0))
    await given_up  # by now, the file has been silent for as long
    assert not patient.refuses_reads
    held.let_go()
    file.let_go()
    assert (await waiting).tolist() == [True]
    assert patient.health.counted["silences"] == 0
    patient.unwatch()


async def test_a_drive_whose_read_advances_is_waited_for(drive: GuardedDrive, held: HeldDrive) -> None:
    held.holds_reads = True
    wanted = pieces(pages(40), range(40), range(40))
    check = tag_check(wanted, wanted.memory)
    reading, given_up = drive.submit_read(wanted, check), drive.reads_given_up
    step_s, begun_s = HASTY.overdue_s / 8, time.monotonic()
    while (rows := int((time.monotonic() - begun_s) / step_s)) < len(wanted):
        check.states[:rows] = CheckState.GOOD
        await asyncio.sleep(0)
    assert not given_up.done()
    await given_up  # without progress
    held.let_go()
    await reading


async def test_a_drive_that_answers_again_is_asked_again(drive: GuardedDrive, held: HeldDrive) -> None:
    held.holds_reads = True
    reading = drive.submit_read(at_page(pages(1), 0))
    await until(lambda: drive.refuses_reads)
    held.let_go()
    assert (await reading).tolist() == [True]
    await until(lambda: not drive.refuses_reads)
    assert await read(drive, at_page(pages(1), 0)) == [True]
    assert drive.health.counted["reads"] == 0


async def test_reads_that_fail_in_a_row_hold_reads_off_until_one_page_can_be_read(
    drive: GuardedDrive, held: HeldDrive
) -> None:
    held.fail_reads(0, held.size_bytes)
    for _ in range(3):
        assert await read(drive, at_page(pages(1), 3)) == [False]
    assert drive.refuses_reads
    assert not drive.refuses_writes
    held.mend()
    await until(lambda: not drive.refuses_reads)
    assert await read(drive, at_page(pages(1), 3)) == [True]


async def test_a_bad_page_that_is_tried_first_does_not_hold_a_drive_off_for_ever(
    drive: GuardedDrive, held: HeldDrive
) -> None:
    held.fail_reads(0, PAGE_BYTES)
    for _ in range(3):
        assert await read(drive, at_page(pages(1), 0)) == [False]
    assert drive.refuses_reads
    await until(lambda: not drive.refuses_reads)
    assert drive.health.condition is DriveCondition.SUSPECT, "one trial has failed"


async def test_damage_that_a_check_finds_is_no_failure_of_the_drive(
    drive: GuardedDrive, held: HeldDrive
) -> None:
    for _ in range(9):
        wanted = at_page(pages(1), 0)
        assert not (await drive.submit_read(wanted, tag_check(wanted, pages(1, b"other")))).any()
    assert drive.health.counted["reads"] == 0
    drive.note_damage(0)
    assert drive.health.counted["damaged"] == 1
    held.fail_reads(5 * PAGE_BYTES, PAGE_BYTES)
    wanted = pieces(pages(2), [0, 1], [3, 5])
    ends = await drive.submit_read(wanted, tag_check(wanted, pages(2, b"other")))
    assert ends.tolist() == [False, False]
    assert drive.health.counted["reads"] == 1


async def test_writes_and_flushes_that_fail_hold_writes_off_and_one_write_is_the_trial(
    drive: GuardedDrive, held: HeldDrive
) -> None:
    held.fail_writes(0, held.size_bytes)
    held.fails_flushes = True
    assert [await written(drive, at_page(pages(1), 0)) for _ in range(2)] == [[False]] * 2
    assert not drive.refuses_writes
    assert not await drive.submit_flush()
    await until(lambda: drive.health.held_off(IoKind.WRITE))  # a flush that failed is one too many
    assert len(held.writes) == 2
    assert await read(drive, at_page(pages(1), 0)) == [True]
    held.mend()
    held.fails_flushes = False
    await until(lambda: not drive.refuses_writes)
    trial, other = drive.submit_write(at_page(pages(1), 0)), drive.submit_write(at_page(pages(1), 1))
    assert [(await trial).tolist(), (await other).tolist()] == [[True], [False]]
    assert await written(drive, at_page(pages(1), 1)) == [True]


async def test_a_drive_that_has_failed_is_left_alone(drive: GuardedDrive, held: HeldDrive) -> None:
    for place in range(HASTY.failed_faults):
        drive.note_damage(place << 22)
    assert drive.health.condition is DriveCondition.FAILED
    assert drive.refuses_reads
    assert drive.refuses_writes
    assert await read(drive, at_page(pages(1), 0)) == [False]
    assert await written(drive, at_page(pages(1), 0)) == [False]
    assert not await drive.submit_flush()
    assert held.asked == []


async def test_a_drive_that_fails_while_it_hangs_gives_up_what_it_has(
    drive: GuardedDrive, held: HeldDrive
) -> None:
    held.holds_reads = held.holds_writes = True
    drive.submit_read(at_page(pages(1), 0))
    drive.submit_write(at_page(pages(1), 1))
    given_up = drive.reads_given_up, drive.writes_given_up
    for place in range(HASTY.failed_faults):
        drive.note_damage(place << 22)
    assert drive.health.condition is DriveCondition.FAILED
    await until(lambda: all(each.done() for each in given_up))
    assert drive._turn is None, "and there is nothing left to watch"


async def test_what_is_under_way_is_given_up_when_nobody_watches_it_any_more(
    drive: GuardedDrive, held: HeldDrive
) -> None:
    held.holds_reads = held.holds_writes = True
    drive.submit_read(at_page(pages(1), 0))
    drive.submit_write(at_page(pages(1), 1))
    given_up = drive.reads_given_up, drive.writes_given_up
    drive.unwatch()
    assert [each.done() for each in given_up] == [True, True]


async def test_a_queue_that_is_full_says_nothing_of_the_drive(drive: GuardedDrive, held: HeldDrive) -> None:
    held._pieces_queued_max = 1
    for _ in range(9):
        assert await read(drive, pieces(pages(2), range(2), range(2))) == [False] * 2
    assert not drive.refuses_reads
    assert not drive.health.held_off(IoKind.READ)


async def test_nothing_is_watched_any_more_once_nothing_is_under_way(
    drive: GuardedDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, timers = asyncio.get_running_loop(), list[Callable[[], object]]()
    call_later = loop.call_later

    def counted(delay_s: float, act: Callable[[], object]) -> asyncio.TimerHandle:
        timers.append(act)
        return call_later(delay_s, act)

    monkeypatch.setattr(loop, "call_later", counted)
    assert await read(drive, at_page(pages(1), 0)) == [True]
    assert len(timers) == 1
    monkeypatch.undo()
    await until(lambda: drive._turn is None)
