from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.policies.endurance import DAY_S
from ostraca_fabric.policies.flash_admission import (
    DEPTH_ANY,
    DEPTH_UNKNOWN,
    FlashAdmission,
    GhostFilter,
    _has,
)
from ostraca_fabric.policies.write_budget import WriteBudget

BLOCK = 4096
NONE, TOO_DEEP, SPENT = Reason.NONE, Reason.ADMISSION, Reason.BUDGET


def made(*, level: float, burst: float = 1000, reserve: float = 0.25) -> tuple[FlashAdmission, WriteBudget]:
    """Build an admission with a budget in blocks, refilled by one block a second."""
    budget = WriteBudget(
        bytes_per_day=DAY_S * BLOCK, burst_bytes=burst * BLOCK, level_bytes=level * BLOCK, now_s=0.0
    )
    ghost = GhostFilter(1 << 16, retry_s=10.0)
    return FlashAdmission(budget, ghost, first_touch_reserve=reserve, half_way_blocks=64), budget


def keys_of(numbers: NDArray[np.int64] | list[int]) -> NDArray[np.uint8]:
    """Keys that differ in few bits: the filter must not depend on how well keys are mixed."""
    keys = np.zeros((len(numbers), 2), np.int64)
    keys[:, 0] = numbers
    return keys.view(np.uint8)


def decide(
    admission: FlashAdmission, numbers: list[int], depths: list[int], *, now_s: float = 0.0
) -> list[Reason]:
    sizes = np.full(len(numbers), BLOCK, np.int64)
    answer = admission.decide(now_s, keys_of(numbers), sizes, np.array(depths, np.uint32))
    return [Reason(reason) for reason in answer]


def test_with_a_full_budget_everything_is_admitted() -> None:
    admission, _ = made(level=1000)
    assert decide(admission, [1, 2, 3], [0, 100_000, DEPTH_UNKNOWN]) == [NONE] * 3


def test_at_the_reserve_only_blocks_seen_before_are_admitted() -> None:
    admission, _ = made(level=250)
    assert decide(admission, [1, 2], [0, 1]) == [TOO_DEEP] * 2
    admission, _ = made(level=200)
    decide(admission, [1], [0])
    assert decide(admission, [1, 2, 3], [9, 0, DEPTH_UNKNOWN], now_s=20.0) == [NONE, TOO_DEEP, TOO_DEEP]


def test_with_no_budget_left_not_even_blocks_seen_before_are_admitted() -> None:
    admission, budget = made(level=0)
    decide(admission, [1], [0])
    budget.spend(100 * BLOCK)
    assert decide(admission, [1, 2], [0, 0], now_s=20.0) == [SPENT, TOO_DEEP]
    assert decide(admission, [1], [0], now_s=101.0) == [NONE]


def test_a_chain_keeps_its_beginning_and_loses_its_end() -> None:
    admission, _ = made(level=600)
    depths = list(range(300))
    answer = decide(admission, depths, depths)
    kept = answer.count(NONE)
    assert answer == [NONE] * kept + [TOO_DEEP] * (300 - kept)
    assert kept == admission.depth_limit(600 * BLOCK)
    assert 50 < kept < 200


def test_what_is_cut_for_lack_of_budget_are_the_deepest_in_whatever_order_they_come() -> None:
    admission, _ = made(level=10, burst=12)
    depths = [9, 1, 30, 8, 3, 5, 2, 7, 4, 6, 0]
    answer = decide(admission, list(range(11)), depths)
    kept = sorted(depth for depth, reason in zip(depths, answer, strict=True) if reason == NONE)
    assert kept == list(range(7)), "a level of 10 less the reserve of 3 pays for the first seven"


def test_blocks_of_no_chain_are_written_on_their_second_touch() -> None:
    admission, _ = made(level=600)
    assert decide(admission, [1], [DEPTH_UNKNOWN]) == [TOO_DEEP]
    assert decide(admission, [1], [DEPTH_UNKNOWN], now_s=5.0) == [TOO_DEEP], "a retry is no second touch"
    assert decide(admission, [1], [DEPTH_UNKNOWN], now_s=10.0) == [NONE]


