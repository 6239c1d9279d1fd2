"""Chunks with failed loads: misses for every request, for a while.

Without this set, an engine would find a damaged or vanished chunk again and load the chunk again, forever.
"""

from __future__ import annotations

from collections.abc import Iterable


class FailedLoads:
    """Set of held-off chunks, bounded: the oldest leave first."""

    def __init__(self, *, entries_max: int, hold_s: float) -> None:
        self._entries_max = entries_max
        self._hold_s = hold_s
        self._until_s: dict[bytes, float] = {}

    def add(self, keys: Iterable[bytes], now_s: float) -> None:
        """Hold chunks off, after a false or damaged hit."""
        for key in keys:
            self._until_s.pop(key, None)
            self._until_s[key] = now_s + self._hold_s
        while len(self._until_s) > self._entries_max:
            del self._until_s[next(iter(self._until_s))]

    def holds(self, key: bytes, now_s: float) -> bool:
        """Tell whether a chunk is held off."""
        until_s = self._until_s.get(key)
        if until_s is None:
            return False
        if now_s < until_s:
            return True
        del self._until_s[key]
        return False
