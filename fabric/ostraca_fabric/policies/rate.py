"""A rate of bytes: a token bucket that holds one second of them. Pure.

What is taken is known only when it is over, so it is taken beforehand, and what was not used is given back. A
bucket that holds anything lets one request in, however large, and then owes: over any time ``t`` no more than
``rate x (t + 1)`` and one request's bytes for each of those under way are used.
"""

from __future__ import annotations


class RateLimit:
    """One limit, which may change at any time."""

    def __init__(self, now_s: float) -> None:
        """Begin with no limit."""
        self._bytes_per_s = 0
        self._level_bytes = 0.0
        self._at_s = now_s

    def fullness(self, now_s: float, bytes_per_s: int) -> float:
        """Return the part of the bucket that is filled, at this rate: 1 where it is 0, which stands for no
        limit; 0 or less where nothing may be taken.
        """
        passed_s, self._at_s = max(0.0, now_s - self._at_s), max(self._at_s, now_s)
        if not self._bytes_per_s:
            self._level_bytes = float(bytes_per_s)
        self._bytes_per_s = bytes_per_s
        if not bytes_per_s:
            return 1.0
        self._level_bytes = min(float(bytes_per_s), self._level_bytes + passed_s * bytes_per_s)
        return self._level_bytes / bytes_per_s

    def take(self, taken_bytes: int) -> None:
        """Take bytes; less than none gives back what was taken and not used."""
        if self._bytes_per_s:
            self._level_bytes = min(float(self._bytes_per_s), self._level_bytes - taken_bytes)