def test_blocks_seen_before_are_paid_for_first() -> None:
    admission, _ = made(level=253)
    decide(admission, [5, 6, 7], [DEPTH_UNKNOWN] * 3)
    budget_left = decide(admission, [1, 5, 6, 7], [0, 0, 0, 0], now_s=10.0)
    assert budget_left == [TOO_DEEP, NONE, NONE, NONE]


def test_the_limit_grows_with_the_level_from_nothing_to_everything() -> None:
    admission, _ = made(level=0)
    limits = [admission.depth_limit(level * BLOCK) for level in range(-10, 1001)]
    assert limits == sorted(limits)
    assert limits[:261] == [0] * 261
    assert limits[-1] == limits[910] == DEPTH_ANY
    assert 64 in [admission.depth_limit(level * BLOCK) for level in (575, 576)], "half-way to plenty"


BATCHES = st.lists(
    st.tuples(
        st.floats(0, 30),
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 200)), max_size=20, unique_by=lambda b: b[0]),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(BATCHES, st.floats(1, 60), st.floats(0, 1), st.floats(0, 0.9))
def test_never_is_more_admitted_than_rate_and_burst_and_a_block(
    batches: list[tuple[float, list[tuple[int, int]]]], burst: float, filled: float, reserve: float
) -> None:
    admission, budget = made(level=burst * filled, burst=burst, reserve=reserve)
    now_s, admitted = 0.0, 0
    for passed_s, blocks in batches:
        now_s += passed_s
        answer = decide(admission, [n for n, _ in blocks], [depth for _, depth in blocks], now_s=now_s)
        budget.spend(answer.count(NONE) * BLOCK)
        admitted += answer.count(NONE)
        assert budget.level_at(now_s) / BLOCK >= -1 - 1e-6, "at most one block more than there was"
    assert admitted <= now_s + burst * filled + 1 + 1e-6


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 60), st.integers(0, 60), st.floats(0, 80))
def test_blocks_seen_before_get_the_same_answer_in_one_batch_or_in_two(
    count: int, at: int, level: float
) -> None:
    numbers, depths = list(range(count)), [0] * count
    answers = []
    for cuts in ((0, count), (0, min(at, count), count)):
        admission, budget = made(level=0, burst=1000)
        decide(admission, numbers, depths)
        budget.spend(int(20 * BLOCK - level * BLOCK))
        answer: list[Reason] = []
        for begin, end in pairwise(cuts):
            part = decide(admission, numbers[begin:end], depths[begin:end], now_s=20.0)
            budget.spend(part.count(NONE) * BLOCK)
            answer += part
        answers.append(answer)
    assert answers[0] == answers[1]


LEAST_BYTES = 4096


def fresh(count: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)


def test_a_block_is_known_from_its_second_touch_on() -> None:
    ghost = GhostFilter(1 << 16, retry_s=10.0)
    assert not ghost.touch(0.0, keys_of([1, 2])).any()
    assert ghost.touch(10.0, keys_of([3, 2])).tolist() == [False, True]
    assert ghost.touch(11.0, keys_of([1, 2, 3])).tolist() == [True, True, False]


def test_touches_within_the_time_of_a_retry_count_as_one() -> None:
    ghost = GhostFilter(1 << 16, retry_s=10.0)
    for now_s in (0.0, 0.1, 5.0, 9.9):
        assert not ghost.touch(now_s, keys_of([7]))[0]
    assert ghost.touch(10.0, keys_of([7]))[0]


def test_without_a_time_for_retries_every_touch_counts() -> None:
    ghost = GhostFilter(1 << 16, retry_s=0.0)
    assert not ghost.touch(0.0, keys_of([7]))[0]
    assert ghost.touch(0.0, keys_of([7]))[0]


