from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ostraca_fabric.policies.ghost_filter import GhostFilter, _has

LEAST_BYTES = 4096


def keys_of(numbers: NDArray[np.int64] | list[int]) -> NDArray[np.uint8]:
    """Keys that differ in few bits: the filter must not depend on how well keys are mixed."""
    keys = np.zeros((len(numbers), 2), np.int64)
    keys[:, 0] = numbers
    return keys.view(np.uint8)


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
