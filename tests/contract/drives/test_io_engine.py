"""The I/O engine itself: modes, limits, the order of I/Os, and drives that hang."""

from __future__ import annotations

import asyncio
import fcntl
import multiprocessing
import os
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.contract.drives.drive_contract import DRIVE_BYTES, at_page, pages, pieces, tag_check, written
from tests.support.simulated.stuck_memory import StuckMemory

from ostraca_fabric.drives.file_drive import DriveSettings, FileDrive
from ostraca_fabric.drives.io_engine import FlashIoSettings, IoEngine
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.tables.digests import PieceState

PAGES = DRIVE_BYTES // PAGE_BYTES
LONG_PAGES = 128
"""Longer than a short batch, in one I/O."""

DENIED = """
import ctypes, errno, sys
from ostraca_fabric.drives.io_engine import IoEngine

class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("true", ctypes.c_ubyte), ("false", ctypes.c_ubyte),
                ("operand", ctypes.c_uint)]

class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("filters", ctypes.POINTER(Filter))]

LOAD, EQUALS, RETURN, REFUSE, ALLOW = 0x20, 0x15, 0x06, 0x00050000 | errno.EPERM, 0x7FFF0000
steps = [(LOAD, 0, 0, 0), (EQUALS, 0, 1, int(sys.argv[1])), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
filters = (Filter * 4)(*(Filter(*step) for step in steps))
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.prctl(38, 1, 0, 0, 0), "no new privileges"
program = Program(4, filters)
assert not libc.prctl(22, 2, ctypes.byref(program), 0, 0), "a filter of system calls"
engine = IoEngine()
print(engine.mode)
engine.close()
"""
"""Start an engine where a filter refuses the system call of the given number."""

IO_URING_SETUP, IO_URING_ENTER = 425, 426


def new_drive(folder: Path, engine: IoEngine, name: str = "drive") -> FileDrive:
    path = folder / name
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, DRIVE_BYTES)
    return FileDrive.open(DriveId(f"shelf/{name}"), str(path), engine=engine)


def threads() -> set[str]:
    """Return the ids of this process's threads, those of C included."""
    return {each.name for each in Path("/proc/self/task").iterdir()}


class Pipe:
    """Drive whose reads hang until the test feeds bytes, through io_uring alone."""

    def __init__(self, folder: Path, engine: IoEngine) -> None:
        path = folder / "pipe"
        os.mkfifo(path)
        self.descriptor = os.open(path, os.O_RDWR)
        self.drive = FileDrive(
            DriveId("shelf/pipe"),
            os.dup(self.descriptor),
            size_bytes=DRIVE_BYTES,
            has_volatile_cache=False,
            is_file=True,
            settings=DriveSettings(),
            engine=engine,
        )

    def feed(self, page_count: int) -> None:
        threading.Thread(target=os.write, args=(self.descriptor, bytes(page_count * PAGE_BYTES))).start()

    def feed_first(self) -> None:
        """Feed a page, and wait until a read under way has taken it."""
        os.write(self.descriptor, bytes(PAGE_BYTES))
        while int.from_bytes(fcntl.ioctl(self.descriptor, termios.FIONREAD, bytes(4)), sys.byteorder):
            os.sched_yield()

    def close(self) -> None:
        self.drive.close()
        os.close(self.descriptor)


@pytest.fixture
def engine() -> Iterator[IoEngine]:
    made = IoEngine()
    if made.mode != "io_uring":
        made.close()
        pytest.skip("this kernel or container refuses io_uring")
    yield made
    made.close()


