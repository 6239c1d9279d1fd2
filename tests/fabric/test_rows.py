"""Telling numbers apart, and BLAKE2b of many rows beside hashlib's of one."""

from __future__ import annotations

import hashlib
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca_fabric.rows import blake2b_rows, distinct

DICE = Random(7)


@given(st.lists(st.integers(min_value=0, max_value=1000)))
def test_the_different_ones_of_small_numbers_come_once_and_in_order(numbers: list[int]) -> None:
    assert distinct(np.array(numbers, np.intp)).tolist() == sorted(set(numbers))


@pytest.mark.parametrize("key_bytes", [0, 32])
@pytest.mark.parametrize("prefix_bytes", [0, 3, 128])
@pytest.mark.parametrize("row_bytes", [8, 120, 127, 300])
@pytest.mark.parametrize("has_one_suffix", [True, False])
def test_each_row_is_hashed_as_if_it_were_alone_however_many_there_are(
    key_bytes: int, prefix_bytes: int, row_bytes: int, has_one_suffix: bool
) -> None:
    key, prefix = DICE.randbytes(key_bytes), DICE.randbytes(prefix_bytes)
    for count in range(10):
        rows = DICE.randbytes(count * row_bytes)
        suffixes = [b"suffix-0"] * count if has_one_suffix else [DICE.randbytes(8) for _ in range(count)]
        column = np.frombuffer(b"".join(suffixes), np.uint8).reshape(count, 8)
        made = blake2b_rows(
            prefix,
            rows,
            b"suffix-0" if has_one_suffix else column,
            count=count,
            digest_bytes=20,
            person=b"for-tests",
            key=key,
        )
        assert [row.tobytes() for row in made] == [
            hashlib.blake2b(
                prefix + rows[row * row_bytes : (row + 1) * row_bytes] + suffixes[row],
                key=key,
                digest_size=20,
                person=b"for-tests",
            ).digest()
            for row in range(count)
        ]