def test_no_touch_of_nothing_changes_anything() -> None:
    ghost = GhostFilter(LEAST_BYTES, retry_s=1.0)
    for now_s in range(5):
        assert ghost.touch(float(now_s), keys_of([])).tolist() == []


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1 << 30), st.lists(st.integers(1, 700), min_size=1, max_size=12))
def test_a_key_is_known_until_as_many_others_as_the_capacity_have_come(seed: int, batches: list[int]) -> None:
    ghost = GhostFilter(LEAST_BYTES, retry_s=1.0)
    keys, now_s, begin = fresh(sum(batches), seed), 0.0, 0
    for count in batches:
        ghost.touch(now_s, keys[begin : begin + count])
        now_s, begin = now_s + 2.0, begin + count
    starts = np.cumsum([0, *batches[:-1]])
    recent = starts[begin - starts <= ghost.capacity]
    assert ghost.touch(now_s, keys[int(recent.min(initial=begin)) :]).all()


def test_keys_touched_again_are_kept_and_others_are_forgotten() -> None:
    ghost = GhostFilter(LEAST_BYTES, retry_s=0.0)
    kept, once, half = fresh(50, 1), fresh(50, 2), ghost.capacity // 2
    ghost.touch(0.0, np.concatenate([kept, once]))
    for turn in range(8):
        ghost.touch(1.0 + turn, fresh(half, 100 + turn))
        assert ghost.touch(1.5 + turn, kept).all()
    assert np.count_nonzero(ghost.touch(20.0, once)) <= 5


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_full_filter_claims_few_keys_that_it_has_never_seen(is_mixed: bool) -> None:
    ghost = GhostFilter(1 << 16, retry_s=0.0)
    asked = 40_000
    count = 2 * ghost.capacity - 1 + asked
    all_keys = fresh(count, 3) if is_mixed else keys_of(np.arange(count))
    ghost.touch(0.0, all_keys[: 2 * ghost.capacity - 1])
    # Looked at without being entered, so that the generations stay full.
    places = ghost._places(all_keys[-asked:])
    claimed = np.count_nonzero(_has(ghost._current, places) | _has(ghost._previous, places))
    assert claimed / asked < 0.008


@pytest.mark.parametrize("memory_bytes", [LEAST_BYTES, 10_000, 4 << 20])
def test_memory_stays_within_its_limit(memory_bytes: int) -> None:
    ghost = GhostFilter(memory_bytes, retry_s=1e9)
    for turn in range(20):
        ghost.touch(float(turn), fresh(5000, turn))
    assert 0.95 * memory_bytes <= ghost.memory_bytes <= memory_bytes
    assert 1.4 <= ghost._current.nbytes / ghost.capacity <= 1.6


def test_more_touches_than_the_queue_holds_count_early_the_oldest_first() -> None:
    ghost = GhostFilter(LEAST_BYTES, retry_s=1e6)
    waiting = len(ghost._waiting_keys)
    keys = fresh(3 * waiting // 2, 5)
    ghost.touch(0.0, keys)
    known = ghost.touch(1.0, keys)
    assert known[: waiting // 2].all()
    assert np.count_nonzero(known[waiting // 2 :]) <= 2


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 300), unique=True, max_size=200), st.data())
def test_a_batch_cut_in_parts_is_answered_as_in_one(numbers: list[int], data: st.DataObject) -> None:
    whole, cut = GhostFilter(LEAST_BYTES, retry_s=1.0), GhostFilter(LEAST_BYTES, retry_s=1.0)
    for turn in range(3):
        keys = keys_of([(number * (turn + 1)) % 307 for number in numbers])
        at = data.draw(st.integers(0, len(keys)))
        answered = [cut.touch(2.0 * turn, part) for part in (keys[:at], keys[at:])]
        assert whole.touch(2.0 * turn, keys).tolist() == np.concatenate(answered).tolist()
