"""Segmented LRU over rows: order of eviction of a cache.

A row waits in one of two queues. A row enters *probation*, and moves to *protected* when released after its
second use. Overflow of protected returns to the end of probation. Rows are evicted from the front of
probation, and from protected only when probation is empty. So blocks used only once evict each other, not
blocks used again. A held row is in no queue, and stays.

On a public trace of conversations (Mooncake, FAST'25), hit rates for a cache of 1, 5 and 10 % of all blocks
were: LRU .052, .195, .278; this order, with protected at 30 % of the bytes, .060, .207, .289; at 80 %, a
frequent choice, .058, .127, .207. With a scan as large as the cache after every 400 requests: LRU .051, .107,
.107; this order .058, .160, .168.

Pure bookkeeping: a call handles many rows, in time proportional to their number. Not thread-safe.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.native import at, brief

OUTSIDE, HELD, PROBATION, PROTECTED = range(4)
PARTS_MAX = 1 << 16
"""Range of a row's part number: far more than the tenants of a host."""

# Same layout as in `segmented_lru.c`.
ROW = np.dtype(
    [
        ("bytes", np.int64),
        ("next", np.int32),
        ("previous", np.int32),
        ("users", np.int32),
        ("uses", np.uint8),
        ("where", np.uint8),
        ("part", np.uint16),
    ]
)
STATE = np.dtype(
    [
        ("probation_first", np.int64),
        ("probation_last", np.int64),
        ("probation_bytes", np.int64),
        ("protected_first", np.int64),
        ("protected_last", np.int64),
        ("protected_bytes", np.int64),
        ("entered_bytes", np.int64),
        ("protected_max_bytes", np.int64),
    ]
)


class SegmentedLru:
    """Order of eviction of rows.

    Rows are numbers from 0; each has at least one page of bytes.
    """

    def __init__(self, rows: int, *, protected_max_bytes: int) -> None:
        """Begin with one part and no row; protected may have *protected_max_bytes*."""
        self._states = np.zeros(0, STATE)
        self._rows = np.zeros(0, ROW)
        self.grow(rows)
        self.add_part(protected_max_bytes=protected_max_bytes)

    def grow(self, rows: int) -> None:
        """Add rows; entered rows stay in place."""
        self._rows = np.concatenate((self._rows, np.zeros(rows - len(self._rows), ROW)))
        self.bytes = self._rows["bytes"]
        """Bytes per row; read only."""
        self.uses = self._rows["uses"]
        """Uses per row, 2 for two or more; read only."""
        self._at = at(self._states), at(self._rows)

    def add_part(self, *, protected_max_bytes: int) -> int:
        """Add a part, PARTS_MAX at most; return its number."""
        state = np.zeros(1, STATE)
        for queue in ("probation", "protected"):
            state[f"{queue}_first"] = state[f"{queue}_last"] = -1
        state["protected_max_bytes"] = protected_max_bytes
        self._states = np.concatenate((self._states, state))
        assert len(self._states) <= PARTS_MAX
        self.part_bytes = self._states["entered_bytes"]
        """Bytes of entered rows per part, held or not; read only."""
        self._at = at(self._states), at(self._rows)
        return len(self._states) - 1

    def protect(self, most_bytes: NDArray[np.int64]) -> None:
        """Set the maximum bytes of protected, per part."""
        assert len(most_bytes) == len(self._states)
        brief.ostraca_lru_protect(*self._at, at(most_bytes), len(most_bytes))

    @property
    def entered_bytes(self) -> int:
        """Bytes of entered rows, held or not."""
        each = self.part_bytes
        return int(each[0] if len(each) == 1 else each.sum())

    @property
    def entered(self) -> NDArray[np.int64]:
        """Entered rows, held or not."""
        return np.flatnonzero(self._rows["where"] != OUTSIDE)

    @property
    def held(self) -> NDArray[np.int64]:
        """Held rows."""
        return np.flatnonzero(self._rows["where"] == HELD)

    def enter(self, rows: NDArray[np.int64], row_bytes: int, *, uses: int, part: int = 0) -> None:
        """Enter distinct outside rows of *row_bytes* each; *uses* is 0 for no use yet."""
        self.bytes[rows] = row_bytes
        self.uses[rows] = uses
        brief.ostraca_lru_enter(*self._at, at(rows), len(rows), part)

    def hold(self, rows: NDArray[np.int64]) -> None:
        """Use and hold entered rows; -1 is skipped. A row named twice is held twice."""
        brief.ostraca_lru_hold(*self._at, at(rows), len(rows))

    def let_go(self, rows: NDArray[np.int64]) -> None:
        """End a hold of each row."""
        gone = brief.ostraca_lru_let_go(*self._at, at(rows), len(rows))
        assert gone == len(rows), "a row was let go of that nobody holds"

    def demote(self, rows: NDArray[np.int64]) -> None:
        """Limit the uses of entered rows to one.

        Rows in protected move to the end of probation.
        """
        self.uses[rows] = np.minimum(self.uses[rows], 1)
        protected = np.unique(rows[self._rows["where"][rows] == PROTECTED])
        if len(protected):
            uses = self.uses[protected]
            self.hold(protected)
            self.uses[protected] = uses  # holding must not count as a use
            self.let_go(protected)

    def evict(self, wanted_bytes: int, *, part: int = 0) -> NDArray[np.int64]:
        """Remove rows of a part in order of eviction, until *wanted_bytes* are removed.

        Fewer bytes are removed if all remaining rows are held.
        """
        rows = np.empty(max(0, -(-wanted_bytes // PAGE_BYTES)), np.int64)
        count = brief.ostraca_lru_evict(*self._at, wanted_bytes, at(rows), len(rows), part)
        return rows[:count]
