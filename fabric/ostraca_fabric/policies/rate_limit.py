"""Rate limit in bytes: a token bucket that holds one second's bytes. Pure.

The exact bytes of a request are known only at its end, so the caller takes an estimate first and gives unused
bytes back. A bucket above zero admits one request of any size, and then goes into debt. Over any time ``t``,
usage is at most ``rate x (t + 1)`` plus the bytes of one request for each request in progress.
"""

from __future__ import annotations


class RateLimit:
    """Rate limit, changeable at any time."""

    def __init__(self, now_s: float) -> None:
        """Begin without a limit."""
        self._bytes_per_s = 0
        self._level_bytes = 0.0
        self._at_s = now_s

    def fullness(self, now_s: float, bytes_per_s: int) -> float:
        """Return the filled part of the bucket at this rate.

        1 at rate 0, which means no limit; 0 or less if no bytes may be taken.
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
        """Take bytes; a negative number gives unused bytes back."""
        if self._bytes_per_s:
            self._level_bytes = min(float(self._bytes_per_s), self._level_bytes - taken_bytes)
