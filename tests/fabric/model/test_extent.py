"""Generations, whole pages, and pieces of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostraca_fabric.model.extent import (
    PAGE_BYTES,
    Generation,
    cut_by_bytes,
    generation,
    generation_parts,
    rounded_up,
)

parts = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))


@given(parts, parts)
@settings(deadline=None)
def test_generations_compare_by_epoch_and_then_by_count(one: tuple[int, int], other: tuple[int, int]) -> None:
    packed, packed_other = (generation(epoch=epoch, count=count) for epoch, count in (one, other))
    assert generation_parts(packed) == one
    assert (packed < packed_other) == (one < other)
    assert 0 <= packed < 2**64


def test_generation_zero_is_that_of_no_epoch() -> None:
    assert generation(epoch=0, count=0) == 0
    assert generation_parts(Generation(0)) == (0, 0)


@pytest.mark.parametrize(("epoch", "count"), [(-1, 0), (0, -1), (2**32, 0), (0, 2**32)])
def test_a_generation_that_does_not_fit_is_an_error(epoch: int, count: int) -> None:
    with pytest.raises(OverflowError, match="out of range"):
        generation(epoch=epoch, count=count)


@given(st.integers(0, 2**48), st.sampled_from([1, 512, PAGE_BYTES, 3]))
@settings(deadline=None)
def test_rounding_up_gives_the_least_multiple_that_holds_the_bytes(length_bytes: int, multiple: int) -> None:
    rounded = rounded_up(length_bytes, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - length_bytes < multiple


def test_pages_are_the_default_multiple() -> None:
    assert [rounded_up(each) for each in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


@given(st.lists(st.integers(1, 2**32 - 1), max_size=40), st.integers(1, 2**34))
@settings(deadline=None)
def test_pieces_hold_all_blocks_in_order_and_are_short_without_their_last(
    lengths: list[int], piece_bytes: int
) -> None:
    pieces = cut_by_bytes(np.array(lengths, np.uint32), piece_bytes)
    held = [range(len(lengths))[piece] for piece in pieces]
    assert [block for blocks in held for block in blocks] == list(range(len(lengths)))
    for blocks in held:
        assert len(blocks) > 0
        assert sum(lengths[block] for block in blocks[:-1]) < piece_bytes


@pytest.mark.parametrize(
    ("lengths", "piece_bytes", "ends"),
    [
        ([], 8, []),
        ([9], 8, [1]),
        ([4, 4, 4, 4], 8, [2, 4]),
        ([4, 4, 4, 4], 9, [3, 4]),
        ([1, 20, 1, 1], 8, [2, 4]),
        ([2**32 - 1] * 3, 2**32, [2, 3]),
    ],
)
def test_a_piece_ends_where_its_bytes_are_reached(
    lengths: list[int], piece_bytes: int, ends: list[int]
) -> None:
    assert [piece.stop for piece in cut_by_bytes(np.array(lengths, np.uint32), piece_bytes)] == ends
