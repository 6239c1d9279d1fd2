"""Generations, whole pages, and pieces of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostraca_fabric.model.extent import (
    PAGE_BYTES,
    Generation,
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
