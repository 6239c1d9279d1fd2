"""The simulated drive itself: what each fault does, and that the flash tells of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.contract.drives.drive_contract import at_page, pages, pieces, read, written
from tests.support.simulated.drives.drive_faults import Befell, DriveFaults
from tests.support.simulated.drives.reference_engine import ReferenceEngine
from tests.support.simulated.drives.simulated_drive import SimulatedDrive
from tests.support.simulated.drives.simulated_flash import SECTOR_BYTES, SimulatedFlash
from tests.support.simulated.virtual_time import StandstillError, VirtualLoop

from ostraca_fabric.drives.io_engine import FlashIoSettings
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.ids import DriveId

PAGES = 64
Scenario = Callable[[SimulatedFlash], Coroutine[None, None, None]]


def played(
    scenario: Scenario, faults: DriveFaults | None = None, *, seed: int = 1, has_volatile_cache: bool = False
) -> SimulatedFlash:
    """Run a scenario on flash of its own, and return that."""
    flash = SimulatedFlash(
        PAGES * PAGE_BYTES, random.Random(seed), faults, has_volatile_cache=has_volatile_cache
    )
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scenario(flash))
    return flash


def path(flash: SimulatedFlash, limits: FlashIoSettings | None = None) -> SimulatedDrive:
    """Return a path of its own process, whose engine has these limits."""
    return SimulatedDrive(DriveId("e/d"), flash, engine=ReferenceEngine(limits))


def lying_at(flash: SimulatedFlash, page: int, count: int = 1) -> NDArray[np.uint8]:
    return flash.image[page * PAGE_BYTES : (page + count) * PAGE_BYTES]


def sectors_of(data: NDArray[np.uint8], of: NDArray[np.uint8]) -> int:
    """Count the sectors that two pieces of memory have in common."""
    same = (data.reshape(-1, SECTOR_BYTES) == of.reshape(-1, SECTOR_BYTES)).all(axis=1)
    return int(same.sum())


async def cut_after(flash: SimulatedFlash, *, flushes: bool) -> None:
    drive = path(flash)
    assert await written(drive, at_page(pages(8, b"a"), 0)) == [True]
    assert await drive.submit_flush()
    assert await written(drive, pieces(pages(8, b"b"), range(8), [0, 2, 4, 6, 8, 10, 12, 14])) == [True] * 8
    if flushes:
        assert await drive.submit_flush()
    drive.crash()
    flash.power_cut()


def test_a_power_cut_takes_what_was_not_flushed_in_part_and_in_any_order() -> None:
    old, new = pages(8, b"a"), pages(8, b"b").reshape(8, -1)
    kept = set()
    for seed in range(40):

        async def scenario(flash: SimulatedFlash) -> None:
            await cut_after(flash, flushes=False)

        flash = played(scenario, seed=seed, has_volatile_cache=True)
        for row, page in enumerate([0, 2, 4, 6]):
            there, before = lying_at(flash, page), old.reshape(8, -1)[page]
            count = sectors_of(there, new[row])
            assert count + sectors_of(there, before) == PAGE_BYTES // SECTOR_BYTES
            kept.add(count)
        assert np.array_equal(lying_at(flash, 1), old.reshape(8, -1)[1])
        assert not flash.owed
    assert kept == set(range(PAGE_BYTES // SECTOR_BYTES + 1)), "whole, torn at any sector, and lost"


def test_what_was_flushed_survives_a_power_cut() -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        await cut_after(flash, flushes=True)

    flash = played(scenario, has_volatile_cache=True)
    assert np.array_equal(lying_at(flash, 14), pages(8, b"b").reshape(8, -1)[7])


def test_what_a_drive_without_a_cache_answered_survives_and_what_was_under_way_is_torn() -> None:
    torn = 0
    for seed in range(20):

        async def scenario(flash: SimulatedFlash) -> None:
            drive = path(flash)
            assert await written(drive, at_page(pages(2, b"a"), 0)) == [True]
            under_way = drive.submit_write(at_page(pages(2, b"b"), 1))
            flash.power_cut()
            assert (await under_way).tolist() == [False]

        flash = played(scenario, seed=seed)
        assert np.array_equal(lying_at(flash, 0), pages(2, b"a")[:PAGE_BYTES])
        torn += 0 < sectors_of(lying_at(flash, 1, 2), pages(2, b"b")) < 2 * PAGE_BYTES // SECTOR_BYTES
    assert torn


def test_a_power_cut_under_a_living_writer_is_owed_for_what_it_had_answered() -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        await written(path(flash), at_page(pages(8, b"a"), 0))
        flash.power_cut()

    for seed in range(20):
        flash = played(scenario, seed=seed, has_volatile_cache=True)
        wanted = pages(8, b"a").reshape(8, -1)
        spoilt = {page for page in range(8) if not np.array_equal(lying_at(flash, page), wanted[page])}
        assert flash.owed == {page: wanted[page].tobytes() for page in spoilt}


def test_a_misdirected_write_is_owed_at_both_places() -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        drive = path(flash)
        await written(drive, at_page(pages(PAGES, b"a"), 0))
        flash.faults = DriveFaults(misdirected=1.0)
        assert await written(drive, at_page(pages(1, b"b"), 9)) == [True]

    flash = played(scenario)
    assert flash.owed[9] == pages(1, b"b").tobytes()
    (victim,) = flash.owed.keys() - {9}
    assert flash.owed[victim] == pages(PAGES, b"a").reshape(PAGES, -1)[victim].tobytes()
    assert np.array_equal(lying_at(flash, victim), pages(1, b"b"))
    assert {each.kind for each in flash.mishaps} == {Befell.MISDIRECTED}


def test_a_new_write_pays_what_a_page_is_owed() -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        drive = path(flash)
        await written(drive, at_page(pages(2, b"a"), 0))
        flash.rot(100)
        flash.unreadable.add(1)
        assert set(flash.owed) == {0}
        assert await read(drive, at_page(pages(1), 1)) == [False]
        await written(drive, at_page(pages(2, b"b"), 0))
        assert await read(drive, at_page(pages(2), 0)) == [True]

    flash = played(scenario)
    assert not flash.owed
    assert not flash.unreadable


def test_rot_on_a_read_leaves_flash_alone() -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        drive, target = path(flash), pages(1)
        await written(drive, at_page(pages(1, b"a"), 0))
        flash.faults = DriveFaults(rot_on_read=1.0)
        assert await read(drive, at_page(target, 0)) == [True]
        assert np.bitwise_count(target ^ pages(1, b"a")).sum() == 1
        assert flash.befell_since(0, 0, PAGE_BYTES, Befell.ROT_ON_READ)

    assert not played(scenario).owed


@pytest.mark.parametrize(
    ("faults", "is_read", "is_written", "is_flushed"),
    [
        (DriveFaults(read_errors=1.0), False, True, True),
        (DriveFaults(write_errors=1.0), True, False, False),
        (DriveFaults(no_space=1.0), True, False, True),
    ],
    ids=["read", "write", "space"],
)
def test_errors_are_told(faults: DriveFaults, is_read: bool, is_written: bool, is_flushed: bool) -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        drive = path(flash)
        assert await written(drive, at_page(pages(1, b"a"), 0)) == [is_written]
        assert await read(drive, at_page(pages(1), 0)) == [is_read]
        assert await drive.submit_flush() == is_flushed

    assert not played(scenario, faults).owed


def test_a_write_of_a_dead_process_lands_late_and_is_owed_for_what_it_spoils() -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        dying, living = path(flash), path(flash)
        abandoned = dying.submit_write(at_page(pages(2, b"a"), 0))
        dying.crash()
        assert await written(living, at_page(pages(1, b"b"), 0)) == [True]
        assert np.array_equal(lying_at(flash, 0), pages(1, b"b"))
        await asyncio.sleep(flash.faults.late_s)
        assert not abandoned.done()

    for seed in range(10):
        flash = played(scenario, DriveFaults(late=1.0), seed=seed)
        if np.array_equal(lying_at(flash, 0), pages(2, b"a")[:PAGE_BYTES]):
            assert flash.owed == {0: pages(1, b"b").tobytes()}
            assert flash.mishaps[-1].kind is Befell.LATE
            return
    pytest.fail("no write landed late")


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("late", [0.0, 1.0])
def test_writes_that_the_engine_of_a_dead_process_had_not_begun_never_land(late: float, is_cut: bool) -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        drive = path(flash, FlashIoSettings(drive_bytes_max=PAGE_BYTES))
        writes = [drive.submit_write(at_page(pages(PAGES, name), 0)) for name in (b"a", b"b", b"c")]
        assert len(flash.under_way) == 2, "as many as the engine's limit for short batches"
        if is_cut:
            flash.power_cut()
        drive.crash()
        await asyncio.sleep(2 * flash.faults.late_s)
        assert not any(write.done() for write in writes)

    landed = set()
    for seed in range(10):
        flash = played(scenario, DriveFaults(late=late), seed=seed)
        landed |= {name for name in (b"a", b"b", b"c") if sectors_of(flash.image, pages(PAGES, name))}
    assert landed == {b"a", b"b"}


def test_queued_writes_outlive_a_power_cut_of_the_drive() -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        drive = path(flash, FlashIoSettings(drive_bytes_max=PAGE_BYTES))
        writes = [written(drive, at_page(pages(PAGES, name), 0)) for name in (b"a", b"b", b"c")]
        ending = asyncio.gather(*writes)
        await asyncio.sleep(0)
        flash.power_cut()
        assert await ending == [[False], [False], [True]]

    assert np.array_equal(played(scenario).image, pages(PAGES, b"c"))


def test_a_write_that_failed_may_land_all_the_same() -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        assert await written(path(flash), at_page(pages(4, b"a"), 0)) == [False]
        await asyncio.sleep(flash.faults.late_s)

    faults = DriveFaults(write_errors=1.0, late_failures=1.0)
    landed = [
        np.array_equal(lying_at(played(scenario, faults, seed=seed), 0, 4), pages(4, b"a"))
        for seed in range(8)
    ]
    assert any(landed)


def test_a_fence_takes_what_is_under_way_for_late_wherever_it_lands() -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        under_way = path(flash).submit_write(at_page(pages(1, b"a"), 3))
        flash.fence()
        assert (await under_way).tolist() == [True]

    assert set(played(scenario).owed) == {3}


def test_a_write_is_as_old_as_the_decision_on_it() -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        decided, drive = flash.upcoming, path(flash)
        assert await written(path(flash), at_page(pages(1, b"a"), 1)) == [True]
        flash.fence()
        assert (await drive.submit_write(at_page(pages(1, b"b"), 2))).all()
        assert (await drive.submit_write(at_page(pages(1, b"c"), 3), decided=decided)).all()

    assert set(played(scenario).owed) == {3}


def test_a_read_of_a_dead_process_leaves_its_memory_alone() -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        drive, target = path(flash), pages(1)
        flash.image[:] = 7
        drive.submit_read(at_page(target, 0))
        drive.crash()
        await asyncio.sleep(1.0)
        assert not target.any()

    played(scenario)


def test_what_a_process_changes_in_its_memory_before_a_write_has_ended_may_be_what_lands() -> None:
    async def scenario(flash: SimulatedFlash) -> None:
        memory = pages(1, b"a")
        under_way = path(flash).submit_write(at_page(memory, 0))
        memory[:] = 7
        await under_way
        assert (lying_at(flash, 0) == 7).all()

    played(scenario)


def test_virtual_time_jumps_and_threads_have_no_part_in_it() -> None:
    async def scenario() -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await asyncio.sleep(86_400.0)
        return loop.time() - begun_s, await asyncio.to_thread(lambda: 3)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(scenario()) == (86_400.0, 3)


def test_what_can_never_happen_is_not_waited_for() -> None:
    async def scenario() -> None:
        await asyncio.get_running_loop().create_future()

    loop = VirtualLoop()
    never = scenario()
    task = loop.create_task(never)
    with pytest.raises(StandstillError):
        loop.run_until_complete(task)
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


def test_an_error_in_what_a_thread_would_do_reaches_who_waits() -> None:
    def fails() -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(fails)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scenario())
