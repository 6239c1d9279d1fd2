"""Direct reads of drives: bytes, failures, drives that fall silent, and the end."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sdk.conftest import no_thread_to_be_had
from tests.sdk.direct.drive_files import DRIVE_BYTES, FABRIC, MIB, create_drive
from tests.support.simulated.stuck_memory import StuckMemory

import ostraca
from ostraca._direct.direct_reader import DirectReader, Rows
from ostraca._protocol.operations import Progress
from ostraca.client_metrics import DirectCounters
from ostraca_fabric.drives.io_engine import FlashIoSettings, IoEngine
from ostraca_fabric.errors import MalformedError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.tables.digests import tags_of

ARENA_BYTES = 32 * MIB
FAR_S = 60.0
SILENT_S = 0.05
LARGEST = (1 << 63) - PAGE_BYTES


class Receiver:
    """States of blocks, as they come from a reader."""

    def __init__(self, reader: DirectReader) -> None:
        self._reader = reader
        self._news = threading.Condition()
        self.states: list[tuple[int, Progress]] = []
        self.threads: set[str] = set()

    def __call__(self, rows: Rows, state: Progress) -> None:
        self._reader.announced()  # takes the reader's lock
        with self._news:
            self.states += [(row, state) for row in rows.tolist()]
            self.threads.add(threading.current_thread().name)
            self._news.notify_all()

    def wait(self, count: int) -> list[Progress]:
        """Wait for *count* rows; return their states in order of the rows."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.states) >= count, FAR_S)
        rows = sorted(self.states, key=lambda each: each[0])
        assert [row for row, _ in rows] == [*range(count)], "each row once"
        return [state for _, state in rows]


def arena() -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, ARENA_BYTES), np.uint8)


def places(*pages: int) -> NDArray[np.int64]:
    return np.array(pages, np.int64) * PAGE_BYTES


def drives_of(*numbers: int) -> Rows:
    return np.array(numbers, np.intp)


def read_pages(reader: DirectReader, receiver: Receiver, *pages: int, request: int = 1) -> None:
    """Read single pages of the first drive to the beginning of the arena."""
    count = len(pages)
    reader.read(
        request,
        drives_of(*[0] * count),
        places(*pages),
        places(*range(count)),
        places(*[1] * count),
        receiver,
    )


def until(holds: Callable[[], bool]) -> None:
    """Wait for a change that comes by itself, in time."""
    while not holds():
        os.sched_yield()


def wait_read(reader: DirectReader, request: int = 1) -> None:
    ended = threading.Event()
    reader.when_read(request, ended.set)
    assert ended.wait(FAR_S)


@contextmanager
def reader_of(
    folder: Path, memory: NDArray[np.uint8], mode: str = "threads", **settings: Any
) -> Iterator[DirectReader]:
    settings = {"direct_silent_s": FAR_S, **settings}
    made = DirectReader(
        ostraca.ClientSettings(direct_drives=(f"{folder}/*.img",), **settings),
        memory,
        flash_io=FlashIoSettings(io_uring=mode == "io_uring"),
    )
    yield made
    assert made.close(FAR_S)


@pytest.fixture(params=["io_uring", "threads"])
def mode(request: pytest.FixtureRequest) -> str:
    mode: str = request.param
    probe = IoEngine(FlashIoSettings(io_uring=mode == "io_uring"))
    probe.close()
    if probe.mode != mode:
        pytest.skip("this kernel or container refuses io_uring")
    return mode


