"""Until when blocks are worth keeping, for those of which their writers said it.

Such an end only tells eviction what not to carry forward: a block can be got until its segment goes. The
index has three bits a block for it, a *mark*: 0 for no end, else the number of one of seven ends that its
segment's blocks share. Ends are rounded up to an eighth of the time to live at most, so that puts of one kind
share them. Blocks that come when all seven are taken have the next later end, and the latest of all is put
off for those that need a later one. So blocks are kept longer than was said, never shorter.

64 bytes for each segment, of memory that is not touched where no put says anything. Nothing of it is on
flash: after a restart no block has an end.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.flash.index import MARKS

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_END_S = math.inf

_ROUNDED_BITS = 3
"""An end is rounded up by at most one in two to the power of so many of its time to live."""

_STEP_S_MIN = 2.0**-10


def end_of(now_s: float, ttl_s: float) -> float:
    """Return when a block put now is no longer worth keeping; NO_END_S for one with no end."""
    if not ttl_s < NO_END_S:
        return NO_END_S
    step_s = max(_STEP_S_MIN, 2.0 ** (math.frexp(ttl_s)[1] - 1 - _ROUNDED_BITS))
    return math.ceil((now_s + ttl_s) / step_s) * step_s


class Lifetimes:
    """The ends of the blocks of each segment."""

    def __init__(self, segments: int) -> None:
        """Know of no end."""
        self._ends_s = np.zeros((segments, MARKS))  # 0: none

    def marks(self, segment: int, ends_s: NDArray[np.float64]) -> NDArray[np.uint32]:
        """Return marks that stand for these ends, all above 0, in this segment, or for later ones."""
        marks = np.zeros(len(ends_s), np.uint32)
        has_end = ends_s < NO_END_S
        if has_end.any():
            for end_s in np.unique(ends_s[has_end]).tolist():
                marks[ends_s == end_s] = self._mark(segment, end_s)
        return marks

    def ends_s(self, segments: int | NDArray[np.intp], marks: NDArray[np.uint32]) -> NDArray[np.float64]:
        """Return the ends of blocks with these marks, all in one segment or each in its own."""
        ends_s = self._ends_s[segments, marks]
        return np.where(ends_s > 0, ends_s, NO_END_S)

    def forget(self, segment: int) -> None:
        """The segment has no blocks any more."""
        if self._ends_s[segment].any():
            self._ends_s[segment] = 0

    def _mark(self, segment: int, end_s: float) -> int:
        known = self._ends_s[segment, 1:]
        for fits in (known == end_s, known == 0):
            if fits.any():
                known[fits.argmax()] = end_s
                return 1 + int(fits.argmax())
        later = np.flatnonzero(known > end_s)
        chosen = later[known[later].argmin()] if len(later) else known.argmax()
        known[chosen] = max(float(known[chosen]), end_s)
        return 1 + int(chosen)
