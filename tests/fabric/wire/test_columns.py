"""Columns: read back as written, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ostraca_fabric.errors import MalformedError
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import Outcomes

READERS: dict[int, Callable[[bytes, int], NDArray[Any]]] = {1: codec.u8, 4: codec.u32, 8: codec.u64}


@pytest.mark.parametrize("width", [1, 4, 8])
@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_values_are_little_endian_on_every_machine(width: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 256**width - 1), max_size=20))
    column = b"".join(value.to_bytes(width, "little") for value in values)
    read = READERS[width]
    assert read(column, len(values)).tolist() == values


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("change_bytes", [-1, 1])
def test_a_column_too_short_or_too_long_is_refused(width: int, change_bytes: int) -> None:
    read = READERS[width]
    with pytest.raises(MalformedError, match="where 3 values were due"):
        read(bytes(3 * width + change_bytes), 3)


@given(st.lists(st.integers(-3, 12), max_size=6))
def test_numbers_are_distinct_unless_one_occurs_twice(numbers: list[int]) -> None:
    assert codec.are_distinct(np.array(numbers, np.int64)) == (len({*numbers}) == len(numbers))


def test_an_empty_column_stands_for_no_blocks_only() -> None:
    assert codec.u32(b"", 0).shape == (0,)
    assert codec.rows16(b"", 0).shape == (0, 16)
    with pytest.raises(MalformedError):
        codec.u32(b"", 1)


def test_keys_and_tags_are_rows_of_16_bytes() -> None:
    rows = codec.rows16(bytes(range(32)), 2)
    assert [row.tobytes() for row in rows] == [bytes(range(16)), bytes(range(16, 32))]


@pytest.mark.parametrize("length", [0, 16, 31, 33, 48])
def test_rows_too_few_or_too_many_are_refused(length: int) -> None:
    with pytest.raises(MalformedError):
        codec.rows16(bytes(length), 2)


def test_positions_may_name_any_block_of_the_request() -> None:
    column = np.array([4, 0, 3], "<u4").tobytes()
    assert codec.positions(column, 5).tolist() == [4, 0, 3]
    assert codec.positions(b"", 0).tolist() == []


@pytest.mark.parametrize(("position", "blocks"), [(5, 5), (2**32 - 1, 5), (0, 0)])
def test_a_position_beyond_the_request_is_refused(position: int, blocks: int) -> None:
    with pytest.raises(MalformedError, match=f"position {position} in a request of {blocks} blocks"):
        codec.positions(np.array([0, position], "<u4").tobytes() if blocks else bytes(4), blocks)


def test_positions_of_broken_length_are_refused() -> None:
    with pytest.raises(MalformedError):
        codec.positions(bytes(6), 5)


def test_a_column_that_was_read_cannot_be_written_to() -> None:
    assert not codec.u64(bytes(8), 1).flags.writeable


def test_some_blocks_get_one_outcome_or_a_value_each() -> None:
    outcomes = Outcomes.filled(4, BlockState.LATE, Reason.DEADLINE)
    outcomes.set(slice(0, 1), BlockState.HIT)
    outcomes.set(np.array([2, 3]), BlockState.MISS, np.array([Reason.NOT_FOUND, Reason.DAMAGED], np.uint8))
    assert len(outcomes) == 4
    assert outcomes.encode() == (bytes([1, 2, 0, 0]), bytes([0, 6, 1, 2]))


def test_a_copy_changes_alone() -> None:
    outcomes = Outcomes.filled(2, BlockState.MISS, note="closed")
    other = outcomes.copy()
    assert other == outcomes
    other.set(slice(None), BlockState.HIT)
    assert other != outcomes
    assert outcomes == Outcomes.filled(2, BlockState.MISS, note="closed")
    assert repr(other) == "Outcomes([1, 1], [0, 0], 'closed')"


def test_columns_of_another_length_are_refused() -> None:
    assert Outcomes.read(b"\1\0", b"\0\1", 2) == Outcomes(
        np.array([1, 0], np.uint8), np.array([0, 1], np.uint8)
    )
    with pytest.raises(MalformedError, match="3 values"):
        Outcomes.read(b"\1\0\0", b"\0\1", 3)


@given(st.lists(st.integers(min_value=0, max_value=1000)))
def test_the_different_ones_of_small_numbers_come_once_and_in_order(numbers: list[int]) -> None:
    assert codec.distinct(np.array(numbers, np.intp)).tolist() == sorted(set(numbers))
