from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray
from tests.support.invariants import check_index, first_buckets

from ostraca_fabric.flash.index import MARKS, BlockIndex, Insertion
from ostraca_fabric.model.extent import PAGE_BYTES

SEGMENTS = 4


def keys_of(numbers: list[int]) -> NDArray[np.uint8]:
    """Return a key for each number; numbers alike in their lowest bits are far apart, others close."""
    made = b"".join((number % 7).to_bytes(8, "little") + number.to_bytes(8, "big") for number in numbers)
    return np.frombuffer(made, np.uint8).reshape(-1, 16)


def insert(index: BlockIndex, numbers: list[int], segment: int = 0, length: int = 5000) -> list[int]:
    keys = keys_of(numbers)
    offsets = np.array(numbers, np.uint64) * np.uint64(PAGE_BYTES)
    lengths = np.full(len(numbers), length, np.uint32)
    return list(index.insert(keys, keys[:, ::-1], offsets, lengths, segment=segment))


def found(index: BlockIndex, numbers: list[int]) -> list[bool]:
    is_listed, count = index.has(keys_of(numbers), is_counted=False)
    assert (count, is_listed.tolist()) == (is_listed.sum(), (index.find(keys_of(numbers)) >= 0).tolist())
    return list(is_listed)


def test_a_block_is_found_with_all_that_was_said_of_it() -> None:
    index = BlockIndex(blocks_max=100, segments=1)
    insert(index, [7, 8], length=12345)
    rows = index.find(keys_of([8, 9, 7]))
    assert rows[1] == -1
    assert index.offsets(rows[[0, 2]]).tolist() == [8 * PAGE_BYTES, 7 * PAGE_BYTES]
    assert index.lengths(rows[[0, 2]]).tolist() == [12345, 12345]
    assert (index.tags(rows[[0, 2]]) == keys_of([8, 7])[:, ::-1]).all()


def test_the_first_of_a_key_wins_also_within_a_batch() -> None:
    index = BlockIndex(blocks_max=100, segments=2)
    taken, known = Insertion.TAKEN, Insertion.KNOWN
    assert insert(index, [1, 2, 1, 3, 2], length=10) == [taken, taken, known, taken, known]
    assert insert(index, [3, 4], segment=1, length=20) == [known, taken]
    assert index.lengths(index.find(keys_of([3, 4]))).tolist() == [10, 20]
    assert len(index) == 4


def test_at_the_limit_the_index_says_what_it_could_not_take() -> None:
    index = BlockIndex(blocks_max=3, segments=1)
    full = Insertion.FULL
    assert insert(index, [1, 2, 1, 3, 4, 5]) == [0, 0, Insertion.KNOWN, 0, full, full]
    assert found(index, [1, 2, 3, 4, 5]) == [True, True, True, False, False]
    assert index.room == 0
    assert insert(index, [6]) == [full]
    index.remove_segment(0)
    assert index.room == 3
    assert insert(index, [6]) == [Insertion.TAKEN]


@pytest.mark.parametrize("blocks_max", [1, 15, 16, 17, 500])
def test_the_limit_is_reached_however_blocks_spread_over_segments(blocks_max: int) -> None:
    index = BlockIndex(blocks_max=blocks_max, segments=7)
    for number in range(blocks_max):
        assert insert(index, [number], segment=number % 7) == [Insertion.TAKEN]
    check_index(index)


def test_a_segment_leaves_with_its_blocks_and_says_how_many_were_never_read() -> None:
    index = BlockIndex(blocks_max=1000, segments=2)
    insert(index, list(range(100)), segment=0, length=10)
    insert(index, list(range(100, 300)), segment=1)
    index.read(index.find(keys_of([5, 6, 6, 999])))
    assert index.lengths(index.find(keys_of([5]))).tolist() == [10]
    removed = index.remove_segment(0)
    assert (removed.blocks, removed.unread, removed.block_bytes) == (100, 98, 1000)
    assert not any(found(index, list(range(100))))
    assert all(found(index, list(range(100, 300))))
    assert index.remove_segment(0).blocks == 0
    check_index(index)


