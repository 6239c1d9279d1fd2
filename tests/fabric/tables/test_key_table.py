"""The key table agrees with a dict, whatever is entered and taken out, however keys collide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ostraca_fabric.tables.key_table import KeyTable

ROWS = 64

# Few values in the bytes that the table hashes by, so that keys share places and 32-bit prints.
few = st.sampled_from([b"\0" * 8, b"\1" + b"\0" * 7, b"\xff" * 8, b"\0" * 4 + b"\1" * 4])
keys = st.tuples(few, st.binary(min_size=1, max_size=1)).map(lambda parts: parts[0] + parts[1] * 8)


def column(wanted: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(wanted), np.uint8).reshape(-1, 16)


@given(st.lists(st.tuples(st.booleans(), st.lists(keys, max_size=8)), max_size=20))
@settings(deadline=None, max_examples=150)
def test_it_knows_what_a_dict_knows(steps: list[tuple[bool, list[bytes]]]) -> None:
    held = np.zeros((ROWS, 16), np.uint8)
    table, model = KeyTable(held), dict[bytes, int]()
    free = list(range(ROWS))
    for enters, named in steps:
        if enters:
            rows = [free.pop() for _ in named[: len(free)]]
            held[rows] = column(named)[: len(rows)]
            entered = table.enter(np.array(rows, np.int64)).tolist()
            for row, key, is_entered in zip(rows, named, entered, strict=False):
                assert is_entered == (key not in model)
                if is_entered:
                    model[key] = row
                else:
                    free.append(row)
        else:
            rows = [model.pop(key) for key in dict.fromkeys(named) if key in model]
            table.remove(np.array(rows, np.int64))
            free += rows
        wanted = [*model, *named, bytes(16), b"absent" + bytes(10)]
        assert table.find(column(wanted)).tolist() == [model.get(key, -1) for key in wanted]
        assert table.count == len(model)
        lengths = np.arange(ROWS, dtype=np.uint32) % 2
        positions, found = table.match(column(wanted), lengths, np.ones(len(wanted), np.uint32))
        matching = [(at, model[key]) for at, key in enumerate(wanted) if model.get(key, 0) % 2]
        assert list(zip(positions.tolist(), found.tolist(), strict=True)) == matching


def test_a_table_as_full_as_it_gets_finds_every_row() -> None:
    held = np.random.default_rng(1).integers(0, 256, (1000, 16)).astype(np.uint8)
    table = KeyTable(held)
    assert table.enter(np.arange(1000)).all()
    assert table.find(held).tolist() == list(range(1000))
    table.remove(np.arange(0, 1000, 2))
    assert table.find(held).tolist() == [-1 if row % 2 == 0 else row for row in range(1000)]


def test_taking_out_what_is_not_there_is_a_broken_call() -> None:
    held = np.zeros((4, 16), np.uint8)
    held[:, 0] = range(4)
    table = KeyTable(held)
    table.enter(np.array([1, 2]))
    with pytest.raises(AssertionError, match="not in the table"):
        table.remove(np.array([3]))
