"""What a cache lets go of first: a segmented LRU over rows.

A row waits in one of two queues. It enters *probation*, and goes to *protected* when it is let go of after
its second use; what protected can't hold goes back to probation's end. The first of probation goes first, and
protected is touched only when probation is empty. So blocks that pass through once push each other out, and
not those that were used again. A row that is held is in no queue, and stays.

On a public trace of conversations (Mooncake, FAST'25) hit rates were, for a cache of 1, 5 and 10 % of all
blocks: LRU .052, .195, .278; this, with protected at 30 % of the bytes, .060, .207, .289; at 80 %, as often
chosen, .058, .127, .207. With a scan as large as the cache after every 400 requests: LRU .051, .107, .107,
this .058, .160, .168.

Pure bookkeeping, in one call for many rows, and in time proportional to their number. Not thread-safe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.native import at, library

if TYPE_CHECKING:
    from numpy.typing import NDArray

OUTSIDE, HELD, PROBATION, PROTECTED = range(4)
PARTS_MAX = 1 << 16
"""As many as a row can tell apart: far more than a host has tenants."""

# Both are laid out as in `segmented_lru.c`.
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
    """The order in which rows give way. Rows are numbers from 0; each has at least one page of bytes."""

    def __init__(self, rows: int, *, protected_max_bytes: int) -> None:
        """Begin with one part, and no row entered; protected may have *protected_max_bytes* of it."""
        self._states = np.zeros(0, STATE)
        self._rows = np.zeros(0, ROW)
        self.grow(rows)
        self.add_part(protected_max_bytes=protected_max_bytes)

    def grow(self, rows: int) -> None:
        """Make room for more rows; those entered stay where they are."""
        self._rows = np.concatenate((self._rows, np.zeros(rows - len(self._rows), ROW)))
        self.bytes = self._rows["bytes"]
        """Of each row; read only."""
        self.uses = self._rows["uses"]
        """How often each row was used, 2 standing for more; read only."""
        self._at = at(self._states), at(self._rows)

    def add_part(self, *, protected_max_bytes: int) -> int:
        """Make one more part, at most PARTS_MAX in all; returns its number."""
        state = np.zeros(1, STATE)
        for queue in ("probation", "protected"):
            state[f"{queue}_first"] = state[f"{queue}_last"] = -1
        state["protected_max_bytes"] = protected_max_bytes
        self._states = np.concatenate((self._states, state))
        assert len(self._states) <= PARTS_MAX
        self.part_bytes = self._states["entered_bytes"]
        """Bytes of each part's rows that are entered, held or not; read only."""
        self._at = at(self._states), at(self._rows)
        return len(self._states) - 1

    def protect(self, most_bytes: NDArray[np.int64]) -> None:
        """Set the most bytes that protected may have, for each part."""
        assert len(most_bytes) == len(self._states)
        library.ostraca_lru_protect(*self._at, at(most_bytes), len(most_bytes))

    @property
    def entered_bytes(self) -> int:
        """Bytes of the rows that are entered, held or not."""
        each = self.part_bytes
        return int(each[0] if len(each) == 1 else each.sum())

    @property
    def entered(self) -> NDArray[np.int64]:
        """The rows that are entered, held or not."""
        return np.flatnonzero(self._rows["where"] != OUTSIDE)

    @property
    def held(self) -> NDArray[np.int64]:
        """The rows that are held."""
        return np.flatnonzero(self._rows["where"] == HELD)

    def enter(self, rows: NDArray[np.int64], row_bytes: int, *, uses: int, part: int = 0) -> None:
        """Enter rows that are outside, each named once and of *row_bytes*; *uses* is 0 for none yet."""
        self.bytes[rows] = row_bytes
        self.uses[rows] = uses
        library.ostraca_lru_enter(*self._at, at(rows), len(rows), part)

    def hold(self, rows: NDArray[np.int64]) -> None:
        """Use and hold rows that are entered; -1 stands for none. A row named twice is held twice."""
        library.ostraca_lru_hold(*self._at, at(rows), len(rows))

    def let_go(self, rows: NDArray[np.int64]) -> None:
        """End a hold of each of these rows."""
        gone = library.ostraca_lru_let_go(*self._at, at(rows), len(rows))
        assert gone == len(rows), "a row was let go of that nobody holds"

    def demote(self, rows: NDArray[np.int64]) -> None:
        """Take rows that are entered for used once at most: those in protected go to probation's end."""
        self.uses[rows] = np.minimum(self.uses[rows], 1)
        protected = np.unique(rows[self._rows["where"][rows] == PROTECTED])
        if len(protected):
            uses = self.uses[protected]
            self.hold(protected)
            self.uses[protected] = uses  # that was none
            self.let_go(protected)

    def evict(self, wanted_bytes: int, *, part: int = 0) -> NDArray[np.int64]:
        """Take rows of a part out, the first to go first, until they have *wanted_bytes* or all others of it
        are held.
        """
        rows = np.empty(max(0, -(-wanted_bytes // PAGE_BYTES)), np.int64)
        count = library.ostraca_lru_evict(*self._at, wanted_bytes, at(rows), len(rows), part)
        return rows[:count]

    def check(self) -> None:
        """Assert that the queues hold what the rows say."""
        for part in range(len(self._states)):
            self._check_part(part)
        rows = self._rows
        assert self.entered_bytes == rows["bytes"][self.entered].sum()
        assert (rows["users"][self.held] > 0).all()
        assert (rows["part"] < len(self._states)).all()

    def _check_part(self, part: int) -> None:
        rows, state = self._rows, self._states[part]
        is_its = rows["part"] == part
        for queue, where in (("probation", PROBATION), ("protected", PROTECTED)):
            seen, row, previous = [], int(state[f"{queue}_first"]), -1
            while row >= 0:
                assert rows[row]["where"] == where
                assert rows[row]["users"] == 0
                assert rows[row]["part"] == part
                assert rows[row]["previous"] == previous
                seen.append(row)
                row, previous = int(rows[row]["next"]), row
            assert state[f"{queue}_last"] == previous
            assert len(set(seen)) == len(seen) == np.count_nonzero(is_its & (rows["where"] == where))
            assert state[f"{queue}_bytes"] == rows["bytes"][seen].sum()
        assert state["protected_bytes"] <= state["protected_max_bytes"]
        assert self.part_bytes[part] == rows["bytes"][is_its & (rows["where"] != OUTSIDE)].sum()