def test_a_block_removed_alone_is_gone_and_can_come_back() -> None:
    index = BlockIndex(blocks_max=10, segments=1)
    insert(index, [1, 2, 3])
    index.remove(index.find(keys_of([2])))
    assert found(index, [1, 2, 3]) == [True, False, True]
    assert (len(index), index.room) == (2, 7)
    assert insert(index, [2]) == [Insertion.TAKEN]
    assert index.remove_segment(0).blocks == 3
    assert index.room == 10


def test_reads_and_marks_are_kept_apart_from_the_longest_lengths() -> None:
    index = BlockIndex(blocks_max=100, segments=1)
    numbers, longest = list(range(MARKS)), 256 << 20
    keys, marks = keys_of(numbers), np.arange(MARKS, dtype=np.uint32)
    lengths = np.array([longest - 1 - number for number in numbers], np.uint32)
    index.insert(keys, keys, np.zeros(MARKS, np.uint64), lengths, segment=0, marks=marks)
    rows = index.find(keys)
    for _ in range(2):
        assert (index.marks(rows) == marks).all()
        assert (index.lengths(rows) == lengths).all()
        assert (index.read(rows)[1] == lengths).all()
    assert index.is_read(rows).all()
    assert sorted(index.read_rows_of(0)) == sorted(rows)
    index.forget_reads(rows[:3])
    assert index.is_read(rows).tolist() == [False] * 3 + [True] * 5
    index.has(keys[:1])
    index.has(keys[1:2], is_counted=False)
    assert index.is_read(rows).tolist() == [True] + [False] * 2 + [True] * 5
    assert (index.marks(rows) == marks).all()
    check_index(index)
    removed = index.remove_segment(0)
    assert (removed.unread, removed.block_bytes) == (2, int(lengths.sum(dtype=np.uint64)))


def test_an_empty_batch_is_nothing() -> None:
    index = BlockIndex(blocks_max=10, segments=1)
    assert insert(index, []) == []
    assert found(index, []) == []


def test_keys_of_one_bucket_overflow_into_the_next_and_are_found() -> None:
    index = BlockIndex(blocks_max=400, segments=1)
    candidates = np.random.default_rng(1).integers(0, 256, (20_000, 16)).astype(np.uint8)
    home, _ = first_buckets(index, candidates.view(np.uint64).reshape(-1, 2))
    keys = candidates[home == len(index._passed) - 1][:60]  # the last bucket: they wrap around
    assert len(keys) == 60
    lengths, offsets = np.full(60, 1, np.uint32), np.arange(60, dtype=np.uint64) * np.uint64(PAGE_BYTES)
    index.insert(keys, keys, offsets, lengths, segment=0)
    check_index(index)
    index.remove(index.find(keys[:20]))
    check_index(index)
    assert (index.find(keys) >= 0).tolist() == [False] * 20 + [True] * 40
    index.remove_segment(0)
    assert not index._passed.any()


def test_a_key_that_is_not_there_is_looked_for_once_around_when_every_bucket_was_passed_by() -> None:
    index = BlockIndex(blocks_max=24, segments=2)
    candidates = np.random.default_rng(3).integers(0, 256, (200, 16)).astype(np.uint8)
    home, _ = first_buckets(index, candidates.view(np.uint64).reshape(-1, 2))
    first, last = candidates[home == 0], candidates[home == 1]
    for keys, segment in ((last[:16], 0), (last[16:17], 1)):
        count = len(keys)
        index.insert(keys, keys, np.zeros(count, np.uint64), np.ones(count, np.uint32), segment=segment)
    index.remove_segment(0)
    index.insert(first[:16], first[:16], np.zeros(16, np.uint64), np.ones(16, np.uint32), segment=0)
    assert index._passed.tolist() == [1, 1]
    assert (index.find(np.concatenate([first[16:], last[:16], last[17:]])) == -1).all()
    assert (index.find(np.concatenate([first[:16], last[16:17]])) >= 0).all()
    check_index(index)


