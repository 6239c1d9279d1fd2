"""Slots: whatever is asked in whatever order, no byte has two owners and none is lost."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from numpy.typing import NDArray
from tests.support.invariants import check_slots

from ostraca_fabric.tables.slots import SlotPool, Wave, slot_numbers

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


def test_a_slot_in_every_chunk_keeps_only_the_places_it_overlaps_from_other_sizes() -> None:
    pool = SlotPool(2 * CHUNK, CHUNK)
    first, second = pool.take(1, 4 * PAGE), pool.take(1, 5 * PAGE)
    assert first is not None
    assert second is not None
    assert [*first.tolist(), *second.tolist()] == [0, CHUNK]
    pool.quarantine("a drive that hangs", np.concatenate((first, second)))
    others = pool.take(6, 3 * PAGE)
    assert others is not None
    assert sorted(o // PAGE for o in others.tolist()) == [6, 9, 12, 16 + 6, 16 + 9, 16 + 12]
    assert pool.take(1, 3 * PAGE) is None
    check_slots(pool)


def test_what_is_kept_makes_room_only_when_it_is_dropped() -> None:
    pool = SlotPool(CHUNK, CHUNK)
    slots = pool.take(4, 4 * PAGE)
    assert slots is not None
    pool.keep(slots)
    assert (pool.kept_bytes, pool.taken_bytes, pool.free_bytes) == (CHUNK, 0, 0)
    assert pool.take(1, PAGE) is None
    assert pool.has_room(1, CHUNK)
    pool.use(slots[:1])
    assert not pool.has_room(1, CHUNK)
    assert pool.has_room(1, CHUNK, if_taken_were_given=True)
    assert pool.has_room(3, 4 * PAGE)
    assert not pool.has_room(4, 4 * PAGE)
    pool.quarantine("holder", slots[:1])
    assert not pool.has_room(1, CHUNK, if_taken_were_given=True)
    pool.drop(slots[1:])
    assert pool.take(3, 4 * PAGE) is not None


def test_what_is_taken_is_not_dropped_and_what_is_kept_is_not_given() -> None:
    pool = SlotPool(CHUNK, CHUNK)
    slots = pool.take(2, PAGE)
    assert slots is not None
    pool.keep(slots[:1])
    for wrong in (pool.drop, pool.give, pool.keep, pool.use):
        with pytest.raises(AssertionError):
            wrong(slots)
        check_slots(pool)


@given(
    waves=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 100), st.integers(1, 30)), max_size=8),
    pages=st.integers(1, 16),
)
@example(waves=[(1, 100, 16), (3, 5, 5)], pages=2)
def test_however_slots_lie_each_keeps_no_more_from_another_size_than_the_places_it_overlaps(
    waves: list[tuple[int, int, int]], pages: int
) -> None:
    """So what may be in quarantine bounds what is kept from others, wherever it is.

    Of each wave, so many slots of so many pages, one in a few stays.
    """
    pool, kept_out = SlotPool(8 * CHUNK, CHUNK), 0
    taken = [(size, one_in, pool.take(count, size * PAGE)) for size, count, one_in in waves]
    for number, (size, one_in, offsets) in enumerate(taken):
        if offsets is not None:
            pool.quarantine(number, offsets[::one_in])
            pool.give(np.setdiff1d(offsets, offsets[::one_in]))
            kept_out += len(offsets[::one_in]) * (1 + -(-(size - 1) // pages))
    check_slots(pool)
    left = 8 * (16 // pages) - kept_out
    if left > 0:
        assert pool.take(left, pages * PAGE) is not None


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


@given(st.lists(st.integers(0, 4 * CHUNK - PAGE), min_size=1, max_size=5), st.integers(1, 17))
@example([0, 7 * PAGE, CHUNK, 3 * CHUNK + 7 * PAGE], 7)
@example([14 * PAGE], 7)
def test_slots_on_the_grid_begin_at_a_multiple_and_end_within_their_chunk(at: list[int], pages: int) -> None:
    slot_bytes = pages * PAGE
    numbers, is_grid = slot_numbers(np.array(at), chunk_bytes=CHUNK, slot_bytes=slot_bytes)
    within = [offset % CHUNK for offset in at]
    assert is_grid == all(each % slot_bytes == 0 and each + slot_bytes <= CHUNK for each in within)
    per_chunk = CHUNK // slot_bytes
    assert numbers.tolist() == [
        offset // CHUNK * per_chunk + each // slot_bytes for offset, each in zip(at, within, strict=True)
    ]


OFFSETS = st.sampled_from(
    [-1, 0, 1, PAGE, 3 * PAGE, 4 * PAGE - 1, 4 * PAGE, 1 << 62, -(1 << 63), (1 << 63) - 1]
)
LENGTHS = st.sampled_from([0, 1, 2, PAGE, PAGE + 1, 2 * PAGE, (1 << 32) - 1])


@given(st.lists(st.tuples(OFFSETS, OFFSETS, LENGTHS), max_size=3), st.sampled_from([PAGE, 2 * PAGE]))
@example([(3 * PAGE, 3 * PAGE, PAGE)], PAGE)
def test_a_wave_fits_if_and_only_if_every_byte_of_a_slot_is_memory(
    blocks: list[tuple[int, int, int]], slot_bytes: int
) -> None:
    staging, arena, lengths = ([each[column] for each in blocks] for column in range(3))
    wave = Wave(
        np.array(staging, np.int64),
        np.array(arena, np.int64),
        np.array(lengths, np.uint32),
        staging_slot_bytes=slot_bytes,
        arena_slot_bytes=2 * PAGE,
    )
    assert wave.fits(staging_bytes=4 * PAGE, arena_bytes=2 * PAGE) == all(
        1 <= length <= slot_bytes and 0 <= one <= 4 * PAGE - length and 0 <= other <= 2 * PAGE - length
        for one, other, length in blocks
    )


def test_columns_of_different_lengths_fit_nowhere() -> None:
    offsets, lengths = np.zeros(2, np.int64), np.ones(1, np.uint32)
    wave = Wave(offsets, offsets[:1], lengths, staging_slot_bytes=PAGE, arena_slot_bytes=PAGE)
    assert not wave.fits(staging_bytes=PAGE, arena_bytes=PAGE)


@pytest.mark.parametrize("bad", [PAGE, -PAGE, 2 * CHUNK, 17, CHUNK])
def test_giving_what_is_not_taken_is_a_broken_invariant_and_changes_nothing(bad: int) -> None:
    pool = SlotPool(2 * CHUNK, CHUNK)
    mine = pool.take(1, PAGE)
    assert mine is not None
    with pytest.raises(AssertionError):
        pool.give(np.array([0, bad], np.int64))
    with pytest.raises(AssertionError):
        pool.quarantine("holder", np.array([0, bad], np.int64))
    check_slots(pool)
    pool.give(mine)
    assert pool.free_bytes == 2 * CHUNK


def test_giving_a_slot_twice_in_one_call_is_a_broken_invariant() -> None:
    pool = SlotPool(CHUNK, CHUNK)
    offsets = pool.take(2, PAGE)
    assert offsets is not None
    with pytest.raises(AssertionError):
        pool.give(offsets[[0, 0]])
    check_slots(pool)


def test_a_quarantined_slot_can_not_be_given() -> None:
    pool = SlotPool(CHUNK, CHUNK)
    offsets = pool.take(2, PAGE)
    assert offsets is not None
    pool.quarantine("holder", offsets)
    with pytest.raises(AssertionError):
        pool.give(offsets)
    with pytest.raises(AssertionError):
        pool.settle("somebody else")
    check_slots(pool)


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
    """Does all that can be done to slots, in any order, beside a model that knows pages only."""

    taken = Bundle("taken")
    kept = Bundle("kept")
    quarantined = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(4 * CHUNK, CHUNK)
        self.taken_pages: set[int] = set()
        self.kept_pages: set[int] = set()
        self.quarantined_pages: set[int] = set()
        self.holders = 0

    def places(self, pages: int, *kept_out: set[int]) -> int:
        """Count the places for slots of so many pages that have none of these."""
        begins = (chunk * 16 + page for chunk in range(4) for page in range(0, 17 - pages, pages))
        out: set[int] = set().union(*kept_out)
        return sum(out.isdisjoint(range(at, at + pages)) for at in begins)

    @rule(target=taken, count=st.integers(1, 40), pages=st.integers(1, 16))
    def take(self, count: int, pages: int) -> tuple[NDArray[np.int64], int]:
        free = self.places(pages, self.taken_pages, self.kept_pages, self.quarantined_pages)
        if_dropped = self.places(pages, self.taken_pages, self.quarantined_pages)
        if_given = self.places(pages, self.quarantined_pages)
        slot_bytes = pages * PAGE
        assert self.pool.has_room(count, slot_bytes) == (if_dropped >= count)
        assert self.pool.has_room(count, slot_bytes, if_taken_were_given=True) == (if_given >= count)
        offsets = self.pool.take(count, slot_bytes)
        assert (offsets is not None) == (free >= count)
        if offsets is None:
            return np.empty(0, np.int64), pages
        assert len(offsets) == count
        covered = spans(offsets, slot_bytes)
        assert len(covered) == count * pages
        assert covered.isdisjoint(self.taken_pages | self.kept_pages | self.quarantined_pages)
        assert max(covered) < 64
        assert all(o % CHUNK % slot_bytes == 0 for o in offsets.tolist()), "as transports number them"
        assert all(o % CHUNK + slot_bytes <= CHUNK for o in offsets.tolist())
        self.taken_pages |= covered
        return offsets, pages

    @rule(slots=consumes(taken))
    def give(self, slots: tuple[NDArray[np.int64], int]) -> None:
        offsets, pages = slots
        self.pool.give(offsets)
        self.taken_pages -= spans(offsets, pages * PAGE)

    @rule(target=kept, slots=consumes(taken))
    def keep(self, slots: tuple[NDArray[np.int64], int]) -> tuple[NDArray[np.int64], int]:
        offsets, pages = slots
        self.pool.keep(offsets)
        self.taken_pages -= spans(offsets, pages * PAGE)
        self.kept_pages |= spans(offsets, pages * PAGE)
        return slots

    @rule(target=taken, slots=consumes(kept))
    def use(self, slots: tuple[NDArray[np.int64], int]) -> tuple[NDArray[np.int64], int]:
        offsets, pages = slots
        self.pool.use(offsets)
        self.kept_pages -= spans(offsets, pages * PAGE)
        self.taken_pages |= spans(offsets, pages * PAGE)
        return slots

    @rule(slots=consumes(kept))
    def drop(self, slots: tuple[NDArray[np.int64], int]) -> None:
        offsets, pages = slots
        self.pool.drop(offsets)
        self.kept_pages -= spans(offsets, pages * PAGE)

    @rule(target=quarantined, slots=consumes(taken))
    def quarantine(self, slots: tuple[NDArray[np.int64], int]) -> tuple[int, set[int]]:
        offsets, pages = slots
        self.holders += 1
        self.pool.quarantine(self.holders, offsets)
        covered = spans(offsets, pages * PAGE)
        self.taken_pages -= covered
        self.quarantined_pages |= covered
        return self.holders, covered

    @rule(held=consumes(quarantined))
    def settle(self, held: tuple[int, set[int]]) -> None:
        holder, pages = held
        self.pool.settle(holder)
        self.quarantined_pages -= pages

    @invariant()
    def the_books_agree(self) -> None:
        pool = self.pool
        check_slots(pool)
        pages = len(self.taken_pages), len(self.kept_pages), len(self.quarantined_pages)
        assert tuple(n * PAGE for n in pages) == (pool.taken_bytes, pool.kept_bytes, pool.quarantined_bytes)


TestAnyOrder = AnyOrder.TestCase
