"""Every drive passes the same contract; then what is each one's own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvloop
from tests.contract.drive_contract import DRIVE_BYTES, RUNS_QUEUED_MAX, DriveContract, pages

from ostraca_fabric.adapters.file_drive import DriveSettings, FileDrive
from ostraca_fabric.errors import DriveError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.ids import DriveId
from ostraca_fabric.ports.drive import Run
from ostraca_fabric.testing.memory_drive import MemoryDrive

DRIVE = DriveId("shelf/drive-0")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "drive.img"
    with made.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, DRIVE_BYTES)
    return made


def opened(path: Path, *, is_direct: bool = True) -> FileDrive:
    return FileDrive.open(
        DRIVE, str(path), DriveSettings(is_direct=is_direct, runs_queued_max=RUNS_QUEUED_MAX)
    )


@pytest.fixture
def file_drive(path: Path) -> Iterator[FileDrive]:
    made = opened(path)
    yield made
    made.close()


class TestFileDrive(DriveContract):
    @pytest.fixture
    async def drive(self, path: Path) -> AsyncIterator[FileDrive]:
        made = opened(path)
        yield made
        made.close()


class TestBufferedFileDrive(DriveContract):
    @pytest.fixture
    async def drive(self, path: Path) -> AsyncIterator[FileDrive]:
        made = opened(path, is_direct=False)
        yield made
        made.close()


class TestMemoryDrive(DriveContract):
    @pytest.fixture
    def drive(self) -> MemoryDrive:
        return MemoryDrive(DRIVE, DRIVE_BYTES, runs_queued_max=RUNS_QUEUED_MAX)


def test_a_file_drive_works_on_uvloop_too(path: Path) -> None:
    async def scenario() -> bool:
        drive = opened(path)
        written, read = pages(4, b"u"), pages(4)
        assert await drive.submit_write([Run(0, (written,))]) == [True]
        assert await drive.submit_flush()
        assert await drive.submit_read([Run(0, (read,))]) == [True]
        drive.close()
        return read == written

    assert uvloop.run(scenario())


def test_blocks_outlive_the_process_that_wrote_them(path: Path) -> None:
    async def write() -> None:
        drive = opened(path)
        await drive.submit_write([Run(8 * PAGE_BYTES, (pages(2, b"w"),))])
        drive.close()

    uvloop.run(write())
    assert path.read_bytes()[8 * PAGE_BYTES : 10 * PAGE_BYTES] == bytes(pages(2, b"w"))
    assert path.stat().st_size == DRIVE_BYTES


async def test_closing_waits_for_what_is_under_way(path: Path) -> None:
    drive = opened(path)
    future = drive.submit_write([Run(0, (pages(256, b"x"),))])
    drive.close()
    assert await future == [True]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(f"ostraca-{DRIVE}")]


async def test_a_file_cut_short_fails_the_runs_beyond_its_end_and_says_so(
    file_drive: FileDrive, path: Path
) -> None:
    os.truncate(path, 3 * PAGE_BYTES)
    runs = [Run(0, (pages(2),)), Run(2 * PAGE_BYTES, (pages(2),)), Run(6 * PAGE_BYTES, (pages(1),))]
    assert await file_drive.submit_read(runs) == [True, False, False]
    assert file_drive.failures == 2
    assert "came to an end" in file_drive.last_error


async def test_an_error_of_the_device_fails_the_run_and_is_counted(path: Path) -> None:
    full = FileDrive(
        DRIVE,
        os.open("/dev/full", os.O_RDWR),
        size_bytes=DRIVE_BYTES,
        has_volatile_cache=False,
        settings=DriveSettings(),
    )
    assert await full.submit_write([Run(0, (pages(1),)), Run(PAGE_BYTES, (pages(1),))]) == [False, False]
    assert (full.failures, full.last_error.rpartition(": ")[2]) == (2, os.strerror(28))
    full.close()


async def test_a_drive_that_keeps_failing_does_not_fill_the_log(
    file_drive: FileDrive, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            await file_drive.submit_read([Run(DRIVE_BYTES, (pages(1),))])
    assert file_drive.failures == 20
    assert len(caplog.records) == 5  # the 1st, 2nd, 4th, 8th and 16th


async def test_a_cancelled_future_leaves_the_drive_in_order(file_drive: FileDrive) -> None:
    future = file_drive.submit_write([Run(0, (pages(64, b"y"),))])
    future.cancel()
    read = pages(64)
    while file_drive.queued:
        await file_drive.submit_flush()
    assert await file_drive.submit_read([Run(0, (read,))]) == [True]
    assert read == pages(64, b"y")


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
    assert await drive.submit_write([Run(0, (memory,)), Run(3 * PAGE_BYTES, (memory,))]) == [True, False]
    assert drive.bytes[3 * PAGE_BYTES : 5 * PAGE_BYTES] == bytes(memory[:100]) + bytes(2 * PAGE_BYTES - 100)
    assert await drive.submit_read([Run(0, (memory,)), Run(2 * PAGE_BYTES, (memory,))]) == [False, True]
    drive.mend()
    drive.flip_bit(5, bit=3)
    read = pages(2)
    assert await drive.submit_read([Run(0, (read,))]) == [True]
    assert read[5] == pages(2, b"z")[5] ^ 8