def test_a_full_index_takes_at_most_48_bytes_per_block() -> None:
    index = BlockIndex(blocks_max=1 << 23, segments=1 << 14)  # 1 TB in segments of 64 MiB
    assert index.memory_bytes / index.blocks_max <= 48


def test_a_full_index_finds_each_of_many_blocks() -> None:
    index = BlockIndex(blocks_max=50_000, segments=5)
    keys = np.random.default_rng(2).integers(0, 256, (50_000, 16)).astype(np.uint8)
    offsets = np.arange(50_000, dtype=np.uint64) * np.uint64(PAGE_BYTES)
    lengths = np.full(50_000, 4096, np.uint32)
    for segment in range(5):
        part = slice(segment * 10_000, (segment + 1) * 10_000)
        assert not index.insert(keys[part], keys[part], offsets[part], lengths[part], segment=segment).any()
    assert (index.offsets(index.find(keys)) == offsets).all()
    check_index(index)


numbers = st.lists(st.integers(0, 60), max_size=40)


class IndexMachine(RuleBasedStateMachine):
    """The index against a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(blocks_max=48, segments=SEGMENTS)
        self.model: dict[int, tuple[int, bool]] = {}
        self.holes = [0] * SEGMENTS

    @rule(wanted=numbers, segment=st.integers(0, SEGMENTS - 1))
    def insert(self, wanted: list[int], segment: int) -> None:
        expected = []
        for number in wanted:
            if number in self.model:
                expected.append(Insertion.KNOWN)
            elif len(self.model) + sum(self.holes) < 48:
                expected.append(Insertion.TAKEN)
                self.model[number] = (segment, False)
            else:
                # A later equal of a block that found no room is "known" to the batch it came in.
                expected.append(Insertion.KNOWN if number in wanted[: len(expected)] else Insertion.FULL)
        assert insert(self.index, wanted, segment) == expected

    @rule(wanted=numbers)
    def find_and_mark(self, wanted: list[int]) -> None:
        rows = self.index.find(keys_of(wanted))
        assert (rows >= 0).tolist() == [number in self.model for number in wanted]
        offsets, lengths, tags = self.index.read(rows)
        listed = [number if number in self.model else None for number in wanted]
        assert offsets.tolist() == [0 if number is None else number * PAGE_BYTES for number in listed]
        assert lengths.tolist() == [0 if number is None else 5000 for number in listed]
        assert (tags == np.where(rows[:, None] >= 0, keys_of(wanted)[:, ::-1], 0)).all()
        for number in wanted:
            if number in self.model:
                self.model[number] = (self.model[number][0], True)

    @rule(wanted=st.sets(st.integers(0, 60), max_size=5))
    def remove(self, wanted: set[int]) -> None:
        listed = sorted(wanted & self.model.keys())
        self.index.remove(self.index.find(keys_of(listed)))
        for number in listed:
            self.holes[self.model.pop(number)[0]] += 1

    @rule(segment=st.integers(0, SEGMENTS - 1))
    def remove_segment(self, segment: int) -> None:
        removed = self.index.remove_segment(segment)
        gone = {number: was_read for number, (where, was_read) in self.model.items() if where == segment}
        assert removed.blocks == len(gone)
        assert removed.unread == sum(not was_read for was_read in gone.values())
        self.model = {number: value for number, value in self.model.items() if number not in gone}
        self.holes[segment] = 0

    @invariant()
    def agrees(self) -> None:
        check_index(self.index)
        assert found(self.index, list(range(61))) == [number in self.model for number in range(61)]


TestIndexAgainstADict = IndexMachine.TestCase
TestIndexAgainstADict.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


@given(st.lists(st.binary(min_size=16, max_size=16), unique=True, min_size=1, max_size=50))
def test_any_keys_are_found_and_no_others(keys: list[bytes]) -> None:
    index = BlockIndex(blocks_max=50, segments=1)
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
    listed = len(keys) // 2
    index.insert(
        rows[:listed], rows[:listed], np.zeros(listed, np.uint64), np.ones(listed, np.uint32), segment=0
    )
    assert (index.find(rows) >= 0).tolist() == [position < listed for position in range(len(keys))]
