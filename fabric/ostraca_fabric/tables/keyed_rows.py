"""Rows found by key, in columns that grow: a free list around a ``KeyTable``. Not thread-safe."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.tables.digests import KEY_BYTES
from ostraca_fabric.tables.key_table import KeyTable


class KeyedRows:
    """Numbers of rows by 16-byte key. The caller has further columns, of the same number of rows."""

    def __init__(self, rows: int, on_grown: Callable[[int], None]) -> None:
        """Begin without a key; *on_grown* receives the new number of rows, to lengthen other columns."""
        self._on_grown = on_grown
        self._keys = np.zeros((rows, KEY_BYTES), np.uint8)
        self._table = KeyTable(self._keys)
        self._free = np.arange(rows)
        """Free rows; the first ``_free_rows`` are valid."""
        self._free_rows = rows

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._table.count

    def keys(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the keys of rows, shape (n, 16). A removed row keeps its key until the next ``add``."""
        return self._keys[rows]

    def find(self, keys: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the row of each key, shape (n, 16); -1 for an absent key."""
        return self._table.find(keys)

    def match(
        self, keys: NDArray[np.uint8], numbers: NDArray[np.uint32], wanted_numbers: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find keys whose row has the wanted number, as ``KeyTable.match``."""
        return self._table.match(keys, numbers, wanted_numbers)

    def add(self, keys: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Give new keys a row; return the rows, and which of *keys*, shape (n, 16), are new."""
        if self._free_rows < len(keys):
            self._grow(len(keys))
        first = self._free_rows - len(keys)
        rows = self._free[first : self._free_rows].copy()
        self._keys[rows] = keys
        is_new = self._table.enter(rows)
        if not is_new.all():
            spare = rows[~is_new]
            self._free[first : first + len(spare)] = spare
            rows = rows[is_new]
        self._free_rows -= len(rows)
        return rows, is_new

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Remove the keys of rows, and free the rows."""
        self._table.remove(rows)
        self._free[self._free_rows : self._free_rows + len(rows)] = rows
        self._free_rows += len(rows)

    def _grow(self, wanted: int) -> None:
        """Make room for at least *wanted* rows; doubling keeps the cost per row low."""
        old, free = len(self._keys), self._free[: self._free_rows]
        new = max(2 * old, old + wanted)
        used = np.setdiff1d(np.arange(old), free)
        self._keys = np.concatenate((self._keys, np.zeros((new - old, KEY_BYTES), np.uint8)))
        self._free_rows = len(free) + new - old
        self._free = np.concatenate((free, np.arange(old, new), np.zeros(new - self._free_rows, np.int64)))
        self._table = KeyTable(self._keys)
        self._table.enter(used)
        self._on_grown(new)
