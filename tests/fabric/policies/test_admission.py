from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ostraca_fabric.outcome import Reason
from ostraca_fabric.policies.admission import DEPTH_ANY, DEPTH_UNKNOWN, Admission
from ostraca_fabric.policies.endurance import DAY_S
from ostraca_fabric.policies.ghost_filter import GhostFilter
from ostraca_fabric.policies.write_budget import WriteBudget

BLOCK = 4096
NONE, TOO_DEEP, SPENT = Reason.NONE, Reason.ADMISSION, Reason.BUDGET


def made(*, level: float, burst: float = 1000, reserve: float = 0.25) -> tuple[Admission, WriteBudget]:
    """An admission whose budget is counted in blocks, and gets one block a second."""
    budget = WriteBudget(
        bytes_per_day=DAY_S * BLOCK, burst_bytes=burst * BLOCK, level_bytes=level * BLOCK, now_s=0.0
    )
    ghost = GhostFilter(1 << 16, retry_s=10.0)
    return Admission(budget, ghost, first_touch_reserve=reserve, half_way_blocks=64), budget


def keys_of(numbers: list[int]) -> NDArray[np.uint8]:
    keys = np.zeros((len(numbers), 2), np.int64)
    keys[:, 0] = numbers
    return keys.view(np.uint8)


def decide(
    admission: Admission, numbers: list[int], depths: list[int], *, now_s: float = 0.0
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
