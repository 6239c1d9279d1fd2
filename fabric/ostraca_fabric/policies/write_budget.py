"""The write budget: a token bucket of bytes.

It fills at a rate of bytes per day up to a burst, and every write empties it. Who decides about a write looks
at ``level_at`` first; what is written whatever the level says (summaries, blocks carried forward from an
evicted segment) is spent as well, and may take the level below zero: the next writes wait for it. So in any
time ``t``, what is written by those who ask first is at most ``rate x t + burst`` and one block for each
decision.
"""

from __future__ import annotations

from typing import Self

from ostraca_fabric.policies.endurance import DAY_S, EnduranceSettings


class WriteBudget:
    """Bytes that may be written now."""

    def __init__(self, *, bytes_per_day: float, burst_bytes: float, level_bytes: float, now_s: float) -> None:
        """Begin with *level_bytes*, at most *burst_bytes*."""
        assert bytes_per_day >= 0, "a budget never empties by itself"
        assert level_bytes <= burst_bytes, "no more is saved up than the burst"
        self.burst_bytes = burst_bytes
        self.bytes_per_day = bytes_per_day
        self._bytes_per_s = bytes_per_day / DAY_S
        self._level_bytes = level_bytes
        self._at_s = now_s

    @classmethod
    def of_shard(cls, settings: EnduranceSettings, *, size_bytes: int, now_s: float) -> Self:
        """Return the budget of a shard: its drive's, by the shard's part of the drive's bytes.

        It begins with the part that is kept for blocks seen twice. So an agent that starts again and again
        gets that each time, and not a whole burst.
        """
        bytes_per_day = settings.budget_bytes_per_day(size_bytes)
        burst_bytes = bytes_per_day * settings.burst_s / DAY_S
        return cls(
            bytes_per_day=bytes_per_day,
            burst_bytes=burst_bytes,
            level_bytes=burst_bytes * settings.first_touch_reserve,
            now_s=now_s,
        )

    def level_at(self, now_s: float) -> float:
        """Return what may be written now; below zero when too much was. Time never runs backwards here."""
        self.fill(now_s)
        return self._level_bytes

    def fill(self, now_s: float) -> float:
        """Let in what has come in until now; return how much of it found no room."""
        passed_s = max(0.0, now_s - self._at_s)
        full_bytes = self._level_bytes + passed_s * self._bytes_per_s
        self._level_bytes = min(self.burst_bytes, full_bytes)
        self._at_s += passed_s
        return full_bytes - self._level_bytes

    @property
    def left_bytes(self) -> float:
        """The level when it was asked last, less what was spent since."""
        return self._level_bytes

    def spend(self, written_bytes: float) -> None:
        """Count a write, whether or not the level allows it."""
        self._level_bytes -= written_bytes
