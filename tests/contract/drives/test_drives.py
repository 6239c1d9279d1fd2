"""Every drive passes the same contract; then what is each one's own."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import uvloop
from tests.contract.drives.drive_contract import (
    DRIVE_BYTES,
    PIECES_QUEUED_MAX,
    DriveContract,
    at_page,
    pages,
    pieces,
    read,
    tag_check,
    written,
)
from tests.contract.drives.engines import ENGINES, new_engine
from tests.support.invariants import check_health
from tests.support.nvme_tcp.tcp_target import TcpTarget
from tests.support.simulated.drives.memory_drive import MemoryDrive
from tests.support.simulated.drives.simulated_drive import SimulatedDrive
from tests.support.simulated.drives.simulated_flash import SimulatedFlash

from ostraca_dpu_agent.adapters.nvme_tcp.tcp_drive import TcpDrive
from ostraca_dpu_agent.adapters.nvme_tcp.tcp_paths import TcpPaths
from ostraca_fabric.drives.drive_health import HealthSettings
from ostraca_fabric.drives.file_drive import DriveSettings, FileDrive
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.drives.io_engine import DriveEngine, FlashIoSettings
from ostraca_fabric.errors import DriveError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.model.target import Target

DRIVE = DriveId("shelf/drive-0")
NQN, HOST = "nqn.2025-01.io.ostraca:shelf", "nqn.2025-01.io.ostraca:host"
NGUID = "0f" * 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "drive.img"
    with made.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, DRIVE_BYTES)
    return made


def opened(path: Path, *, is_direct: bool = True, engine: DriveEngine | None = None) -> FileDrive:
    settings = DriveSettings(is_direct=is_direct, pieces_queued_max=PIECES_QUEUED_MAX)
    return FileDrive.open(DRIVE, str(path), settings, engine=engine)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[DriveEngine]:
    made = new_engine(request.param)
    yield made
    made.close()


@pytest.fixture
def file_drive(path: Path, engine: DriveEngine) -> Iterator[FileDrive]:
    made = opened(path, engine=engine)
    yield made
    made.close()


class TestFileDrive(DriveContract):
    @pytest.fixture
    async def drive(self, file_drive: FileDrive) -> FileDrive:
        return file_drive


class TestTcpDrive(DriveContract):
    always_tells_progress = True

    @pytest.fixture
    async def drive(self, tmp_path: Path) -> AsyncIterator[TcpDrive]:
        target = TcpTarget(tmp_path, NQN, {NGUID: DRIVE_BYTES})
        paths = TcpPaths(HOST, str(uuid.uuid4()))
        await paths.connect(Target(NQN, (target.controller,)), "")
        made = TcpDrive(DRIVE, paths.path_to(NQN, NGUID), pieces_queued_max=PIECES_QUEUED_MAX)
        yield made
        made.close()
        paths.close()
        target.stop()


class TestBufferedFileDrive(DriveContract):
    @pytest.fixture
    async def drive(self, path: Path) -> AsyncIterator[FileDrive]:
        made = opened(path, is_direct=False)
        yield made
        made.close()


class TestMemoryDrive(DriveContract):
    @pytest.fixture
    def drive(self) -> MemoryDrive:
        return MemoryDrive(DRIVE, DRIVE_BYTES, pieces_queued_max=PIECES_QUEUED_MAX)


class TestSimulatedDrive(DriveContract):
    @pytest.fixture
    def drive(self) -> SimulatedDrive:
        flash = SimulatedFlash(DRIVE_BYTES, random.Random(1))
        return SimulatedDrive(DRIVE, flash, pieces_queued_max=PIECES_QUEUED_MAX)


class TestSimulatedDriveWithAVolatileCache(DriveContract):
    @pytest.fixture
    def drive(self) -> SimulatedDrive:
        flash = SimulatedFlash(DRIVE_BYTES, random.Random(2), has_volatile_cache=True)
        return SimulatedDrive(DRIVE, flash, pieces_queued_max=PIECES_QUEUED_MAX)


class TestGuardedDrive(DriveContract):
    @pytest.fixture
    async def drive(self, path: Path) -> AsyncIterator[GuardedDrive]:
        made = GuardedDrive(opened(path), HealthSettings(), time.monotonic)
        yield made
        check_health(made.health)
        made.close()


async def test_a_file_drive_says_that_it_is_a_file(file_drive: FileDrive) -> None:
    assert file_drive.is_file
    assert not file_drive.has_volatile_cache


def test_a_file_drive_works_on_uvloop_too(path: Path) -> None:
    async def scenario() -> bool:
        drive = opened(path)
        source, target = pages(4, b"u"), pages(4)
        assert await written(drive, at_page(source, 0)) == [True]
        assert await drive.submit_flush()
        assert await read(drive, at_page(target, 0)) == [True]
        drive.close()
        return np.array_equal(target, source)

    assert uvloop.run(scenario())


def test_blocks_outlive_the_process_that_wrote_them(path: Path) -> None:
    async def write() -> None:
        drive = opened(path)
        await drive.submit_write(at_page(pages(2, b"w"), 8))
        drive.close()

    uvloop.run(write())
    assert path.read_bytes()[8 * PAGE_BYTES : 10 * PAGE_BYTES] == pages(2, b"w").tobytes()
    assert path.stat().st_size == DRIVE_BYTES


async def test_closing_waits_for_what_is_under_way(path: Path, engine: DriveEngine) -> None:
    drive = opened(path, engine=engine)
    future = drive.submit_write(at_page(pages(256, b"x"), 0))
    drive.close()
    assert (await future).tolist() == [True]


async def test_a_file_cut_short_fails_the_reads_beyond_its_end_and_says_so(
    file_drive: FileDrive, path: Path
) -> None:
    os.truncate(path, 3 * PAGE_BYTES)
    # The second joins the third in one I/O, of which a part can be read.
    assert await read(file_drive, pieces(pages(4), range(4), [0, 2, 3, 6])) == [True, False, False, False]
    assert file_drive.failures == 2
    assert file_drive.last_error.endswith(
        f"the drive was cut short: {3 * PAGE_BYTES} bytes now, {DRIVE_BYTES} bytes at opening"
    )


@pytest.mark.parametrize("name", ENGINES)
async def test_batches_of_many_sizes_lose_and_repeat_no_piece(path: Path, name: str) -> None:
    engine = new_engine(name, FlashIoSettings(drive_bytes_max=64 << 10))
    drive = FileDrive.open(DRIVE, str(path), engine=engine)
    rng = np.random.default_rng(7)
    for count in (1, 2, 3, 4, 7, 64, 300):
        lengths = rng.integers(1, 4, count)
        gaps = rng.integers(0, 3, count)
        ends = np.cumsum(lengths + gaps)
        on, at = (ends - lengths).tolist(), (np.cumsum(lengths) - lengths).tolist()
        source, target = pages(int(lengths.sum()), bytes([count % 256])), pages(int(lengths.sum()))
        wanted = pieces(target, at, on, lengths.tolist())
        check = tag_check(wanted, source)
        assert all(await written(drive, pieces(source, at, on, lengths.tolist())))
        assert (await drive.submit_read(wanted, check)).all()
        assert check.was_read.all()
        assert np.array_equal(target, source)
    drive.close()
    engine.close()


@pytest.mark.parametrize("at", [-1, 2, 1 << 40])
async def test_a_piece_outside_of_its_memory_moves_nothing(file_drive: FileDrive, at: int) -> None:
    memory = pages(2, b"o")
    assert await written(file_drive, pieces(memory, [0, at], [0, 1])) == [False, False]
    target = pages(2, b"p")
    assert await read(file_drive, at_page(target, 0)) == [True]
    assert not target.any()


async def test_an_error_of_the_device_fails_the_run_and_is_counted(engine: DriveEngine) -> None:
    full = FileDrive(
        DRIVE,
        os.open("/dev/full", os.O_RDWR),
        size_bytes=DRIVE_BYTES,
        has_volatile_cache=False,
        is_file=False,
        settings=DriveSettings(),
        path="/dev/full",
        engine=engine,
    )
    assert await written(full, pieces(pages(2), [0, 1], [0, 4])) == [False, False]
    assert (full.failures, full.last_error.rpartition(": ")[2]) == (2, os.strerror(28))
    assert await full.submit_look() == (
        "can't be written at /dev/full (the file system is full): free some space there"
    )
    full.close()


async def test_a_file_that_is_moved_while_it_is_watched_is_told_once_and_goes_on(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drive = GuardedDrive(opened(path), HealthSettings(), time.monotonic)
    await drive.look()
    assert (drive.why, caplog.messages) == ("", [])
    kept = path.with_name("kept")
    os.rename(path, kept)  # noqa: PTH104 (one call, and at once)
    for _ in range(2):
        await drive.look()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"Drive {DRIVE} is no longer found at {path} ")
    assert drive.status().why == drive.displacement != ""
    assert await written(drive, at_page(pages(1), 0)) == [True]
    kept.rename(path)
    await drive.look()
    assert drive.status().why == ""
    drive.close()


async def test_a_drive_that_is_moved_and_suspect_says_both(path: Path) -> None:
    once = HealthSettings(suspect_faults=1)
    drive = GuardedDrive(opened(path), once, time.monotonic)
    drive.note_damage(0)
    suspect = drive.why
    os.unlink(path)  # noqa: PTH108 (one call, and at once)
    await drive.look()
    assert suspect
    assert drive.why == f"{suspect}; it {drive.displacement}" != f"{suspect}; it "
    drive.close()


async def test_a_drive_that_keeps_failing_does_not_fill_the_log(
    file_drive: FileDrive, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            await file_drive.submit_read(at_page(pages(1), DRIVE_BYTES // PAGE_BYTES))
    assert file_drive.failures == 20
    assert len(caplog.records) == 5  # the 1st, 2nd, 4th, 8th and 16th


async def test_a_cancelled_future_leaves_the_drive_in_order(file_drive: FileDrive) -> None:
    future = file_drive.submit_write(at_page(pages(64, b"y"), 0))
    future.cancel()
    target = pages(64)
    while file_drive.queued:
        await file_drive.submit_flush()
    assert await read(file_drive, at_page(target, 0)) == [True]
    assert np.array_equal(target, pages(64, b"y"))


async def test_a_cancelled_look_does_not_hinder_the_close(file_drive: FileDrive) -> None:
    for _ in range(20):
        file_drive.submit_look().cancel()
        await asyncio.sleep(0)
    await asyncio.gather(file_drive.submit_look())


@pytest.mark.parametrize("fault", ["missing", "directory"])
def test_a_drive_that_can_not_be_opened_says_where_and_why(tmp_path: Path, fault: str) -> None:
    place = tmp_path if fault == "directory" else tmp_path / "nothing"
    with pytest.raises(DriveError, match=str(place)):
        FileDrive.open(DRIVE, str(place))


def test_whether_to_flush_can_be_set(path: Path) -> None:
    for volatile in (True, False):
        drive = FileDrive.open(DRIVE, str(path), DriveSettings(has_volatile_cache=volatile))
        assert drive.has_volatile_cache is volatile
        drive.close()


async def test_planted_faults_of_a_memory_drive_befall_the_bytes_they_name() -> None:
    drive = MemoryDrive(DRIVE, DRIVE_BYTES)
    drive.fail_reads(PAGE_BYTES, 1)
    drive.fail_writes(4 * PAGE_BYTES, PAGE_BYTES, written_bytes=100)
    memory = pages(2, b"z")
    assert await written(drive, pieces(memory, [0, 0], [0, 3], 2)) == [True, False]
    assert drive.bytes[3 * PAGE_BYTES : 5 * PAGE_BYTES] == memory[:100].tobytes() + bytes(
        2 * PAGE_BYTES - 100
    )
    assert await read(drive, pieces(memory, [0, 0], [0, 3], 2)) == [False, True]
    drive.mend()
    drive.flip_bit(5, bit=3)
    target = pages(2)
    assert await read(drive, at_page(target, 0)) == [True]
    assert target[5] == pages(2, b"z")[5] ^ 8
