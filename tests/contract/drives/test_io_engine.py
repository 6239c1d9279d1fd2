"""The I/O engine itself: modes, limits, the order of I/Os, and drives that hang."""

from __future__ import annotations

import asyncio
import errno
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
from numpy.typing import NDArray
from tests.contract.drives.drive_contract import DRIVE_BYTES, at_page, pages, pieces, tag_check, written
from tests.contract.drives.engines import ENGINES, PATIENT_ENGINES, new_engine
from tests.support.simulated.stuck_memory import StuckMemory

from ostraca_fabric.drives.file_drive import DriveSettings, FileDrive, LoopIoEngine
from ostraca_fabric.drives.io_engine import DriveEngine, FlashIoSettings, IoEnd, IoEngine, IoOperation
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.tables.digests import CheckState, TagCheck, tags_of

PAGES = DRIVE_BYTES // PAGE_BYTES
LONG_PAGES = 128
"""Longer than a short batch, in one I/O."""

UNTOUCHED = 0xEE

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

SHORT_OF_MEMORY = """
import resource, select
from pathlib import Path
from ostraca_fabric.drives.io_engine import FlashIoSettings, IoEngine, IoOperation

in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (40 << 20), resource.RLIM_INFINITY))
engine = IoEngine(FlashIoSettings(checkers=8))
ends = []
with open("/dev/null", "wb") as device:
    drive = engine.attach(device.fileno(), 1)
    engine.submit(drive, IoOperation.FLUSH, None, None, ends.append)
    assert select.select([engine.descriptor], [], [], 10)[0], "the flush ends"
    engine.take()
    engine.detach(drive)
engine.close()
print(engine.mode, len(ends))
"""
"""Start an engine with memory for some of its threads' stacks alone, and flush."""


def new_drive(folder: Path, engine: DriveEngine, name: str = "drive") -> FileDrive:
    path = folder / name
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, DRIVE_BYTES)
    return FileDrive.open(DriveId(f"shelf/{name}"), str(path), engine=engine)


def threads() -> set[str]:
    """Return the ids of this process's threads, those of C included."""
    return {each.name for each in Path("/proc/self/task").iterdir()}


