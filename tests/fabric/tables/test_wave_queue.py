"""Which blocks of a stream form the next wave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca_fabric.tables.digests import CheckState
from ostraca_fabric.tables.slots import WaveQueue

PENDING, GOOD, DAMAGED = (np.uint8(state) for state in CheckState)


def queue(states: list[np.uint8], per_wave: int = 4) -> tuple[WaveQueue, np.ndarray]:
    column = np.array(states, np.uint8)
    return WaveQueue(len(states), column, per_wave=per_wave), column


def test_blocks_in_memory_are_all_ready() -> None:
    waves = WaveQueue(6, None, per_wave=4)
    first, second = waves.take(), waves.take()
    assert first is not None
    assert second is not None
    assert first[1].tolist() == [0, 1, 2, 3]
    assert second[1].tolist() == [4, 5]
    assert waves.take() is None
    assert not waves.is_over
    assert waves.freeze().tolist() == [GOOD] * 6
    assert waves.settle(first[0]).tolist() == [0, 1, 2, 3]
    waves.settle(second[0])
    assert waves.is_over


@pytest.mark.parametrize(
    ("blocks", "later", "sizes"),
    [
        (64, 16, [8, 16, 16, 12, 8, 4]),
        (64, 8, [8] * 8),
        (64, 0, [8] * 8),
        (64, 100, [8, 28, 14, 8, 6]),
        (12, 16, [8, 4]),
        (5, 16, [5]),
    ],
)
def test_later_waves_grow_and_the_last_are_small(blocks: int, later: int, sizes: list[int]) -> None:
    waves = WaveQueue(blocks, None, per_wave=8, per_later_wave=later)
    moved: list[int] = []
    for size in sizes:
        taken = waves.take()
        assert taken is not None
        assert len(taken[1]) == size
        moved += taken[1].tolist()
        waves.settle(taken[0])
    assert moved == list(range(blocks))
    assert waves.is_over


def test_waves_of_blocks_that_become_ready_do_not_grow() -> None:
    waves = WaveQueue(12, np.full(12, GOOD), per_wave=4, per_later_wave=8)
    first, second = waves.take(), waves.take()
    assert first is not None
    assert second is not None
    assert second[1].tolist() == [4, 5, 6, 7]


def test_a_third_wave_waits_for_one_of_two() -> None:
    waves = WaveQueue(12, None, per_wave=4)
    first = waves.take()
    assert first is not None
    assert waves.take() is not None
    assert waves.take() is None
    waves.settle(first[0])
    assert waves.take() is not None


def test_a_small_wave_begins_only_where_none_is_under_way_or_nothing_more_comes() -> None:
    waves, states = queue([GOOD, *[PENDING] * 7])
    first = waves.take()
    assert first is not None
    states[1] = GOOD
    assert waves.take() is None, "half a wave will be there before the first has settled"
    states[2] = GOOD
    second = waves.take()
    assert second is not None
    assert second[1].tolist() == [1, 2]
    waves.settle(first[0])
    states[3] = GOOD
    assert waves.take() is None
    waves.freeze()
    last = waves.take()
    assert last is not None
    assert last[1].tolist() == [3]


def test_the_last_blocks_move_and_end_the_stream_without_a_freeze() -> None:
    waves, states = queue([GOOD, *[PENDING] * 4])
    first = waves.take()
    assert first is not None
    states[1:4] = GOOD
    second = waves.take()
    assert second is not None
    waves.settle(first[0])
    states[4] = GOOD
    assert not waves.is_over
    last = waves.take()
    assert last is not None, "no other block will be there"
    assert last[1].tolist() == [4]
    waves.settle(second[0])
    assert not waves.is_over
    waves.settle(last[0])
    assert waves.is_over


def test_blocks_that_become_good_after_the_freeze_never_move() -> None:
    waves, states = queue([GOOD, PENDING, DAMAGED])
    frozen = waves.freeze()
    states[:] = GOOD
    assert frozen.tolist() == [GOOD, PENDING, DAMAGED]
    taken = waves.take()
    assert taken is not None
    assert taken[1].tolist() == [0]
    waves.settle(taken[0])
    assert waves.is_over


def test_a_stop_names_what_is_under_way() -> None:
    waves = WaveQueue(6, None, per_wave=2)
    first, second = waves.take(), waves.take()
    assert first is not None
    assert second is not None
    waves.settle(first[0])
    assert waves.stop().tolist() == [2, 3]
    assert waves.take() is None
    assert not waves.is_over
    waves.settle(second[0])
    with pytest.raises(KeyError):
        waves.settle(second[0])
    assert waves.is_over


@given(st.lists(st.tuples(st.integers(0, 19), st.booleans()), max_size=60), st.integers(1, 7), st.data())
def test_each_good_block_moves_once_and_no_other(
    steps: list[tuple[int, bool]], per_wave: int, data: st.DataObject
) -> None:
    waves, states = queue([PENDING] * 20, per_wave)
    under_way: list[int] = []
    moved: list[int] = []

    def settle_one() -> None:
        waves.settle(under_way.pop(data.draw(st.integers(0, len(under_way) - 1))))

    for row, is_good in steps:
        if states[row] == PENDING:
            states[row] = GOOD if is_good else DAMAGED
        if (taken := waves.take()) is not None:
            number, rows = taken
            assert 0 < len(rows) <= per_wave
            moved += rows.tolist()
            under_way.append(number)
        if len(under_way) == 2:
            settle_one()
    frozen = waves.freeze()
    while not waves.is_over:
        if (taken := waves.take()) is not None:
            moved += taken[1].tolist()
            under_way.append(taken[0])
        else:
            settle_one()
    assert sorted(moved) == np.flatnonzero(frozen == GOOD).tolist()
    assert not under_way
