"""Copies of blocks out of the memory of a worker, by threads of the agent."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.agent.assembly import until
from tests.support.agent.held_copies import HeldCopies

from ostraca_dpu_agent.adapters.transports import worker_memory
from ostraca_dpu_agent.adapters.transports.worker_memory import MemoryFetch, WorkerMemoryReader
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces, whole_pages
from ostraca_fabric.runtime.process_memory import MemoryProof, ProcessBlocks
from ostraca_fabric.tables.digests import PieceState, TagCheck, tags_of
from ostraca_fabric.wire.messages import WorkerMemory

MIB = 1 << 20
SIZE = 24 * MIB
SLOT_BYTES = 256 << 10
UNTOUCHED = 0xEE
NOWHERE = 8
"""An address in the first page, which no process maps."""

CONTENT = f"np.random.default_rng(1).integers(0, 256, {SIZE}, np.uint8)"
PROGRAM = f"""
import sys, numpy as np
memory = {CONTENT}
print(memory.ctypes.data, flush=True)
sys.stdin.read()
"""


@dataclass
class Child:
    """A process with known memory."""

    process: subprocess.Popen[str]
    address: int
    content: NDArray[np.uint8]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def content() -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def child(content: NDArray[np.uint8]) -> Iterator[Child]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    try:
        yield Child(process, int(process.stdout.readline()), content)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def reading(process: int) -> Iterator[WorkerMemoryReader]:
    reader = WorkerMemoryReader(process)
    try:
        yield reader
    finally:
        reader.close()


@dataclass
class Expected:
    """Blocks in a process, and what an agent's staging should have of them."""

    check: TagCheck
    addresses: NDArray[np.uint64]
    content: list[NDArray[np.uint8]]
    places: NDArray[np.int64]

    @classmethod
    def of(cls, source: NDArray[np.uint8], address: int, lengths: list[int]) -> Expected:
        """Expect blocks of these lengths, from odd places in any order, in slots in any order."""
        count, dice = len(lengths), Random(len(lengths))
        sources = [dice.randrange(len(source) - length) for length in lengths]
        content = [source[at : at + length] for at, length in zip(sources, lengths, strict=True)]
        places = np.array(dice.sample(range(count), count), np.int64) * SLOT_BYTES
        columns, seeds = np.array(lengths, np.uint32), np.arange(count, dtype=np.uint64)
        tags = tags_of(source, np.array(sources, np.int64), columns, seeds)
        memory = np.full(count * SLOT_BYTES, UNTOUCHED, np.uint8)
        check = TagCheck(Pieces(memory, places, places, whole_pages(columns)), columns, seeds, tags)
        return cls(check, np.array(sources, np.uint64) + np.uint64(address), content, places.copy())

    def staged(self, rows: set[int]) -> NDArray[np.uint8]:
        """Return what memory has with some blocks, each with zeroes up to the end of its last page."""
        memory = np.full_like(self.check.pieces.memory, UNTOUCHED)
        for row in rows:
            place, block = int(self.places[row]), self.content[row]
            memory[place : place - (-len(block) // PAGE_BYTES) * PAGE_BYTES] = 0
            memory[place : place + len(block)] = block
        return memory

    def assert_good(self, rows: set[int]) -> None:
        """Assert that these blocks are there, and no byte elsewhere was written."""
        count = len(self.content)
        states = [PieceState.GOOD if row in rows else PieceState.PENDING for row in range(count)]
        assert self.check.states.tolist() == states
        assert np.array_equal(self.check.pieces.memory, self.staged(rows))


FEW = [5000, PAGE_BYTES, 1]
MANY = [SLOT_BYTES - 7 * (row % 5) for row in range(64)]
"""More bytes than a part has: several threads copy them."""


@pytest.mark.parametrize("lengths", [FEW, MANY, [1], []], ids=["few", "many", "one", "none"])
async def test_blocks_of_another_process_come_whole_and_nothing_else_is_touched(
    child: Child, lengths: list[int]
) -> None:
    expected = Expected.of(child.content, child.address, lengths) if lengths else nothing()
    check = expected.check
    columns: list[NDArray[np.generic]] = [expected.addresses, check.tags, check.lengths, check.seeds]
    before = [column.copy() for column in columns]
    with reading(child.process.pid) as reader:
        await reader.fetch(check, expected.addresses).ended
    expected.assert_good({*range(len(lengths))})
    assert all(np.array_equal(column, old) for column, old in zip(columns, before, strict=True))


def nothing() -> Expected:
    places, columns = np.zeros(0, np.int64), np.zeros(0, np.uint32)
    pieces = Pieces(np.zeros(0, np.uint8), places, places, columns)
    check = TagCheck(pieces, columns, np.zeros(0, np.uint64), np.zeros((0, 16), np.uint8))
    return Expected(check, np.zeros(0, np.uint64), [], places)


async def test_many_blocks_are_copied_by_several_threads_and_few_by_one(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work = threading.Barrier(2, timeout=30)
    parts = list[slice]()
    copy = MemoryFetch._copy

    def copying(self: MemoryFetch, rows: slice) -> None:
        parts.append(rows)
        if len(self._check.lengths) == len(MANY):
            at_work.wait()  # for another thread at the same time
        copy(self, rows)

    monkeypatch.setattr(MemoryFetch, "_copy", copying)
    with reading(child.process.pid) as reader:
        for lengths in (MANY, FEW):
            expected = Expected.of(child.content, child.address, lengths)
            await reader.fetch(expected.check, expected.addresses).ended
            expected.assert_good({*range(len(lengths))})
    *large, small = parts
    assert small == slice(0, len(FEW))
    assert len(large) == 4
    assert sorted(row for part in large for row in range(part.start, part.stop)) == [*range(len(MANY))]


async def test_damaged_blocks_are_said_to_be(child: Child) -> None:
    expected = Expected.of(child.content, child.address, FEW)
    expected.addresses[1] += np.uint64(1)
    with reading(child.process.pid) as reader:
        await reader.fetch(expected.check, expected.addresses).ended
    good, damaged = PieceState.GOOD, PieceState.DAMAGED
    assert expected.check.states.tolist() == [good, damaged, good]


@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few", "many"])
async def test_an_address_that_is_not_there_ends_a_fetch_and_leaves_blocks_unchecked(
    child: Child, lengths: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    expected = Expected.of(child.content, child.address, lengths)
    expected.addresses[len(lengths) // 2] = NOWHERE
    with reading(child.process.pid) as reader:
        fetch = reader.fetch(expected.check, expected.addresses)
        await fetch.ended
        good = {*np.flatnonzero(expected.check.states == PieceState.GOOD).tolist()}
        expected.assert_good(good)
        assert len(lengths) // 2 not in good
        assert caplog.text.count("can't be read from a worker's memory: Bad address") == 1
        again = Expected.of(child.content, child.address, lengths)
        await reader.fetch(again.check, again.addresses).ended
        again.assert_good({*range(len(lengths))})


async def test_a_fetch_ends_with_its_last_thread_and_begins_no_part_after_an_error(child: Child) -> None:
    expected = Expected.of(child.content, child.address, MANY)
    expected.addresses[0] = NOWHERE
    fetch = MemoryFetch(expected.check, ProcessBlocks(child.process.pid, expected.addresses))
    assert fetch.start(2) == 2
    await asyncio.to_thread(fetch.copy_parts)
    turned = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turned.set_result, None)
    await turned
    assert not fetch.ended.done(), "another thread may be copying"
    await asyncio.to_thread(fetch.copy_parts)
    await fetch.ended
    expected.assert_good(set())


async def test_a_worker_that_has_died_ends_a_fetch(child: Child, caplog: pytest.LogCaptureFixture) -> None:
    expected = Expected.of(child.content, child.address, FEW)
    with reading(child.process.pid) as reader:
        child.end()
        await reader.fetch(expected.check, expected.addresses).ended
    expected.assert_good(set())
    assert "can't be read from a worker's memory: No such process" in caplog.text


async def test_a_bug_in_a_copy_ends_the_fetch_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = np.zeros(SLOT_BYTES, np.uint8)
    expected = Expected.of(source, source.ctypes.data, FEW)

    def crash(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(MemoryFetch, "_copy", crash)
    with reading(os.getpid()) as reader:
        await reader.fetch(expected.check, expected.addresses).ended
    expected.assert_good(set())
    assert "a copy out of a worker's memory crashed" in caplog.text


@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few", "many"])
async def test_a_stop_names_the_parts_under_way_and_no_further_block_is_copied(
    child: Child, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, expected = HeldCopies(monkeypatch), Expected.of(child.content, child.address, lengths)
    threads = 1 if lengths is FEW else 2
    with reading(child.process.pid) as reader:
        fetch = reader.fetch(expected.check, expected.addresses)
        await until(lambda: len(held.parts) == threads)
        under_way = [row for part in held.parts for row in range(part.start, part.stop)]
        assert sorted(fetch.stop().tolist()) == sorted(under_way)
        assert not fetch.ended.done(), "what is under way may still be copied"
        held.let_go()
        await fetch.ended
        assert fetch.stop().tolist() == []
    assert len(held.parts) == threads
    expected.assert_good(set())


async def test_a_stop_between_parts_keeps_what_was_checked(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Expected.of(child.content, child.address, MANY)
    fetch = MemoryFetch(expected.check, ProcessBlocks(child.process.pid, expected.addresses))
    copy = MemoryFetch._copy

    def copying(self: MemoryFetch, rows: slice) -> None:
        copy(self, rows)
        fetch.stop()

    monkeypatch.setattr(MemoryFetch, "_copy", copying)
    assert fetch.start(1) == 1
    await asyncio.to_thread(fetch.copy_parts)
    await fetch.ended
    expected.assert_good({*range(16)})


async def test_nothing_is_copied_after_a_close_and_what_is_under_way_ends(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCopies(monkeypatch)
    first, second, third = (Expected.of(child.content, child.address, FEW) for _ in range(3))
    before = {*threading.enumerate()}
    with reading(child.process.pid) as reader:
        threads = {*threading.enumerate()} - before
        fetches = [reader.fetch(each.check, each.addresses) for each in (first, second)]
        await until(lambda: len(held.parts) == 2)
        reader.close()
        reader.close()
        late = reader.fetch(third.check, third.addresses)
        assert late.ended.done()
        assert late.stop().tolist() == []
        held.let_go()
        for fetch in fetches:
            await fetch.ended
    for each, rows in ((first, {0, 1, 2}), (second, {0, 1, 2}), (third, set[int]())):
        each.assert_good(rows)
    assert len(threads) == 2
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


OWN = MemoryProof()


def offer(address: int = OWN.address, proof: bytes = OWN.content) -> WorkerMemory:
    return WorkerMemory(address, proof)


async def test_a_worker_that_shows_its_proof_is_read() -> None:
    source = np.arange(2 * PAGE_BYTES, dtype=np.uint32).astype(np.uint8)
    expected = Expected.of(source, source.ctypes.data, FEW)
    reader = await WorkerMemoryReader.of(os.getpid(), offer())
    assert reader is not None
    await reader.fetch(expected.check, expected.addresses).ended
    reader.close()
    expected.assert_good({*range(len(FEW))})


def ended_process() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


@pytest.mark.parametrize(
    ("process", "told", "why"),
    [
        (lambda: 0, offer(), "another process namespace hides it"),
        (os.getpid, offer(proof=bytes(16)), "its proof is not there"),
        (os.getpid, offer(proof=b""), "its proof is not there"),
        (os.getpid, offer(proof=OWN.content + b"x"), "its proof is not there"),
        (os.getpid, offer(OWN.address + 1), "its proof is not there"),
        (os.getpid, offer(-1), "its proof is not there"),
        (os.getpid, offer(1 << 64), "its proof is not there"),
        (os.getpid, offer(NOWHERE), "Bad address"),
        (ended_process, offer(), "No such process"),
    ],
    ids=["hidden", "wrong", "none", "longer", "moved", "negative", "huge", "nowhere", "dead"],
)
async def test_a_worker_that_may_be_another_process_is_not_read(
    process: Callable[[], int], told: WorkerMemory, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = {*threading.enumerate()}
    with caplog.at_level(logging.INFO):
        assert await WorkerMemoryReader.of(process(), told) is None
    assert why in caplog.text
    await until(lambda: {*threading.enumerate()} <= before)


async def test_a_proof_in_slow_memory_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def show_late(*_: object) -> bool:
        begun.set()
        return goes_on.wait(30)

    monkeypatch.setattr(worker_memory, "shows_proof", show_late)
    opening = asyncio.create_task(WorkerMemoryReader.of(os.getpid(), offer()))
    await until(begun.is_set)
    assert not opening.done()
    goes_on.set()
    reader = await opening
    assert reader is not None
    reader.close()


async def test_without_threads_no_worker_is_read_and_none_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started, start = list[threading.Thread](), threading.Thread.start

    def refuse_the_second(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_second)
    with caplog.at_level(logging.INFO):
        assert await WorkerMemoryReader.of(os.getpid(), offer()) is None
    assert "can't start new thread" in caplog.text
    started[0].join(30)
    assert not started[0].is_alive()
