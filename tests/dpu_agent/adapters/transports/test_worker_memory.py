"""Copies of blocks out of the memory of workers, by threads of the agent."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.contract.drives.test_io_engine import ended_process, threads
from tests.support.agent.assembly import until
from tests.support.agent.held_copies import HoldingEngine
from tests.support.agent.read_worker import NOWHERE
from tests.support.simulated.stuck_memory import StuckMemory

from ostraca_dpu_agent.adapters.transports.worker_memory import WorkerMemories, WorkerMemoryReader
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces, whole_pages
from ostraca_fabric.runtime.process_memory import PROOF_BYTES, MemoryProof
from ostraca_fabric.tables.digests import CheckState, TagCheck, tags_of
from ostraca_fabric.wire.messages import WorkerMemory

MIB = 1 << 20
SIZE = 24 * MIB
SLOT_BYTES = 256 << 10
UNTOUCHED = 0xEE

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

    @property
    def offer(self) -> WorkerMemory:
        """An offer whose proof is the begin of the memory."""
        return WorkerMemory(self.address, self.content[:PROOF_BYTES].tobytes())

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


OWN = MemoryProof()


def offer(address: int = OWN.address, proof: bytes = OWN.content) -> WorkerMemory:
    return WorkerMemory(address, proof)


async def opened(memories: WorkerMemories, child: Child | None = None) -> WorkerMemoryReader:
    """Open a reader of a child, or of this process."""
    process, its = (os.getpid(), offer()) if child is None else (child.process.pid, child.offer)
    reader = await memories.reader(process, its)
    assert reader is not None
    return reader


@asynccontextmanager
async def reading(child: Child | None = None) -> AsyncIterator[WorkerMemoryReader]:
    """Read a child, or this process; no thread must be left in the end."""
    before, memories = threads(), WorkerMemories()
    reader = await opened(memories, child)
    try:
        yield reader
    finally:
        reader.close()
        memories.close()
    await until(lambda: threads() <= before)


@dataclass
class Expected:
    """Blocks in a process, and what an agent's staging should have of them."""

    check: TagCheck
    addresses: NDArray[np.int64]
    content: list[NDArray[np.uint8]]
    places: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        source: NDArray[np.uint8],
        address: int,
        lengths: list[int],
        *,
        sources: list[int] | None = None,
    ) -> Expected:
        """Expect blocks of these lengths, from *sources* or any places, in slots in any order."""
        count, dice = len(lengths), Random(len(lengths))
        if sources is None:
            sources = [dice.randrange(len(source) - length) for length in lengths]
        content = [source[at : at + length].copy() for at, length in zip(sources, lengths, strict=True)]
        places = np.array(dice.sample(range(count), count), np.int64) * SLOT_BYTES
        columns, seeds = np.array(lengths, np.uint32), np.arange(count, dtype=np.uint64)
        tags = tags_of(source, np.array(sources, np.int64), columns, seeds)
        memory = np.full(count * SLOT_BYTES, UNTOUCHED, np.uint8)
        check = TagCheck(Pieces(memory, places, places, whole_pages(columns)), columns, seeds, tags)
        return cls(check, np.array(sources, np.int64) + address, content, places.copy())

    def staged(self, rows: set[int]) -> NDArray[np.uint8]:
        """Return what memory has with some blocks, each with zeroes up to the end of its last page."""
        memory = np.full_like(self.check.pieces.memory, UNTOUCHED)
        for row in rows:
            place, block = int(self.places[row]), self.content[row]
            memory[place : place - (-len(block) // PAGE_BYTES) * PAGE_BYTES] = 0
            memory[place : place + len(block)] = block
        return memory

    def assert_good(self, rows: set[int] | None = None) -> None:
        """Assert that these blocks, or all, are there, and no byte elsewhere was written."""
        rows = {*range(len(self.content))} if rows is None else rows
        self.assert_states(rows)
        assert np.array_equal(self.check.pieces.memory, self.staged(rows))

    def assert_states(self, rows: set[int]) -> None:
        count = len(self.content)
        states = [CheckState.GOOD if row in rows else CheckState.PENDING for row in range(count)]
        assert self.check.states.tolist() == states


FEW = [5000, PAGE_BYTES, 1]
MANY = [SLOT_BYTES - 7 * (row % 5) for row in range(64)]
"""More bytes than are under way at a time."""


def behind(lengths: list[int], first: int = 7) -> list[int]:
    """Return places of blocks without gaps."""
    return [*accumulate(lengths[:-1], initial=first)]


@pytest.mark.parametrize("are_neighbours", [False, True], ids=["scattered", "neighbours"])
@pytest.mark.parametrize("lengths", [FEW, MANY, [1], []], ids=["few", "many", "one", "none"])
async def test_blocks_of_another_process_come_whole_and_nothing_else_is_touched(
    child: Child, lengths: list[int], *, are_neighbours: bool
) -> None:
    expected = nothing()
    if lengths:
        sources = behind(lengths) if are_neighbours else None
        expected = Expected.of(child.content, child.address, lengths, sources=sources)
    check = expected.check
    columns: list[NDArray[np.generic]] = [expected.addresses, check.tags, check.lengths, check.seeds]
    before = [column.copy() for column in columns]
    async with reading(child) as reader:
        await reader.fetch(check, expected.addresses).ended
    expected.assert_good()
    assert all(np.array_equal(column, old) for column, old in zip(columns, before, strict=True))


def nothing() -> Expected:
    places, columns = np.zeros(0, np.int64), np.zeros(0, np.uint32)
    pieces = Pieces(np.zeros(0, np.uint8), places, places, columns)
    check = TagCheck(pieces, columns, np.zeros(0, np.uint64), np.zeros((0, 16), np.uint8))
    return Expected(check, places, [], places)


async def test_fetches_at_the_same_time_do_not_mix(child: Child) -> None:
    each = [Expected.of(child.content, child.address, MANY[:count]) for count in range(1, 40, 3)]
    async with reading(child) as reader:
        fetches = [reader.fetch(expected.check, expected.addresses) for expected in each]
        for fetch in fetches:
            await fetch.ended
    for expected in each:
        expected.assert_good()


async def test_damaged_blocks_are_said_to_be(child: Child) -> None:
    expected = Expected.of(child.content, child.address, FEW)
    expected.addresses[1] += 1
    async with reading(child) as reader:
        await reader.fetch(expected.check, expected.addresses).ended
    good, damaged = CheckState.GOOD, CheckState.DAMAGED
    assert expected.check.states.tolist() == [good, damaged, good]


# --- copies that fail --------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [NOWHERE, -1, -(1 << 63), (1 << 63) - 1])
@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few", "many"])
async def test_an_address_that_is_not_there_leaves_its_block_alone_unchecked(
    child: Child, lengths: list[int], address: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected, row = Expected.of(child.content, child.address, lengths), len(lengths) // 2
    expected.addresses[row] = address
    async with reading(child) as reader:
        await reader.fetch(expected.check, expected.addresses).ended
        expected.assert_good({*range(len(lengths))} - {row})
        assert caplog.text.count("can't be read from a worker's memory: Bad address") == 1
        again = Expected.of(child.content, child.address, lengths)
        await reader.fetch(again.check, again.addresses).ended
        again.assert_good()


async def test_several_addresses_that_are_not_there_are_logged_once(
    child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    expected = Expected.of(child.content, child.address, MANY)
    expected.addresses[::2] = NOWHERE
    async with reading(child) as reader:
        await reader.fetch(expected.check, expected.addresses).ended
    expected.assert_good({*range(1, len(MANY), 2)})
    assert caplog.text.count("can't be read from a worker's memory") == 1


async def test_memory_that_ends_within_a_block_fails_its_neighbours_in_the_same_read_and_no_other() -> None:
    """The kernel copies up to there; the rest must not come from anywhere else."""
    lengths = [SLOT_BYTES] * 11
    source = np.frombuffer(mmap.mmap(-1, sum(lengths) + PAGE_BYTES), np.uint8)
    source[:] = np.arange(len(source), dtype=np.uint32).astype(np.uint8)
    sources = behind(lengths, first=PAGE_BYTES // 2)
    expected = Expected.of(source, source.ctypes.data, lengths, sources=sources)
    protect, end = ctypes.CDLL(None).mprotect, ctypes.c_void_p(source.ctypes.data + sum(lengths))
    assert protect(end, PAGE_BYTES, 0) == 0
    try:
        async with reading() as reader:
            await reader.fetch(expected.check, expected.addresses).ended
    finally:
        assert protect(end, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    good = {*range(8)}  # two reads of 1 MiB; the third one fails
    expected.assert_states(good)
    kept = np.isin(np.arange(len(expected.staged(good))) // SLOT_BYTES * SLOT_BYTES, expected.places[8:])
    assert np.array_equal(expected.check.pieces.memory[~kept], expected.staged(good)[~kept])


async def test_a_worker_that_has_died_ends_a_fetch(child: Child, caplog: pytest.LogCaptureFixture) -> None:
    expected = Expected.of(child.content, child.address, FEW)
    async with reading(child) as reader:
        child.end()
        await reader.fetch(expected.check, expected.addresses).ended
    expected.assert_good(set())
    assert "can't be read from a worker's memory: No such process" in caplog.text


async def test_a_slot_outside_of_memory_begins_no_copy(
    child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    expected = Expected.of(child.content, child.address, FEW)
    expected.check.pieces.memory_offsets[1] = expected.check.pieces.memory.nbytes
    async with reading(child) as reader:
        await reader.fetch(expected.check, expected.addresses).ended
    expected.assert_good(set())
    assert "lies outside of its memory: a bug" in caplog.text


# --- memory that is slow -----------------------------------------------------------------------------------


def own_memory(size_bytes: int) -> NDArray[np.uint8]:
    """Return whole pages of this process, with contents."""
    memory = np.frombuffer(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory[:] = np.random.default_rng(2).integers(0, 256, size_bytes, np.uint8)
    return memory


@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few", "many"])
async def test_a_block_in_slow_memory_holds_up_no_other_and_a_stop_names_it_alone(lengths: list[int]) -> None:
    stuck_bytes, row = SLOT_BYTES, len(lengths) // 2
    source = own_memory(SIZE)
    source[:stuck_bytes] = 0
    dice = Random(1)
    sources = [dice.randrange(stuck_bytes, SIZE - length) for length in lengths]
    sources[row] = 0
    expected = Expected.of(source, source.ctypes.data, lengths, sources=sources)
    others = {*range(len(lengths))} - {row}
    async with reading() as reader:
        with StuckMemory(stuck_bytes, within=source[:stuck_bytes]) as memory:
            fetch = reader.fetch(expected.check, expected.addresses)
            await until(lambda: np.count_nonzero(expected.check.states) == len(others))
            expected.assert_good(others)
            assert fetch.stop().tolist() == [row]
            assert not fetch.ended.done(), "the block may still be copied"
            memory.release()
            await fetch.ended
        assert fetch.stop().tolist() == []
    expected.assert_good()


async def test_slow_memory_of_a_worker_holds_up_no_other_worker(child: Child) -> None:
    memories = WorkerMemories()
    slow, quick = await opened(memories), await opened(memories, child)
    with StuckMemory(8 * MIB) as memory:
        zeroes, lengths = np.zeros(8 * MIB, np.uint8), [SLOT_BYTES] * 16
        sources = [2 * SLOT_BYTES * row for row in range(16)]
        hung = [
            Expected.of(zeroes, memory.array.ctypes.data, lengths, sources=sources)
            for _ in range(8)  # far more bytes than may be under way
        ]
        fetches = [slow.fetch(each.check, each.addresses) for each in hung]
        for lengths in (FEW, MANY):
            expected = Expected.of(child.content, child.address, lengths)
            await quick.fetch(expected.check, expected.addresses).ended
            expected.assert_good()
        assert not any(fetch.ended.done() for fetch in fetches)
        assert [fetch.stop().tolist() for fetch in fetches] == [[*range(16)]] * 8
        memory.release()
        for fetch in fetches:
            await fetch.ended
    for each in hung:
        each.assert_good()
    slow.close()
    quick.close()
    memories.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_proof_in_slow_memory_holds_up_nothing_else(
    child: Child, caplog: pytest.LogCaptureFixture, *, is_cancelled: bool
) -> None:
    before, memories = threads(), WorkerMemories()
    expected = Expected.of(child.content, child.address, FEW)
    with StuckMemory(PAGE_BYTES) as memory:
        told = offer(memory.array.ctypes.data, bytes(PROOF_BYTES))
        opening = asyncio.create_task(memories.reader(os.getpid(), told))
        quick = await opened(memories, child)
        await quick.fetch(expected.check, expected.addresses).ended
        expected.assert_good()
        quick.close()
        assert not opening.done()
        if is_cancelled:
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        memory.release()
    if not is_cancelled:
        reader = await opening
        assert reader is not None
        reader.close()

    def are_ended() -> bool:
        memories.close()
        return threads() <= before

    await until(are_ended)
    assert not [record for record in caplog.records if record.exc_info]


# --- the end -----------------------------------------------------------------------------------------------


async def test_nothing_is_copied_after_a_close_and_what_is_under_way_ends(child: Child) -> None:
    engine = HoldingEngine()
    memories = WorkerMemories(lambda: engine)
    reader, other = await opened(memories, child), await opened(memories)
    first, second, third = (Expected.of(child.content, child.address, FEW) for _ in range(3))
    engine.hold()
    fetches = [reader.fetch(each.check, each.addresses) for each in (first, second)]
    reader.close()
    reader.close()
    late = reader.fetch(third.check, third.addresses)
    await late.ended
    assert (late.stop().tolist(), engine.held, engine.detached) == ([], 2, 0)
    assert [fetch.stop().tolist() for fetch in fetches] == [[0, 1, 2]] * 2
    engine.let_go()
    for fetch in fetches:
        await fetch.ended
    for each, rows in ((first, {0, 1, 2}), (second, {0, 1, 2}), (third, set[int]())):
        each.assert_good(rows)
    reader.close()
    assert engine.detached == 1, "after the last copy, and once"
    other.close()
    assert engine.detached == 2
    memories.close()


async def test_threads_end_with_the_agent_unless_a_copy_is_under_way() -> None:
    before = threads()
    memories = WorkerMemories()
    memories.close()
    assert threads() <= before, "none begins before there is a worker"
    zeroes = np.zeros(PAGE_BYTES, np.uint8)
    with StuckMemory(PAGE_BYTES) as memory:
        expected = Expected.of(zeroes, memory.array.ctypes.data, [PAGE_BYTES], sources=[0])
        reader = await opened(memories)
        fetch = reader.fetch(expected.check, expected.addresses)
        reader.close()
        memories.close()  # waits for no slow memory
        assert not fetch.ended.done()
        memory.release()
        await fetch.ended
    expected.assert_good()
    assert not threads() <= before
    memories.close()
    await until(lambda: threads() <= before)
    again = await opened(memories)
    again.close()
    memories.close()
    await until(lambda: threads() <= before)


# --- offers ------------------------------------------------------------------------------------------------


async def test_a_worker_that_shows_its_proof_is_read() -> None:
    source = np.arange(2 * PAGE_BYTES, dtype=np.uint32).astype(np.uint8)
    expected = Expected.of(source, source.ctypes.data, FEW)
    async with reading() as reader:
        await reader.fetch(expected.check, expected.addresses).ended
    expected.assert_good()


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
        (os.getpid, offer((1 << 63) - 2), "Bad address"),
        (os.getpid, offer(NOWHERE), "Bad address"),
        (ended_process, offer(), "No such process"),
    ],
    ids=["hidden", "wrong", "none", "longer", "moved", "negative", "huge", "at the end", "nowhere", "dead"],
)
async def test_a_worker_that_may_be_another_process_is_not_read(
    process: Callable[[], int], told: WorkerMemory, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, memories = threads(), WorkerMemories()
    with caplog.at_level(logging.INFO):
        assert await memories.reader(process(), told) is None
    assert f"is not read: {why}" in caplog.text
    memories.close()
    await until(lambda: threads() <= before)


WITHOUT_THREADS = """
import asyncio, logging, os, resource
from pathlib import Path
from ostraca_dpu_agent.adapters.transports.worker_memory import WorkerMemories
from ostraca_fabric.runtime.process_memory import MemoryProof
from ostraca_fabric.wire.messages import WorkerMemory

async def main():
    proof, memories = MemoryProof(), WorkerMemories()
    offer = WorkerMemory(proof.address, proof.content)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), before[1]))  # room for no stack
    print(await memories.reader(os.getpid(), offer))
    resource.setrlimit(resource.RLIMIT_AS, before)
    print(len(os.listdir("/proc/self/task")))
    reader = await memories.reader(os.getpid(), offer)
    print(reader is not None)
    reader.close()
    memories.close()

logging.basicConfig(level=logging.INFO)
asyncio.run(main())
"""


def test_without_threads_no_worker_is_read_until_there_are_some() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert ended.stdout.split() == ["None", "1", "True"]
    assert "is not read: the flash I/O engine can't start: Resource temporarily unavailable" in ended.stderr
