"""Rows of a get that reads of drives land in: released after the last byte, and without unverified bytes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from ostraca._memory.regions import RegionMemory, RegionRows
from ostraca._memory.row_writes import RowWrites
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import PAGE_BYTES

ROWS = 8
ROW_BYTES = 4 * PAGE_BYTES
LENGTHS = [ROW_BYTES, PAGE_BYTES + 1, 2 * PAGE_BYTES, 5, ROW_BYTES - 1]
NUMBERS = [6, 1, 4, 3, 0]
BYTE = 0xEE


@dataclass
class Reader:
    """In place of the reader of drives: requests end one by one."""

    acts: dict[int, Callable[[], None]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def when_read(self, request: int, act: Callable[[], None]) -> None:
        if request in self.ended:
            act()
        else:
            self.acts[request] = act


def pool() -> NDArray[np.uint8]:
    memory = np.frombuffer(mmap.mmap(-1, ROWS * ROW_BYTES), np.uint8)
    memory[:] = BYTE
    return memory.reshape(ROWS, ROW_BYTES)


def claimed(memory: RegionMemory, numbers: list[int] = NUMBERS) -> RowWrites:
    """Return the reads of a get that has claimed its rows."""
    rows = RegionRows(memory, np.array(numbers), np.array(LENGTHS[: len(numbers)], np.uint32))
    blocks = rows.blocks(argument="into", count=len(numbers), block_bytes=ROW_BYTES, is_written=True)
    blocks.claim()
    return RowWrites(blocks)


def is_free(memory: RegionMemory, number: int) -> bool:
    try:
        memory.claim(np.array([number]), is_written=True)
    except UsageError:
        return False
    memory.release(np.array([number]), is_written=True)
    return True


def at(*positions: int) -> NDArray[np.int64]:
    return np.array(positions, np.int64)


def test_memory_and_places_are_those_of_the_rows() -> None:
    rows = pool()
    found, places = claimed(RegionMemory(rows, None, may_withhold=True)).begin_reads(1, at(4, 1))
    found[places] = 7
    assert [rows[0, 0], rows[1, 0], np.count_nonzero(rows == 7)] == [7, 7, 2]


def test_rows_are_released_request_by_request_and_those_of_good_blocks_at_once() -> None:
    rows, reader = pool(), Reader(ended={3})
    memory = RegionMemory(rows, None, may_withhold=True)
    reads = claimed(memory)
    reads.begin_reads(1, at(0, 1))
    reads.begin_reads(2, at(2))
    reads.begin_reads(3, at(3))
    assert reads.has(at(1))
    assert not reads.has(at(4))
    reads.verify(at(1, 4))
    assert not reads.has(at(1))
    late = reads.end(reader.when_read)
    assert [read.positions for read in late] == [(0,), (2,)]
    assert memory.withheld.tolist() == [4, 6]
    assert [number for number in range(ROWS) if not is_free(memory, number)] == [4, 6]
    assert not rows[3, :PAGE_BYTES].any(), "not verified, and no read is under way"
    assert (rows[[4, 6]] == BYTE).all(), "reads are under way"
    reader.acts[2]()
    assert [read.is_ended for read in late] == [False, True]
    assert not rows[4, : 2 * PAGE_BYTES].any()
    assert (rows[4, 2 * PAGE_BYTES :] == BYTE).all()
    with pytest.raises(UsageError, match="late bytes may still land in 1 rows"):
        memory.check_unused()
    with pytest.raises(UsageError, match="row 6 of the region is in use by a late write"):
        memory.claim(np.array([6]), is_written=False)
    reader.acts[1]()
    assert late[0].wait(0)
    assert not rows[6].any()
    assert all(is_free(memory, number) for number in range(ROWS))
    memory.check_unused()


def test_rows_of_agents_are_neither_wiped_nor_withheld_once_settled() -> None:
    rows, reader = pool(), Reader()
    memory = RegionMemory(rows, None, may_withhold=True)
    writes = claimed(memory)
    writes.begin(1, at(0, 1, 2, 3))
    writes.begin_reads(1, at(3))
    writes.begin(2, at(4))
    assert writes.has(at(0))
    writes.verify(at(1))
    writes.settle(at(1, 2, 3))
    assert not writes.has(at(1, 2))
    assert writes.has(at(3)), "a drive may still write"
    writes.forget(at(4))
    writes.begin(5, at(4))
    late = writes.end(reader.when_read)
    assert [write.positions for write in late] == [(0, 3), (4,)]
    assert not any(is_free(memory, NUMBERS[position]) for position in (0, 3, 4))
    assert all(is_free(memory, NUMBERS[position]) for position in (1, 2))
    reader.acts[1]()
    reader.acts[5]()
    assert not rows[NUMBERS[3], :PAGE_BYTES].any(), "a drive may have written"
    others = [number for number in range(ROWS) if number != NUMBERS[3]]
    assert (rows[others] == BYTE).all()
    assert all(is_free(memory, number) for number in range(ROWS))


def test_zeros_fill_the_last_page_of_good_blocks_that_were_read_here() -> None:
    rows = pool()
    reads = claimed(RegionMemory(rows, None, may_withhold=True))
    reads.begin_reads(1, at(0, 1, 2, 4))
    reads.verify(at(0, 1, 2, 3, 4))
    assert reads.end(Reader().when_read) == []
    right = np.full_like(rows, BYTE)
    right[1, PAGE_BYTES + 1 : 2 * PAGE_BYTES] = 0
    right[0, -1] = 0
    assert np.array_equal(rows, right)


def test_blocks_that_the_agent_delivers_after_all_are_wiped_and_not_withheld() -> None:
    rows = pool()
    memory = RegionMemory(rows, None, may_withhold=True)
    reads = claimed(memory)
    reads.begin_reads(1, at(1, 2))
    reads.forget(at(1, 3))
    assert not rows[1, : 2 * PAGE_BYTES].any()
    assert (rows[3] == BYTE).all(), "not read here"
    assert not reads.has(at(1))
    assert [read.positions for read in reads.end(Reader().when_read)] == [(2,)]
    assert memory.withheld.tolist() == [4]


@pytest.mark.parametrize(
    ("offset", "row_bytes", "may_withhold", "takes_reads"),
    [
        (0, ROW_BYTES, True, True),
        (0, ROW_BYTES, False, False),
        (512, ROW_BYTES, True, False),
        (0, ROW_BYTES + 512, True, False),
    ],
)
def test_only_rows_of_whole_pages_take_reads_and_by_consent(
    offset: int, row_bytes: int, may_withhold: bool, takes_reads: bool
) -> None:
    memory = pool().reshape(-1)[offset : offset + 4 * row_bytes]
    assert RegionMemory(memory, row_bytes, may_withhold=may_withhold).takes_reads is takes_reads


def test_a_leaving_region_lets_go_of_its_memory_with_its_last_withheld_row() -> None:
    reader, memory = Reader(), RegionMemory(pool(), None, may_withhold=True)
    reads = claimed(memory)
    reads.begin_reads(1, at(0))
    reads.end(reader.when_read)
    memory.end_unused()
    assert not memory.is_ended
    reader.acts[1]()
    assert memory.is_ended
