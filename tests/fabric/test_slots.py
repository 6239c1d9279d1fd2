"""Slots: whatever is asked in whatever order, no byte has two owners and none is lost."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from numpy.typing import NDArray

from ostraca_fabric.slots import SlotPool

PAGE = 4096
CHUNK = 16 * PAGE


def spans(offsets: NDArray[np.int64], slot_bytes: int) -> set[int]:
    """Name every page that the slots cover."""
    return {int(o) // PAGE + page for o in offsets for page in range(slot_bytes // PAGE)}


def test_slots_of_one_call_are_adjacent_in_empty_memory() -> None:
    pool = SlotPool(4 * CHUNK, CHUNK)
    offsets = pool.take(6, 4 * PAGE)
    assert offsets is not None
    assert offsets.tolist() == [0, 4 * PAGE, 8 * PAGE, 12 * PAGE, CHUNK, CHUNK + 4 * PAGE]


def test_a_chunk_in_use_is_filled_before_an_empty_one_is_cut() -> None:
    pool = SlotPool(4 * CHUNK, CHUNK)
    first = pool.take(1, 4 * PAGE)
    other = pool.take(1, 2 * PAGE)
    second = pool.take(3, 4 * PAGE)
    assert first is not None
    assert other is not None
    assert second is not None
    assert other.tolist() == [CHUNK]
    assert second.tolist() == [4 * PAGE, 8 * PAGE, 12 * PAGE]


def test_taking_is_all_or_nothing() -> None:
    pool = SlotPool(2 * CHUNK, CHUNK)
    assert pool.take(33, PAGE) is None
    assert pool.free_bytes == 2 * CHUNK
    assert pool.take(32, PAGE) is not None
    assert pool.take(1, PAGE) is None


def test_an_emptied_chunk_takes_another_size() -> None:
    pool = SlotPool(CHUNK, CHUNK)
    small = pool.take(16, PAGE)
    assert small is not None
    assert pool.take(1, CHUNK) is None
    pool.give(small)
    assert pool.take(1, CHUNK) is not None


def test_a_size_that_does_not_divide_the_chunk_leaves_the_rest_of_it_unused() -> None:
    pool = SlotPool(2 * CHUNK, CHUNK)
    offsets = pool.take(4, 7 * PAGE)
    assert offsets is not None
    assert offsets.tolist() == [0, 7 * PAGE, CHUNK, CHUNK + 7 * PAGE]
    assert pool.take(1, 7 * PAGE) is None


def test_quarantined_slots_come_back_only_when_their_holder_is_settled() -> None:
    pool = SlotPool(CHUNK, CHUNK)
    offsets = pool.take(16, PAGE)
    assert offsets is not None
    pool.quarantine("one", offsets[:10])
    pool.quarantine("two", offsets[10:])
    assert (pool.taken_bytes, pool.quarantined_bytes, pool.free_bytes) == (0, CHUNK, 0)
    assert pool.take(1, PAGE) is None
    pool.settle("two")
    again = pool.take(6, PAGE)
    assert again is not None
    assert again.tolist() == offsets[10:].tolist()
    assert pool.holders == {"one"}


def test_slot_numbers_count_chunk_by_chunk() -> None:
    pool = SlotPool(4 * CHUNK, CHUNK)
    offsets = np.array([0, 7 * PAGE, CHUNK, 3 * CHUNK + 7 * PAGE], np.int64)
    numbers = pool.numbers(offsets, 7 * PAGE)
    assert numbers.dtype == np.int32
    assert numbers.tolist() == [0, 1, 2, 7]


@pytest.mark.parametrize("bad", [PAGE, -PAGE, 2 * CHUNK, 17, CHUNK])
def test_giving_what_is_not_taken_is_a_broken_invariant_and_changes_nothing(bad: int) -> None:
    pool = SlotPool(2 * CHUNK, CHUNK)
    mine = pool.take(1, PAGE)
    assert mine is not None
    with pytest.raises(AssertionError):
        pool.give(np.array([0, bad], np.int64))
    with pytest.raises(AssertionError):
        pool.quarantine("holder", np.array([0, bad], np.int64))
    pool.check()
    pool.give(mine)
    assert pool.free_bytes == 2 * CHUNK


def test_giving_a_slot_twice_in_one_call_is_a_broken_invariant() -> None:
    pool = SlotPool(CHUNK, CHUNK)
    offsets = pool.take(2, PAGE)
    assert offsets is not None
    with pytest.raises(AssertionError):
        pool.give(offsets[[0, 0]])
    pool.check()


def test_a_quarantined_slot_can_not_be_given() -> None:
    pool = SlotPool(CHUNK, CHUNK)
    offsets = pool.take(2, PAGE)
    assert offsets is not None
    pool.quarantine("holder", offsets)
    with pytest.raises(AssertionError):
        pool.give(offsets)
    with pytest.raises(AssertionError):
        pool.settle("somebody else")
    pool.check()


def test_a_batch_of_512_slots_costs_microseconds_not_milliseconds() -> None:
    pool = SlotPool(1 << 30, 4 << 20)
    best_s = 1.0
    for _ in range(50):
        start_s = time.perf_counter()
        offsets = pool.take(512, 1 << 20)
        assert offsets is not None
        pool.give(offsets)
        best_s = min(best_s, time.perf_counter() - start_s)
    assert best_s < 0.5e-3  # about 60 µs; a Python loop over slots would take more than this


class AnyOrder(RuleBasedStateMachine):
    """Takes, gives, quarantines and settles in any order, beside a model that knows pages only."""

    taken = Bundle("taken")
    quarantined = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(4 * CHUNK, CHUNK)
        self.owned: set[int] = set()  # pages in slots not free
        self.holders = 0

    @rule(target=taken, count=st.integers(1, 40), pages=st.integers(1, 16))
    def take(self, count: int, pages: int) -> tuple[NDArray[np.int64], int]:
        offsets = self.pool.take(count, pages * PAGE)
        if offsets is None:
            return np.empty(0, np.int64), pages
        assert len(offsets) == count
        covered = spans(offsets, pages * PAGE)
        assert len(covered) == count * pages
        assert not covered & self.owned
        assert max(covered) < 64
        assert all(o % CHUNK + pages * PAGE <= CHUNK for o in offsets.tolist())
        self.owned |= covered
        return offsets, pages

    @rule(slots=consumes(taken))
    def give(self, slots: tuple[NDArray[np.int64], int]) -> None:
        offsets, pages = slots
        self.pool.give(offsets)
        self.owned -= spans(offsets, pages * PAGE)

    @rule(target=quarantined, slots=consumes(taken))
    def quarantine(self, slots: tuple[NDArray[np.int64], int]) -> tuple[int, set[int]]:
        offsets, pages = slots
        self.holders += 1
        self.pool.quarantine(self.holders, offsets)
        return self.holders, spans(offsets, pages * PAGE)

    @rule(held=consumes(quarantined))
    def settle(self, held: tuple[int, set[int]]) -> None:
        holder, pages = held
        self.pool.settle(holder)
        self.owned -= pages

    @invariant()
    def the_books_agree(self) -> None:
        self.pool.check()
        assert self.pool.taken_bytes + self.pool.quarantined_bytes == len(self.owned) * PAGE


TestAnyOrder = AnyOrder.TestCase