def ended_process() -> int:
    """Return the id of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


class Pipe:
    """Drive whose reads hang until the test feeds bytes."""

    def __init__(self, folder: Path, engine: DriveEngine) -> None:
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

    async def feed_first(self) -> None:
        """Feed a page, and wait until a read under way has taken it."""
        os.write(self.descriptor, bytes(PAGE_BYTES))
        while self._unread_bytes():  # noqa: ASYNC110 (a pipe has no event for it)
            await asyncio.sleep(0)

    def _unread_bytes(self) -> int:
        unread = fcntl.ioctl(self.descriptor, termios.FIONREAD, bytes(4))
        return int.from_bytes(unread, sys.byteorder)

    def close(self) -> None:
        self.drive.close()
        os.close(self.descriptor)


@pytest.fixture(params=PATIENT_ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[DriveEngine]:
    made = new_engine(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("number", [IO_URING_SETUP, IO_URING_ENTER])
def test_where_a_filter_refuses_io_uring_threads_take_its_place(number: int) -> None:
    told = subprocess.run(
        [sys.executable, "-c", DENIED, str(number)], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.split() == ["threads"]


def test_without_memory_for_the_threads_beside_io_uring_a_pool_takes_its_place() -> None:
    told = subprocess.run(
        ["sh", "-c", 'ulimit -s 8192; exec "$@"', "sh", sys.executable, "-c", SHORT_OF_MEMORY],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert told.stdout.split() == ["threads", "1"]


@pytest.mark.parametrize("mode", ["io_uring", "threads"])
def test_the_mode_can_be_chosen(mode: str) -> None:
    engine = new_engine(mode)
    assert isinstance(engine, IoEngine)
    assert engine.mode == mode
    engine.close()


async def test_thousands_of_ios_on_many_drives_all_end(tmp_path: Path, engine: DriveEngine) -> None:
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


@pytest.mark.parametrize("name", PATIENT_ENGINES)
async def test_a_hung_drive_stops_no_other(tmp_path: Path, name: str) -> None:
    engine = new_engine(name, FlashIoSettings(bytes_max=1 << 20))  # all of them taken by the drive that hangs
    pipe, other = Pipe(tmp_path, engine), new_drive(tmp_path, engine)
    hung = [pipe.drive.submit_read(at_page(pages(LONG_PAGES), 0)) for _ in range(16)]
    source = pages(LONG_PAGES, b"h")
    for page in range(0, PAGES, LONG_PAGES):
        assert await asyncio.wait_for(written(other, at_page(source, page)), 30.0) == [True]
    wanted = pieces(pages(PAGES), range(0, PAGES, 2), range(0, PAGES, 2))
    check = tag_check(wanted, np.tile(source, PAGES // LONG_PAGES))
    checked = await asyncio.wait_for(other.submit_read(wanted, check), 30.0)
    assert checked.all(), "each read begins after the check of the last"
    assert not any(each.done() for each in hung)
    pipe.feed(16 * LONG_PAGES)
    assert np.concatenate(await asyncio.gather(*hung)).all()
    pipe.close()
    other.close()
    engine.close()


async def test_checked_reads_give_all_bytes_under_way_back(tmp_path: Path) -> None:
    engine = LoopIoEngine(FlashIoSettings(io_uring=False, bytes_max=2 * LONG_PAGES * PAGE_BYTES))
    drive, source = new_drive(tmp_path, engine), pages(PAGES, b"b")
    assert await written(drive, at_page(source, 0)) == [True]
    for _ in range(4):
        wanted = pieces(pages(PAGES), range(PAGES), range(PAGES))
        assert (await drive.submit_read(wanted, tag_check(wanted, source))).all()
    with StuckMemory(LONG_PAGES * PAGE_BYTES) as memory:
        hung = drive.submit_read(at_page(memory.array, 0))
        beside = drive.submit_read(at_page(pages(LONG_PAGES), LONG_PAGES))
        assert (await asyncio.wait_for(beside, 30.0)).all()
        assert not hung.done()
        memory.release()
        assert (await hung).all()
    drive.close()
    engine.close()


async def test_checked_reads_go_on_beside_hung_ones_of_the_same_drive(tmp_path: Path) -> None:
    engine = LoopIoEngine(FlashIoSettings(io_uring=False))
    drive, source = new_drive(tmp_path, engine), pages(PAGES, b"b")
    assert await written(drive, at_page(source, 0)) == [True]
    for _ in range(3):  # stalled reads take all threads of a drive, after a second: slow machines try again
        with StuckMemory(7 * PAGE_BYTES) as memory:
            hung = [drive.submit_read(pieces(memory.array, [page], [page])) for page in range(7)]
            wanted = pieces(pages(PAGES), range(0, PAGES, 256), range(0, PAGES, 256), 256)
            beside = drive.submit_read(wanted, tag_check(wanted, source))
            ended, _ = await asyncio.wait([beside], timeout=0.9)
            memory.release()
            assert np.concatenate(await asyncio.gather(*hung, beside)).all()
        if ended:
            break
    assert ended
    drive.close()
    engine.close()


@pytest.mark.parametrize("name", ENGINES)
async def test_a_flush_asks_the_device(tmp_path: Path, name: str) -> None:
    engine = new_engine(name)
    pipe, file = Pipe(tmp_path, engine), new_drive(tmp_path, engine)
    assert not await pipe.drive.submit_flush(), "a pipe can't be flushed, and says so"
    assert pipe.drive.last_error.startswith("flush: ")
    assert await file.submit_flush()
    pipe.close()
    file.close()
    engine.close()


async def test_hung_reads_take_few_threads_of_the_pool(tmp_path: Path) -> None:
    engine = LoopIoEngine(FlashIoSettings(io_uring=False))
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


async def test_progress_of_a_read_is_told_while_the_rest_hangs(tmp_path: Path, engine: DriveEngine) -> None:
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
    assert (check.states == CheckState.GOOD).all()
    pipe.close()


@pytest.mark.parametrize("engine_name", PATIENT_ENGINES)
async def test_short_batches_overtake_long_ones_and_do_not_starve_them(
    tmp_path: Path, engine_name: str
) -> None:
    engine = new_engine(engine_name, FlashIoSettings(drive_bytes_max=PAGE_BYTES))
    pipe, order = Pipe(tmp_path, engine), list[str]()

    def submit(name: str, page_count: int) -> asyncio.Future[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        reading = pipe.drive.submit_read(at_page(pages(page_count), 0))
        reading.add_done_callback(lambda _: order.append(name))
        return reading

    under_way = [submit("first", LONG_PAGES)]
    await pipe.feed_first()
    under_way.append(submit("long", LONG_PAGES))
    under_way += [submit("short", 1) for _ in range(40)]
    pipe.feed(2 * LONG_PAGES + 39)
    await asyncio.gather(*under_way)
    assert (order.pop(0), len(order)) == ("first", 41)
    assert 1 <= order.index("long") <= 8
    pipe.close()
    engine.close()


async def test_a_child_process_leaves_the_engine_of_its_parent_alone(tmp_path: Path) -> None:
    engine = new_engine("io_uring")
    drive = new_drive(tmp_path, engine)
    writing = drive.submit_write(at_page(pages(PAGES, b"c"), 0))
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert (await writing).all()
    assert await written(drive, at_page(pages(1, b"d"), 0)) == [True]
    drive.close()
    engine.close()


def test_an_engine_serves_one_loop_after_the_other(tmp_path: Path, engine: DriveEngine) -> None:
    drive = new_drive(tmp_path, engine)
    for _ in range(2):
        assert asyncio.run(written(drive, Pieces.one(pages(1), drive_offset=0))) == [True]
    drive.close()


async def _read_process(
    engine: LoopIoEngine, drive: int, wanted: Pieces, check: TagCheck | None
) -> tuple[IoEnd, NDArray[np.uint8]]:
    """Read memory of a process; return the end, and a state per piece."""
    end: asyncio.Future[IoEnd] = asyncio.get_running_loop().create_future()
    states = np.full(len(wanted), UNTOUCHED, np.uint8) if check is None else check.states
    assert engine.submit(drive, IoOperation.READ, wanted, check, end.set_result, states=states)
    return await end, states


@pytest.mark.parametrize("is_checked", [False, True])
async def test_memory_of_a_process_is_read_like_a_drive_of_this_size(*, is_checked: bool) -> None:
    """Blocks of odd lengths at odd addresses: two neighbours, two apart, and two that end beyond the size."""
    lengths = np.array([5000, PAGE_BYTES, 1, PAGE_BYTES - 1, 10, 1], np.uint32)
    sources = np.array([3, 5003, 20_001, 9_999, 30_000, 30_005], np.int64)
    source, target = pages(8, b"p"), np.full(12 * PAGE_BYTES, UNTOUCHED, np.uint8)
    places = np.array([4, 0, 2, 10, 6, 8], np.int64) * PAGE_BYTES
    expected = target.copy()
    for piece in range(4):
        length, place = int(lengths[piece]), int(places[piece])
        if is_checked:
            expected[place : place + -(-length // PAGE_BYTES) * PAGE_BYTES] = 0
        expected[place : place + length] = source[sources[piece] :][:length]
    engine = LoopIoEngine(FlashIoSettings(io_uring=False))
    drive = engine.attach_process(os.getpid(), source.ctypes.data + 30_005)
    wanted, check = Pieces(target, places, sources + source.ctypes.data, lengths), None
    if is_checked:
        seeds = np.arange(6, dtype=np.uint64)
        check = TagCheck(wanted, lengths, seeds, tags_of(source, sources, lengths, seeds))
        check.tags[2] ^= 1
    end, states = await _read_process(engine, drive, wanted, check)
    assert end == IoEnd(2, source.ctypes.data + 30_005, 0)
    third = CheckState.DAMAGED if is_checked else CheckState.GOOD
    assert states.tolist() == [CheckState.GOOD] * 2 + [third, CheckState.GOOD] + [CheckState.PENDING] * 2
    assert np.array_equal(target, expected), "the rest of the last page of checked blocks is zero"
    engine.detach(drive)
    engine.close()


async def test_a_process_that_has_ended_fails_each_read() -> None:
    engine, target = LoopIoEngine(FlashIoSettings(io_uring=False)), np.full(PAGE_BYTES, UNTOUCHED, np.uint8)
    drive = engine.attach_process(ended_process(), 1 << 47)
    address = target.ctypes.data
    end, states = await _read_process(engine, drive, Pieces.one(target, drive_offset=address), None)
    assert (end, states.tolist()) == (IoEnd(1, address, errno.ESRCH), [CheckState.PENDING])
    assert (target == UNTOUCHED).all()
    engine.detach(drive)
    engine.close()


async def _failed_ios(name: str, path: str, wanted: Pieces) -> int:
    engine = new_engine(name)
    drive = FileDrive(
        DriveId("shelf/full"),
        os.open(path, os.O_RDWR),
        size_bytes=wanted.drive_offsets[-1] // 2,
        has_volatile_cache=False,
        is_file=False,
        settings=DriveSettings(),
        engine=engine,
    )
    assert not (await drive.submit_write(wanted)).any()
    drive.close()
    engine.close()
    return drive.failures


@pytest.mark.parametrize("seed", range(12))
async def test_all_engines_cut_a_batch_into_the_same_ios(seed: int) -> None:
    rng = np.random.default_rng(seed)
    longest = int(rng.choice([1, 40, 300]))
    lengths = rng.integers(1, longest + 1, 700)
    on = np.cumsum(lengths + (rng.random(700) < rng.choice([0.0, 0.01, 0.3]))) - lengths
    wanted = pieces(pages(longest), [0] * 700, on.tolist(), lengths.tolist())
    counts = {name: await _failed_ios(name, "/dev/full", wanted) for name in ENGINES}
    assert len(set(counts.values())) == 1, counts
    assert counts["reference"] >= lengths.sum() * PAGE_BYTES / (1 << 20)


@pytest.mark.parametrize("seed", range(12))
async def test_all_engines_give_a_batch_the_same_states(tmp_path: Path, seed: int) -> None:
    """Reads beyond the end of the file, and of the drive, of blocks of which some have other tags."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, 500)
    on = (PAGES - 1000 + np.cumsum(lengths + rng.integers(0, 2, 500)) - lengths).tolist()
    is_damaged = rng.random(500) < 0.1
    source = pages(PAGES + 1000, b"s")
    results = []
    for name in ENGINES:
        engine = new_engine(name)
        drive = new_drive(tmp_path, engine, name)
        (tmp_path / name).write_bytes(source[: (PAGES - 300) * PAGE_BYTES].data)
        wanted = pieces(pages(PAGES + 1000), on, on, lengths.tolist())
        check = tag_check(wanted, source)
        check.tags[is_damaged] ^= 1
        ends = await drive.submit_read(wanted, check)
        results.append((ends.tolist(), check.states.tolist(), drive.failures))
        drive.close()
        engine.close()
    assert results[0] == results[1] == results[2]
    assert {*results[0][1]} == {*CheckState}
