"""Copies out of the memory of another process."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.runtime.process_memory import (
    MemoryProof,
    ProcessBlocks,
    copy_verified,
    read_process,
    shows_proof,
)
from ostraca_fabric.tables.digests import CheckState, tags_of

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


def test_bytes_are_those_at_their_address(other: tuple[int, int]) -> None:
    process, address = other
    for place, length in ((7, 3000), (200_000, 1), (0, SIZE), (SIZE - 5, 5)):
        assert read_process(process, address + place, length) == CONTENT[place : place + length].tobytes()


@contextmanager
def half_of_two_pages() -> Iterator[int]:
    """Return the address of a page of ones, in front of a page that can't be read."""
    source = np.frombuffer(mmap.mmap(-1, 2 * PAGE_BYTES), np.uint8)
    source[:] = 1
    protect, end = ctypes.CDLL(None).mprotect, ctypes.c_void_p(source.ctypes.data + PAGE_BYTES)
    assert protect(end, PAGE_BYTES, 0) == 0
    try:
        yield source.ctypes.data
    finally:
        assert protect(end, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_memory_that_is_not_there_is_an_error(other: tuple[int, int]) -> None:
    process, address = other
    for place, length in ((0, 1), ((address + SIZE + (64 << 20)) & ~4095, 8192)):
        with pytest.raises(OSError) as caught:  # noqa: PT011 (its number says which)
            read_process(process, place, length)
        assert caught.value.errno == errno.EFAULT


def test_memory_that_ends_too_early_is_an_error() -> None:
    with half_of_two_pages() as address:
        assert read_process(os.getpid(), address, PAGE_BYTES) == b"\1" * PAGE_BYTES
        with pytest.raises(OSError, match="Bad address"):
            read_process(os.getpid(), address + 1, PAGE_BYTES)


def test_a_process_that_has_ended_is_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(ProcessLookupError):
        read_process(process.pid, 4096, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_users_process_is_refused() -> None:
    program = (
        "import os; from ostraca_fabric.runtime.process_memory import read_process;"
        f"os.setuid(65533); read_process({os.getpid()}, 4096, 1)"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert "PermissionError" in ended.stderr


def test_a_proof_is_at_its_address_and_each_is_another() -> None:
    proof = MemoryProof()
    assert read_process(os.getpid(), proof.address, 16) == proof.content != MemoryProof().content


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
        copy_verified(self.blocks[rows], self.memory, *(column[rows] for column in columns))

    def expected(self, *copied: int) -> NDArray[np.uint8]:
        memory = np.full(5 * PAGE_BYTES, 7, np.uint8)
        for block in copied:
            place, length = int(self.places[block]), int(self.lengths[block])
            memory[place : place + length] = CONTENT[self.sources[block] :][:length]
        return memory


def test_blocks_are_copied_and_checked_and_no_byte_behind_them_is_written(other: tuple[int, int]) -> None:
    copies = TaggedCopies(*other)
    copies.tags[1] ^= 1
    copies.copy(slice(1, 3))
    assert copies.states.tolist() == [CheckState.PENDING, CheckState.DAMAGED, CheckState.GOOD]
    assert np.array_equal(copies.memory, copies.expected(1, 2))


def test_a_failed_copy_ends_the_others_and_leaves_them_unchecked(other: tuple[int, int]) -> None:
    copies = TaggedCopies(*other)
    copies.blocks.addresses[1] = 8  # no process maps its first page
    with pytest.raises(OSError, match="Bad address"):
        copies.copy(slice(0, 3))
    assert copies.states.tolist() == [CheckState.GOOD, CheckState.PENDING, CheckState.PENDING]
    assert np.array_equal(copies.memory, copies.expected(0))


@pytest.mark.parametrize("moved", [0, 1, -1, -(1 << 63), 1 << 64])
def test_a_proof_is_shown_at_its_address_alone(moved: int) -> None:
    proof = MemoryProof()
    assert shows_proof(os.getpid(), proof.address + moved, proof.content) == (moved == 0)
    assert not shows_proof(os.getpid(), proof.address, proof.content[:-1])


def test_a_block_whose_memory_ends_in_its_middle_is_an_error() -> None:
    """The kernel copies up to there; the rest must not come from anywhere else."""
    copies = TaggedCopies(os.getpid(), 0)
    with half_of_two_pages() as address:
        copies.blocks.addresses[:] = address
        with pytest.raises(OSError, match="Bad address"):
            copies.copy(slice(1, 2))
    assert copies.states.tolist() == [CheckState.PENDING] * 3


@pytest.mark.parametrize("seed", range(20))
def test_blocks_beside_each_other_at_one_end_or_both_are_copied_each_to_its_place(seed: int) -> None:
    """Small neighbours at both ends come in one piece."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([1, 100, PAGE_BYTES, 5 * PAGE_BYTES, 30 * PAGE_BYTES], 60).astype(np.uint32)

    def places() -> NDArray[np.int64]:
        gaps = rng.choice([0, 0, 0, 1], len(lengths))
        return np.cumsum(np.concatenate(([0], lengths[:-1])) + gaps).astype(np.int64)

    sources, offsets = places(), places()
    content = np.frombuffer(rng.bytes(int(sources[-1] + lengths[-1])), np.uint8)
    memory, seeds = (
        np.zeros(int(offsets[-1] + lengths[-1]), np.uint8),
        np.arange(len(lengths), dtype=np.uint64),
    )
    expected, states = memory.copy(), np.zeros(len(lengths), np.uint8)
    for source, offset, length in zip(sources, offsets, lengths, strict=True):
        expected[offset : offset + length] = content[source : source + length]
    tags = tags_of(content, sources, lengths, seeds)
    tags[7] ^= 1
    addresses = sources.astype(np.uint64) + np.uint64(content.ctypes.data)
    blocks = ProcessBlocks(os.getpid(), addresses)
    copy_verified(blocks, memory, offsets, lengths, seeds, tags, states)
    assert np.array_equal(memory, expected)
    assert np.flatnonzero(states != CheckState.GOOD).tolist() == [7]
