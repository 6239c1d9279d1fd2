"""Telling numbers apart. BLAKE2b of rows is held against ``hashlib`` where keys, seeds and placement are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ostraca_fabric.rows import distinct


@given(st.lists(st.integers(min_value=0, max_value=1000)))
def test_the_different_ones_of_small_numbers_come_once_and_in_order(numbers: list[int]) -> None:
    assert distinct(np.array(numbers, np.intp)).tolist() == sorted(set(numbers))
