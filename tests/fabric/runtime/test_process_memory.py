"""Copies out of the memory of another process."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from ostraca_fabric.model.extent import PAGE_BYTES, rounded_up
from ostraca_fabric.runtime.process_memory import (
    MemoryProof,
    ProcessBlocks,
    copy_verified,
    read_process,
    shows_proof,
)
from ostraca_fabric.tables.digests import PieceState, tags_of

SIZE = 300_000
PROGRAM = f"""
import sys, numpy as np
memory = np.arange({SIZE}, dtype=np.uint32).astype(np.uint8)
print(memory.ctypes.data, flush=True)
sys.stdin.read()
"""
CONTENT = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)


@pytest.fixture
def other() -> Iterator[tuple[int, int]]:
    """Another process: its id, and the address of its memory."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.communicate()


def test_pieces_land_at_their_places_and_nothing_else_is_touched(other: tuple[int, int]) -> None:
    process, address = other
    memory, expected = np.full(20_000, 0xEE, np.uint8), np.full(20_000, 0xEE, np.uint8)
    sources, places, lengths = [7, 200_000, 1, SIZE - 5], [100, 5000, 5001, 19_995], [3000, 1, 4096, 5]
    for source, place, length in zip(sources, places, lengths, strict=True):
        expected[place : place + length] = CONTENT[source : source + length]
    addresses = np.array(sources, np.uint64) + np.uint64(address)
    read_process(process, addresses, memory, np.array(places), np.array(lengths, np.uint32))
    assert np.array_equal(memory, expected)


def test_more_pieces_than_a_call_of_the_kernel_takes_are_copied(other: tuple[int, int]) -> None:
    process, address = other
    count = 2500
    memory, order = np.zeros(count, np.uint8), np.random.default_rng(1).permutation(count)
    sources = order.astype(np.uint64) + np.uint64(address)
    read_process(process, sources, memory, np.arange(count), np.ones(count, np.uint32))
    assert np.array_equal(memory, CONTENT[order])