def test_blocks_of_several_drives_come_to_their_places(tmp_path: Path, mode: str) -> None:
    contents = [create_drive(tmp_path / f"drive-{number}.img") for number in range(3)]
    memory, rng = arena(), np.random.default_rng(7)
    lengths = rng.integers(1, 65, 800) * PAGE_BYTES
    lengths = lengths[np.cumsum(lengths) <= ARENA_BYTES]
    count = len(lengths)
    numbers = rng.integers(0, 3, count)
    offsets = rng.integers(0, DRIVE_BYTES // PAGE_BYTES - 64, count) * PAGE_BYTES
    targets = np.empty(count, np.int64)
    shuffled = rng.permutation(count)
    targets[shuffled] = np.cumsum(lengths[shuffled]) - lengths[shuffled]
    with reader_of(tmp_path, memory, mode) as reader:
        assert reader.announced() == tuple((FABRIC, f"shelf/drive-{number}") for number in range(3))
        receiver = Receiver(reader)
        reader.check(numbers, offsets, lengths)
        reader.read(5, numbers, offsets, targets, lengths.astype(np.uint32), receiver)
        assert receiver.wait(count) == [Progress.READING] * count
        wait_read(reader, 5)
        assert reader.version == 0
        assert reader.counters == DirectCounters(blocks_read=count, bytes_read=int(lengths.sum()))
    assert receiver.threads == {"ostraca-direct"}
    rows = zip(numbers.tolist(), offsets.tolist(), targets.tolist(), lengths.tolist(), strict=True)
    for number, offset, target, length in rows:
        assert memory[target : target + length].tobytes() == contents[number][offset : offset + length]


def test_a_drive_cut_short_fails_some_blocks_and_is_suspended_for_a_while(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "drive.img"
    content = create_drive(path)
    memory = arena()
    with reader_of(tmp_path, memory, mode, direct_retry_s=FAR_S) as reader:
        os.truncate(path, 100 * PAGE_BYTES)
        receiver, later = Receiver(reader), Receiver(reader)
        read_pages(reader, receiver, 200, 10, 98, 99, 100)
        good, bad = Progress.READING, Progress.FAILED
        assert receiver.wait(5)[:2] == [bad, good]
        assert receiver.wait(5)[4] == bad
        assert receiver.threads == {"ostraca-direct"}
        assert memory[PAGE_BYTES : 2 * PAGE_BYTES].tobytes() == content[10 * PAGE_BYTES : 11 * PAGE_BYTES]
        assert (reader.version, reader.announced()) == (1, ((FABRIC, ""),))
        before = reader.counters.blocks_failed
        read_pages(reader, later, 1, 2)
        assert later.states == [(0, bad), (1, bad)], "at once"
        assert later.threads == {threading.current_thread().name}
        assert reader.counters.blocks_failed == before + 2
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"'{path}' is not read directly for 60 s: read at ")


def test_a_suspended_drive_is_read_again_later(tmp_path: Path) -> None:
    path = tmp_path / "drive.img"
    content = create_drive(path)
    with reader_of(tmp_path, arena(), direct_retry_s=SILENT_S) as reader:
        os.truncate(path, PAGE_BYTES)
        failed, read = Receiver(reader), Receiver(reader)
        read_pages(reader, failed, 7)
        assert failed.wait(1) == [Progress.FAILED]
        path.write_bytes(content)
        until(lambda: reader.version == 2)
        assert reader.announced() == ((FABRIC, "shelf/drive"),)
        read_pages(reader, read, 7)
        assert read.wait(1) == [Progress.READING]


def test_reads_of_a_silent_drive_are_lost_and_their_memory_is_in_use_until_the_real_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_drive(tmp_path / "drive.img")
    with (
        StuckMemory(ARENA_BYTES) as memory,
        reader_of(tmp_path, memory.array, direct_silent_s=SILENT_S, direct_retry_s=SILENT_S) as reader,
    ):
        receiver, refused = Receiver(reader), Receiver(reader)
        acts: list[str] = []
        reader.when_read(1, lambda: acts.append("before"))
        lengths = np.full(12, MIB, np.int64)
        offsets = np.arange(12, dtype=np.int64) * MIB
        reader.read(1, drives_of(*[0] * 12), offsets, offsets, lengths, receiver)
        ended = threading.Event()
        reader.when_read(1, ended.set)
        assert receiver.wait(12) == [Progress.LOST] * 12
        assert reader.announced() == ((FABRIC, ""),)
        read_pages(reader, refused, 1, request=2)
        assert refused.states == [(0, Progress.FAILED)]
        reader.when_read(2, lambda: acts.append("refused"))
        assert acts == ["before", "refused"], "at once, with nothing under way"
        busy_s = time.process_time()
        assert not ended.wait(4 * SILENT_S)
        assert time.process_time() - busy_s < 2 * SILENT_S, "the reader sleeps meanwhile"
        assert reader.version == 1, "reads under way keep the drive suspended"
        memory.release()
        assert ended.wait(FAR_S)
        until(lambda: reader.version == 2)
        assert reader.announced() == ((FABRIC, "shelf/drive"),)
        assert receiver.wait(12) == [Progress.LOST] * 12, "reported once"
        assert reader.counters == DirectCounters(blocks_failed=1, blocks_lost=12)
    [line] = [record.getMessage() for record in caplog.records]
    assert "is not read directly for 0.05 s: 3 reads without an end for 0.05 s" in line


def test_a_drive_with_wrong_bytes_is_suspended_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_drive(tmp_path / "drive.img")
    with reader_of(tmp_path, arena(), direct_retry_s=0.05) as reader:
        read_pages(reader, Receiver(reader), 1)
        wait_read(reader)
        reader.suspend(0, damaged=1)
        reader.suspend(0, damaged=0)
        assert (reader.counters.blocks_read, reader.counters.blocks_failed) == (0, 1)
        assert (reader.version, reader.announced()) == (1, ((FABRIC, ""),))
        until(lambda: reader.version == 2)
        assert reader.announced() == ((FABRIC, "shelf/drive"),)
        receiver = Receiver(reader)
        read_pages(reader, receiver, 1)
        assert receiver.wait(1) == [Progress.READING]
    [line] = [record.getMessage() for record in caplog.records]
    assert "is not read directly for 0.05 s: blocks there do not match their tags" in line


def test_blocks_with_tags_are_checked_right_behind_their_reads(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    content, count = create_drive(tmp_path / "drive.img"), 64
    lengths = np.random.default_rng(11).integers(1, PAGE_BYTES + 1, count).astype(np.uint32)
    seeds = np.arange(count, dtype=np.uint64)
    tags = tags_of(np.frombuffer(content, np.uint8), places(*range(count)), lengths, seeds)
    tags[40, 3] ^= 1
    with reader_of(tmp_path, arena(), mode) as reader:
        receiver = Receiver(reader)
        pages = places(*range(count))
        whole = np.full(count, PAGE_BYTES, np.uint32)
        reader.read(1, drives_of(*[0] * count), pages, pages, whole, receiver, tags=(lengths, seeds, tags))
        states = receiver.wait(count)
        wait_read(reader)
        assert states.pop(40) is Progress.READING, "for a receiver to judge"
        assert states == [Progress.VERIFIED] * (count - 1)
        assert reader.counters == DirectCounters(blocks_read=count, bytes_read=count * PAGE_BYTES)
        assert reader.announced() == ((FABRIC, "shelf/drive"),)
    assert not caplog.records


def test_a_drive_is_silent_only_after_its_last_end(tmp_path: Path) -> None:
    create_drive(tmp_path / "drive.img")
    silent_s = 2.0
    with (
        StuckMemory(ARENA_BYTES) as memory,
        reader_of(tmp_path, memory.array, direct_silent_s=silent_s) as reader,
    ):
        first, second = Receiver(reader), Receiver(reader)
        read_pages(reader, first, 1)
        reader.read(1, drives_of(0), places(2), places(256), places(1), second)
        assert not threading.Event().wait(silent_s / 8)
        released_s = time.monotonic()
        memory.release_first(PAGE_BYTES)
        assert first.wait(1) == [Progress.READING]
        assert second.wait(1) == [Progress.LOST]
        assert time.monotonic() - released_s >= silent_s
        memory.release()


def test_a_reader_with_reads_under_way_does_not_close(tmp_path: Path) -> None:
    create_drive(tmp_path / "drive.img")
    with StuckMemory(ARENA_BYTES) as memory, reader_of(tmp_path, memory.array) as reader:
        receiver, refused = Receiver(reader), Receiver(reader)
        read_pages(reader, receiver, 1)
        assert not reader.close(SILENT_S)
        read_pages(reader, refused, 1)
        assert refused.states == [(0, Progress.FAILED)], "no new reads"
        assert not receiver.states
        memory.release()
        assert receiver.wait(1) == [Progress.READING]
        assert reader.close(FAR_S)


def test_the_end_closes_drives_and_threads(tmp_path: Path, mode: str) -> None:
    def resources() -> list[set[str]]:
        return [{each.name for each in Path("/proc/self", kind).iterdir()} for kind in ("fd", "task")]

    create_drive(tmp_path / "drive.img")
    before = resources()  # and what earlier tests left, which may end at any time
    with reader_of(tmp_path, arena(), mode) as reader:
        read_pages(reader, Receiver(reader), 1, 2)
        own = [now - then for now, then in zip(resources(), before, strict=True)]
        assert all(own)
    assert reader.close()
    refused = Receiver(reader)
    read_pages(reader, refused, 1)
    assert refused.states == [(0, Progress.FAILED)]
    until(lambda: not any(now & mine for now, mine in zip(resources(), own, strict=True)))


WRONG: dict[str, tuple[int, int, int]] = {
    "no such drive": (1, 0, PAGE_BYTES),
    "a negative number": (-1, 0, PAGE_BYTES),
    "before the beginning": (0, -PAGE_BYTES, PAGE_BYTES),
    "between pages": (0, 512, PAGE_BYTES),
    "no length": (0, 0, 0),
    "a negative length": (0, 0, -PAGE_BYTES),
    "part of a page": (0, 0, PAGE_BYTES + 512),
    "a length that overflows": (0, PAGE_BYTES, LARGEST),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_impossible_places_of_blocks_are_malformed(tmp_path: Path, wrong: str) -> None:
    create_drive(tmp_path / "drive.img")
    number, offset, length = WRONG[wrong]
    with reader_of(tmp_path, arena()) as reader:
        last = DRIVE_BYTES - PAGE_BYTES
        good = drives_of(0, 0), np.array([0, last]), np.array([DRIVE_BYTES, PAGE_BYTES], np.uint32)
        reader.check(*good)
        reader.check(drives_of(), places(), places())
        with pytest.raises(MalformedError):
            reader.check(drives_of(0, number), np.array([0, offset]), np.array([PAGE_BYTES, length]))


def test_lengths_beyond_32_bits_are_malformed_on_the_largest_drive(tmp_path: Path) -> None:
    create_drive(tmp_path / "drive.img")
    os.truncate(tmp_path / "drive.img", 1 << 33)
    with reader_of(tmp_path, arena()) as reader, pytest.raises(MalformedError):
        reader.check(drives_of(0), places(0), np.array([(1 << 32) + PAGE_BYTES]))


def test_memory_outside_of_the_arena_is_refused(tmp_path: Path) -> None:
    create_drive(tmp_path / "drive.img")
    with reader_of(tmp_path, arena()) as reader:
        receiver = Receiver(reader)
        reader.read(1, drives_of(0), places(0), np.array([ARENA_BYTES]), places(1), receiver)
        assert receiver.states == [(0, Progress.FAILED)]
        wait_read(reader)
        assert reader.version == 0


def test_other_memory_takes_blocks_and_is_let_go_before_their_end(tmp_path: Path, mode: str) -> None:
    content = create_drive(tmp_path / "drive.img")
    mapped, first = mmap.mmap(-1, 4 * PAGE_BYTES), arena()
    closed = threading.Event()

    def close(*_: object) -> None:
        assert mapped[PAGE_BYTES : 2 * PAGE_BYTES] == content[7 * PAGE_BYTES : 8 * PAGE_BYTES]
        mapped.close()  # raises BufferError if anything still refers to it
        closed.set()

    with reader_of(tmp_path, first, mode) as reader:
        memory = np.frombuffer(mapped, np.uint8)
        refused = Receiver(reader)
        reader.read(1, drives_of(0), places(7), places(4), places(1), refused, memory=memory)
        assert refused.states == [(0, Progress.FAILED)], "beyond that memory"
        reader.read(2, drives_of(0), places(7), places(1), places(1), close, memory=memory)
        del memory
        assert closed.wait(FAR_S)
    assert not first.any()


def test_a_receiver_that_fails_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    create_drive(tmp_path / "drive.img")

    def fail(*_: object) -> None:
        raise RuntimeError("a bug of a test")

    with reader_of(tmp_path, arena()) as reader:
        receiver = Receiver(reader)
        reader.read(1, drives_of(0), places(3), places(0), places(1), fail)
        reader.when_read(1, fail)
        wait_read(reader)
        read_pages(reader, receiver, 1)
        assert receiver.wait(1) == [Progress.READING]
    assert caplog.text.count("a receiver of direct reads failed") == 2


def test_without_drives_there_is_no_thread_and_every_block_is_malformed(tmp_path: Path) -> None:
    before = threading.active_count()
    with reader_of(tmp_path, arena()) as reader:
        assert (reader.announced(), threading.active_count()) == ((), before)
        with pytest.raises(MalformedError):
            reader.check(drives_of(0), places(0), places(1))
        read_pages(reader, Receiver(reader))
        wait_read(reader)


def test_without_another_thread_no_drive_is_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_drive(tmp_path / "drive.img")
    with no_thread_to_be_had("ostraca-direct"), reader_of(tmp_path, arena()) as reader:
        assert reader.announced() == ()
    assert "No drive is read directly: can't start new thread" in caplog.text
