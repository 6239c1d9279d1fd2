"""Rows by key: finds many 16-byte keys in one call, without the interpreter lock.

The keys themselves lie in a column of their user's, shape (rows, 16); the table holds 8 bytes for each place,
and has at least two places for each row. Not thread-safe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.keys import KEY_BYTES
from ostraca_fabric.native import at, library

if TYPE_CHECKING:
    from numpy.typing import NDArray


class KeyTable:
    """Which row of *keys* has a key. *keys* is its user's, and keeps its place in memory."""

    def __init__(self, keys: NDArray[np.uint8]) -> None:
        rows = len(keys)
        assert keys.shape == (rows, KEY_BYTES)
        assert 0 < rows < 1 << 31, f"a table for {rows} rows"
        self._keys = keys
        self._places = np.zeros(1 << rows.bit_length() + 1, np.uint64)
        self._at = at(self._places), len(self._places) - 1, at(keys)
        self._count = 0

    def __len__(self) -> int:
        """Count the rows entered."""
        return self._count

    def find(self, wanted: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the row of each key of *wanted*, shape (n, 16); -1 where there is none."""
        wanted = _whole(wanted)
        rows = np.empty(len(wanted), np.int64)
        library.ostraca_table_find(*self._at, at(wanted), at(rows), len(rows))
        return rows

    def match(
        self, wanted: NDArray[np.uint8], numbers: NDArray[np.uint32], wanted_numbers: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find keys whose row has a certain number: return their positions in *wanted*, and their rows.

        *numbers* has one for each row, *wanted_numbers* one for each key of *wanted*, shape (n, 16).
        """
        wanted = _whole(wanted)
        wanted_numbers = np.ascontiguousarray(wanted_numbers, np.uint32)
        assert len(wanted) == len(wanted_numbers), "a number is wanted for each key"
        assert numbers.dtype == np.uint32
        assert len(numbers) == len(self._keys), "each row has a number"
        found = np.empty((2, len(wanted)), np.int64)
        count = library.ostraca_table_match(
            *self._at, at(numbers), at(wanted), at(wanted_numbers), at(found), len(wanted)
        )
        return found[0, :count], found[1, :count]

    def enter(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Enter rows whose keys are written. A row whose key another has, also of this call, stays out.

        Says which were entered. A row that stays out must not be removed.
        """
        holders = np.empty(len(rows), np.int64)
        rows = np.ascontiguousarray(rows, np.int64)
        library.ostraca_table_enter(*self._at, at(rows), at(holders), len(rows))
        is_entered: NDArray[np.bool_] = holders == rows
        self._count += int(np.count_nonzero(is_entered))
        assert 2 * self._count <= len(self._places), "more rows were entered than there are"
        return is_entered

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Take rows out, each entered and named once, and their keys not changed since."""
        rows = np.ascontiguousarray(rows, np.int64)
        removed = library.ostraca_table_remove(*self._at, at(rows), len(rows))
        self._count -= removed
        assert removed == len(rows), "a row was taken out that was not in the table"


def first_of_each(keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Say which of these keys, shape (n, 16), have no equal before them."""
    if len(keys) <= 1:
        return np.ones(len(keys), np.bool_)
    return KeyTable(_whole(keys)).enter(np.arange(len(keys)))


def _whole(keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return keys as C reads them: one after another, of 16 bytes each."""
    whole = np.ascontiguousarray(keys, np.uint8)
    assert whole.shape == (len(whole), KEY_BYTES), f"keys of shape {whole.shape}"
    return whole
