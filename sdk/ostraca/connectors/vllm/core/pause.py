"""Pauses: how long a fabric that does not answer is left alone.

While a pause lasts, chunks are misses at once, so a dead fabric costs one request its deadline now and then,
not every request. One answer that came late proves nothing, several in a row do; a lost connection does at
once. Each pause that follows another without a success between them is twice as long.
"""

from __future__ import annotations


class Pause:
    """One direction's pause."""

    def __init__(self, *, first_s: float, longest_s: float, lates_max: int) -> None:
        """Pause when *lates_max* requests in a row were late."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._lates_max = lates_max
        self._lates = 0
        self._next_s = first_s
        self._until_s = float("-inf")

    def holds(self, now_s: float) -> bool:
        """Tell whether nothing is to be tried now."""
        return now_s < self._until_s

    def late(self, now_s: float) -> None:
        """Something was tried, and no answer came in time."""
        self._lates += 1
        if self._lates >= self._lates_max:
            self.failed(now_s)

    def failed(self, now_s: float) -> None:
        """Something was tried in vain. What had been tried before a pause does not lengthen it."""
        if self.holds(now_s):
            return
        self._until_s = now_s + self._next_s
        self._next_s = min(self._longest_s, 2 * self._next_s)

    def succeeded(self) -> None:
        """Something was answered."""
        self._until_s = float("-inf")
        self._next_s = self._first_s
        self._lates = 0
