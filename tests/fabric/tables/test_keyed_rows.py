"""Rows by key: a model of a dictionary, through growth and reuse of rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.support.invariants import check_keyed_rows

from ostraca_fabric.tables.keyed_rows import KeyedRows

KEYS = np.random.default_rng(1).integers(0, 256, (24, 16), np.uint8)

Steps = list[tuple[bool, list[int]]]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 23), max_size=8)), max_size=20))
def test_keys_keep_their_rows_until_removed(steps: Steps) -> None:
    sizes: list[int] = []
    keyed, model = KeyedRows(1, sizes.append), dict[int, int]()
    for is_added, numbers in steps:
        if is_added:
            rows, is_new = keyed.add(KEYS[numbers])
            first = [number not in model and number not in numbers[:at] for at, number in enumerate(numbers)]
            assert is_new.tolist() == first
            new = [number for number, is_first in zip(numbers, first, strict=True) if is_first]
            model.update(zip(new, rows.tolist(), strict=True))
        else:
            gone = [number for number in dict.fromkeys(numbers) if number in model]
            keyed.remove(np.array([model.pop(number) for number in gone], np.int64))
        assert keyed.find(KEYS).tolist() == [model.get(number, -1) for number in range(len(KEYS))]
        check_keyed_rows(keyed, np.array(list(model.values()), np.int64))
    assert sizes == sorted(set(sizes)), "each growth is reported, once"
    assert not model or max(model.values()) < max([1, *sizes])