@pytest.mark.parametrize("number", [IO_URING_SETUP, IO_URING_ENTER])
def test_where_a_filter_refuses_io_uring_threads_take_its_place(number: int) -> None:
    told = subprocess.run(
        [sys.executable, "-c", DENIED, str(number)], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.split() == ["threads"]


def test_the_mode_can_be_chosen(engine: IoEngine) -> None:
    assert engine.mode == "io_uring"
    other = IoEngine(FlashIoSettings(io_uring=False))
    assert other.mode == "threads"
    other.close()


async def test_thousands_of_ios_on_many_drives_all_end(tmp_path: Path, engine: IoEngine) -> None:
    drives = [new_drive(tmp_path, engine, f"drive-{number}") for number in range(4)]
    source, target = pages(PAGES, b"t"), pages(PAGES)
    apart = np.concatenate([np.arange(0, PAGES, 2), np.arange(1, PAGES, 2)]).tolist()
    for drive in drives:
        assert all(await written(drive, pieces(source, apart, apart)))
    wanted = pieces(target, apart, apart)
    ends = await asyncio.gather(
        *(drive.submit_read(wanted, tag_check(wanted, source)) for drive in drives for _ in range(3))
    )
    assert np.concatenate(ends).all()
    assert np.array_equal(target, source)
    for drive in drives:
        drive.close()


async def test_a_hung_drive_stops_no_other(tmp_path: Path) -> None:
    engine = IoEngine(FlashIoSettings(bytes_max=1 << 20))  # all of them taken by the drive that hangs
    pipe, other = Pipe(tmp_path, engine), new_drive(tmp_path, engine)
    if engine.mode == "io_uring":
        hung = [pipe.drive.submit_read(at_page(pages(LONG_PAGES), 0)) for _ in range(16)]
        source = pages(LONG_PAGES, b"h")
        for page in range(0, PAGES, LONG_PAGES):
            assert await asyncio.wait_for(written(other, at_page(source, page)), 30.0) == [True]
        assert not any(each.done() for each in hung)
        pipe.feed(16 * LONG_PAGES)
        assert np.concatenate(await asyncio.gather(*hung)).all()
    pipe.close()
    other.close()
    engine.close()


@pytest.mark.parametrize("io_uring", [True, False])
async def test_a_flush_asks_the_device(tmp_path: Path, *, io_uring: bool) -> None:
    engine = IoEngine(FlashIoSettings(io_uring=io_uring))
    pipe, file = Pipe(tmp_path, engine), new_drive(tmp_path, engine)
    assert not await pipe.drive.submit_flush(), "a pipe can't be flushed, and says so"
    assert pipe.drive.last_error.startswith("flush: ")
    assert await file.submit_flush()
    pipe.close()
    file.close()
    engine.close()


async def test_hung_reads_take_few_threads_of_the_pool(tmp_path: Path) -> None:
    engine = IoEngine(FlashIoSettings(io_uring=False))
    drives = [new_drive(tmp_path, engine, f"drive-{number}") for number in range(4)]
    before = threads()
    with StuckMemory(64 * PAGE_BYTES) as memory:
        hung = [
            drive.submit_read(pieces(memory.array, [page], [2 * page]))
            for drive in drives[:3]
            for page in range(32)
        ]
        source = pages(4, b"p")
        for page in range(0, 64, 4):
            assert await written(drives[3], at_page(source, page)) == [True]
        assert not any(each.done() for each in hung)
        assert len(threads() - before) < 3 * 8 + 16
        memory.release()
        assert np.concatenate(await asyncio.gather(*hung)).all()
        for drive in drives:
            drive.close()
        engine.close()


async def test_progress_of_a_read_is_told_while_the_rest_hangs(tmp_path: Path, engine: IoEngine) -> None:
    pipe, told = Pipe(tmp_path, engine), list[int]()
    wanted = pieces(pages(5), range(5), range(0, 10, 2))
    some_told = asyncio.Event()

    def tell() -> None:
        told.append(int(np.count_nonzero(check.states)))
        if told[-1] >= 4:
            some_told.set()

    check = replace(tag_check(wanted, pages(5)), progress_bytes=2 * PAGE_BYTES, listeners=[tell])
    reading = pipe.drive.submit_read(wanted, check)
    pipe.feed(4)
    await some_told.wait()
    assert not reading.done()
    assert told[-1] == 4
    assert len(told) <= 2, "once for two pages"
    pipe.feed(1)
    assert (await reading).all()
    assert (check.states == PieceState.GOOD).all()
    pipe.close()


async def test_short_batches_overtake_long_ones_and_do_not_starve_them(tmp_path: Path) -> None:
    engine = IoEngine(FlashIoSettings(drive_bytes_max=PAGE_BYTES))
    pipe, order = Pipe(tmp_path, engine), list[str]()

    def submit(name: str, page_count: int) -> asyncio.Future[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        reading = pipe.drive.submit_read(at_page(pages(page_count), 0))
        reading.add_done_callback(lambda _: order.append(name))
        return reading

    if engine.mode == "io_uring":
        under_way = [submit("first", LONG_PAGES)]
        pipe.feed_first()
        under_way.append(submit("long", LONG_PAGES))
        under_way += [submit("short", 1) for _ in range(40)]
        pipe.feed(2 * LONG_PAGES + 39)
        await asyncio.gather(*under_way)
        assert (order.pop(0), len(order)) == ("first", 41)
        assert 1 <= order.index("long") <= 8
    pipe.close()
    engine.close()


async def test_a_child_process_leaves_the_engine_of_its_parent_alone(
    tmp_path: Path, engine: IoEngine
) -> None:
    drive = new_drive(tmp_path, engine)
    writing = drive.submit_write(at_page(pages(PAGES, b"c"), 0))
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert (await writing).all()
    assert await written(drive, at_page(pages(1, b"d"), 0)) == [True]
    drive.close()


def test_an_engine_serves_one_loop_after_the_other(tmp_path: Path, engine: IoEngine) -> None:
    drive = new_drive(tmp_path, engine)
    for _ in range(2):
        assert asyncio.run(written(drive, Pieces.one(pages(1), drive_offset=0))) == [True]
    drive.close()
