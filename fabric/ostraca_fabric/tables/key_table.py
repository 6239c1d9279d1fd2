"""Table of rows by 16-byte key: finds many keys in one call, without the GIL.

The keys are a column of the caller, shape (rows, 16). The table has 8 bytes per place, and at least two
places per row. Not thread-safe.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.native import at, brief
from ostraca_fabric.tables.digests import KEY_BYTES, contiguous_keys


class KeyTable:
    """Table of the rows of *keys*. The caller owns *keys*, and keeps the array in place."""

    def __init__(self, keys: NDArray[np.uint8]) -> None:
        rows = len(keys)
        assert keys.shape == (rows, KEY_BYTES)
        assert 0 < rows < 1 << 31, f"a table for {rows} rows"
        self._keys = keys
        self._places = np.zeros(1 << rows.bit_length() + 1, np.uint64)
        self._at = at(self._places), len(self._places) - 1, at(keys)
        self.count = 0
        """Number of rows entered."""

    def find(self, wanted: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the row of each key of *wanted*, shape (n, 16); -1 for an absent key."""
        wanted = contiguous_keys(wanted)
        rows = np.empty(len(wanted), np.int64)
        brief.ostraca_table_find(*self._at, at(wanted), at(rows), len(rows))
        return rows

    def match(
        self, wanted: NDArray[np.uint8], numbers: NDArray[np.uint32], wanted_numbers: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find keys whose row has the wanted number; return positions in *wanted*, and rows.

        *numbers* has a number per row, *wanted_numbers* a number per key of *wanted*, shape (n, 16).
        """
        wanted = contiguous_keys(wanted)
        wanted_numbers = np.ascontiguousarray(wanted_numbers, np.uint32)
        assert len(wanted) == len(wanted_numbers), "a number is wanted for each key"
        assert numbers.dtype == np.uint32
        assert len(numbers) == len(self._keys), "each row has a number"
        found = np.empty((2, len(wanted)), np.int64)
        count = brief.ostraca_table_match(
            *self._at, at(numbers), at(wanted), at(wanted_numbers), at(found), len(wanted)
        )
        return found[0, :count], found[1, :count]

    def enter(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Enter rows with written keys; tell per row whether entered.

        A row is refused if another row has the same key, also within this call. A refused row must not be
        removed.
        """
        holders = np.empty(len(rows), np.int64)
        rows = np.ascontiguousarray(rows, np.int64)
        brief.ostraca_table_enter(*self._at, at(rows), at(holders), len(rows))
        is_entered: NDArray[np.bool_] = holders == rows
        self.count += int(np.count_nonzero(is_entered))
        assert 2 * self.count <= len(self._places), "more rows were entered than there are"
        return is_entered

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Remove rows, each entered and named once, with unchanged keys."""
        rows = np.ascontiguousarray(rows, np.int64)
        removed = brief.ostraca_table_remove(*self._at, at(rows), len(rows))
        self.count -= removed
        assert removed == len(rows), "a row was taken out that was not in the table"


def first_of_each(keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Tell for each key, shape (n, 16), whether no equal key precedes."""
    if len(keys) <= 1:
        return np.ones(len(keys), np.bool_)
    return KeyTable(contiguous_keys(keys)).enter(np.arange(len(keys)))