@pytest.mark.parametrize("count", [15, 16, 1025, 2048])
def test_pieces_side_by_side_are_copied_like_others(other: tuple[int, int], count: int) -> None:
    process, address = other
    lengths = np.random.default_rng(count).integers(1, 100, count).astype(np.uint32)
    sources = np.cumsum(lengths, dtype=np.int64) - lengths
    sources[count // 2 :] += 7  # a gap
    places = np.random.default_rng(1).permutation(count) * 100
    memory, expected = np.zeros(100 * count, np.uint8), np.zeros(100 * count, np.uint8)
    for source, place, length in zip(sources.tolist(), places.tolist(), lengths.tolist(), strict=True):
        expected[place : place + length] = CONTENT[source : source + length]
    read_process(process, sources.astype(np.uint64) + np.uint64(address), memory, places, lengths)
    assert np.array_equal(memory, expected)


def test_memory_that_is_not_there_is_an_error(other: tuple[int, int]) -> None:
    process, address = other
    memory = np.zeros(8192, np.uint8)
    end = (address + SIZE + (64 << 20)) & ~4095
    for sources, lengths in (([0], [1]), ([address, 0], [4096, 1]), ([end], [8192])):
        places = np.arange(len(sources)) * 4096
        with pytest.raises(OSError) as caught:  # noqa: PT011 (its number says which)
            read_process(process, np.array(sources, np.uint64), memory, places, np.array(lengths, np.uint32))
        assert caught.value.errno == errno.EFAULT


def test_a_process_that_has_ended_is_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(ProcessLookupError):
        read_process(process.pid, *_one_byte())


def _one_byte() -> tuple[NDArray[np.uint64], NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint32]]:
    return np.array([4096], np.uint64), np.zeros(1, np.uint8), np.zeros(1, np.int64), np.ones(1, np.uint32)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_users_process_is_refused() -> None:
    program = (
        "import os, numpy as np; from ostraca_fabric.runtime.process_memory import read_process;"
        "os.setuid(65533);"
        f"read_process({os.getpid()}, np.array([4096], np.uint64), np.zeros(1, np.uint8),"
        " np.zeros(1, np.int64), np.ones(1, np.uint32))"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert "PermissionError" in ended.stderr


def test_a_proof_is_at_its_address_and_each_is_another() -> None:
    proof, memory = MemoryProof(), np.zeros(16, np.uint8)
    address = np.array([proof.address], np.uint64)
    read_process(os.getpid(), address, memory, np.zeros(1, np.int64), np.array([16], np.uint32))
    assert memory.tobytes() == proof.content != MemoryProof().content


class TaggedCopies:
    """Three blocks in the other process, with tags, to be copied into five pages."""

    def __init__(self, process: int, address: int) -> None:
        self.memory = np.full(5 * PAGE_BYTES, 7, np.uint8)
        self.sources = [5, 9000, 100_000]
        self.places = np.array([0, PAGE_BYTES, 4 * PAGE_BYTES], np.int64)
        self.lengths = np.array([PAGE_BYTES, PAGE_BYTES + 1, 1], np.uint32)
        self.seeds = np.arange(3, dtype=np.uint64)
        self.tags = tags_of(CONTENT, np.array(self.sources), self.lengths, self.seeds)
        self.states = np.zeros(3, np.uint8)
        self.blocks = ProcessBlocks(process, np.array(self.sources, np.uint64) + np.uint64(address))

    def copy(self, rows: slice) -> None:
        columns = (self.places, self.lengths, self.seeds, self.tags, self.states)
        copy_verified(self.blocks, rows, self.memory, *columns)

    def expected(self, *copied: int) -> NDArray[np.uint8]:
        memory = np.full(5 * PAGE_BYTES, 7, np.uint8)
        for block in copied:
            place, length = int(self.places[block]), int(self.lengths[block])
            memory[place : place + rounded_up(length)] = 0
            memory[place : place + length] = CONTENT[self.sources[block] :][:length]
        return memory


def test_blocks_are_copied_checked_and_their_last_pages_blanked(other: tuple[int, int]) -> None:
    copies = TaggedCopies(*other)
    copies.tags[1] ^= 1
    copies.copy(slice(1, 3))
    assert copies.states.tolist() == [PieceState.PENDING, PieceState.DAMAGED, PieceState.GOOD]
    assert np.array_equal(copies.memory, copies.expected(1, 2))


def test_no_block_is_copied_after_a_stop(other: tuple[int, int]) -> None:
    copies = TaggedCopies(*other)
    copies.blocks.stop[0] = 1
    copies.copy(slice(0, 3))
    assert copies.states.tolist() == [PieceState.PENDING] * 3
    assert np.array_equal(copies.memory, copies.expected())


def test_a_failed_copy_ends_the_others_and_leaves_them_unchecked(other: tuple[int, int]) -> None:
    copies = TaggedCopies(*other)
    copies.blocks.addresses[1] = 8  # no process maps its first page
    with pytest.raises(OSError, match="Bad address"):
        copies.copy(slice(0, 3))
    assert copies.states.tolist() == [PieceState.GOOD, PieceState.PENDING, PieceState.PENDING]
    assert np.array_equal(copies.memory, copies.expected(0))


@pytest.mark.parametrize("moved", [0, 1, -1, -(1 << 63), 1 << 64])
def test_a_proof_is_shown_at_its_address_alone(moved: int) -> None:
    proof = MemoryProof()
    assert shows_proof(os.getpid(), proof.address + moved, proof.content) == (moved == 0)
    assert not shows_proof(os.getpid(), proof.address, proof.content[:-1])


def test_a_block_whose_memory_ends_in_its_middle_is_an_error() -> None:
    """The kernel copies up to there; the rest must not come from anywhere else."""
    mapped = mmap.mmap(-1, 3 * PAGE_BYTES)
    source = np.frombuffer(mapped, np.uint8)
    source[:] = 1
    copies = TaggedCopies(os.getpid(), 0)
    copies.blocks.addresses[:] = source.ctypes.data + PAGE_BYTES
    protect, end = ctypes.CDLL(None).mprotect, ctypes.c_void_p(source.ctypes.data + 2 * PAGE_BYTES)
    assert protect(end, PAGE_BYTES, 0) == 0
    try:
        with pytest.raises(OSError, match="Bad address"):
            copies.copy(slice(1, 2))
    finally:
        assert protect(end, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    assert copies.states.tolist() == [PieceState.PENDING] * 3
