"""Write budget: a token bucket of bytes.

The bucket fills at a rate of bytes per day up to a burst, and every write drains it. Optional writes check
``level_at`` first. Unconditional writes (summaries, blocks reinserted from an evicted segment) are spent as
well, and may take the level below zero: later writes then wait. So over any time ``t``, optional writes are
at most ``rate x t + burst`` plus one block for each decision.

``SharedBudget`` divides a budget among pools by share. A part is a token bucket: its pool's share of the rate
and of the burst. The common pool has the rest. Income beyond a full part is *lent*: it pays for any pool
without budget, first come, first served. So no pool spends another's income, and unsaved income is not lost.
The total of all parts and the lent bytes never exceeds one burst. Without parts the budget equals the
original ``WriteBudget``.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        """Return the budget of a shard: the drive's budget, by the shard's part of its bytes.

        Begins with the reserve for blocks seen twice. So an agent that restarts repeatedly gets only the
        reserve each time, not a whole burst.
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
        """Return the bytes that may be written now; below zero after overspending.

        Time never runs backwards here.
        """
        self.fill(now_s)
        return self._level_bytes

    def fill(self, now_s: float) -> float:
        """Add the income until now; return the bytes beyond the burst."""
        passed_s = max(0.0, now_s - self._at_s)
        full_bytes = self._level_bytes + passed_s * self._bytes_per_s
        self._level_bytes = min(self.burst_bytes, full_bytes)
        self._at_s += passed_s
        return full_bytes - self._level_bytes

    @property
    def left_bytes(self) -> float:
        """Level at the last query, less the bytes spent since."""
        return self._level_bytes

    def spend(self, written_bytes: float) -> None:
        """Count a write, at any level."""
        self._level_bytes -= written_bytes


_FILL_EVERY_S = 1.0
"""Interval of the check of all parts for bytes to lend. Income since the last check does not count towards
the common limit."""

_REST = 0
"""Part of all pools without a share."""


class PoolBudget:
    """Budget of one pool."""

    def __init__(self, whole: SharedBudget, own: WriteBudget) -> None:
        """Pay from *own*, then from bytes lent by others."""
        self._whole = whole
        self.own = own

    @property
    def burst_bytes(self) -> float:
        """Largest saved budget of its own."""
        return self.own.burst_bytes

    def level_at(self, now_s: float) -> float:
        """Return the bytes that the pool may write now."""
        return self._whole.level_of(self, now_s)


class SharedBudget:
    """Bytes that may be written now, by pool."""

    def __init__(self, whole: WriteBudget, now_s: float) -> None:
        """Begin without parts."""
        self._bytes_per_day, self.burst_bytes = whole.bytes_per_day, whole.burst_bytes
        self._lent_bytes = 0.0
        self._unsaved_bytes = 0.0
        """Income beyond full parts, not lent yet."""

        self._filled_s = now_s
        self._shares = {_REST: 1.0}
        self._parts = {_REST: PoolBudget(self, whole)}

    def part_of(self, pool: int) -> PoolBudget:
        """Return the budget of a pool."""
        return self._parts.get(pool) or self._parts[_REST]

    def share_out(self, shares: Mapping[int, float], now_s: float) -> None:
        """Assign these pools their shares, 0 to 1 in total, and the rest to all others.

        The total is preserved: a new pool takes the same part of the rest's level as of the rest's rate. The
        rest gets the bytes above a part's new burst, and the bytes of removed parts.
        """
        after = {pool: share for pool, share in shares.items() if pool != _REST}
        assert sum(after.values()) <= 1.0 + 1e-9, "no more than all is shared out"
        after[_REST] = max(0.0, 1.0 - sum(after.values()))
        if after == self._shares:
            return
        self._fill(now_s)
        before, before_shares = self._parts, self._shares
        levels = {pool: part.own.level_at(now_s) for pool, part in before.items()}
        rest_bytes, rest_share = levels.pop(_REST), before_shares[_REST]
        taken = {pool: share for pool, share in after.items() if pool not in before}
        per_share = max(0.0, rest_bytes) / rest_share if rest_share > 0 else 0.0
        for pool, share in taken.items():
            levels[pool] = per_share * min(share, rest_share * share / sum(taken.values()))
            rest_bytes -= levels[pool]
        for pool in [pool for pool in levels if pool not in after]:
            rest_bytes += levels.pop(pool)
        for pool, level_bytes in levels.items():
            levels[pool] = min(level_bytes, after[pool] * self.burst_bytes)
            rest_bytes += level_bytes - levels[pool]
        if len(after) == 1:
            rest_bytes, self._lent_bytes = rest_bytes + self._lent_bytes, 0.0
        levels[_REST] = min(rest_bytes, after[_REST] * self.burst_bytes)
        self._lent_bytes += rest_bytes - levels[_REST]
        self._shares = after
        self._parts = {
            pool: PoolBudget(self, self._bucket(share, levels[pool], now_s)) for pool, share in after.items()
        }

    def level_at(self, now_s: float) -> float:
        """Return the bytes that all pools together may write now; below zero after overspending."""
        if len(self._parts) == 1:
            return self._parts[_REST].own.level_at(now_s) + self._lent_bytes
        self._fill(now_s)
        return sum(part.own.level_at(now_s) for part in self._parts.values()) + self._lent_bytes

    def level_of(self, part: PoolBudget, now_s: float) -> float:
        """Return the bytes that one part may write now."""
        if len(self._parts) > 1 and now_s >= self._filled_s + _FILL_EVERY_S:
            self._fill(now_s)
        self._unsaved_bytes += part.own.fill(now_s)
        return part.own.level_at(now_s) + self._lent_bytes

    def spend(self, written_bytes: int, pool: int = _REST) -> None:
        """Count a write at any level: from the pool's own part, then from lent bytes."""
        own = self.part_of(pool).own
        borrowed = min(max(0.0, written_bytes - max(0.0, own.left_bytes)), self._lent_bytes)
        self._lent_bytes -= borrowed
        own.spend(written_bytes - borrowed)

    def _bucket(self, share: float, level_bytes: float, now_s: float) -> WriteBudget:
        return WriteBudget(
            bytes_per_day=self._bytes_per_day * share,
            burst_bytes=self.burst_bytes * share,
            level_bytes=level_bytes,
            now_s=now_s,
        )

    def _fill(self, now_s: float) -> None:
        self._filled_s = max(now_s, self._filled_s)
        unsaved_bytes = self._unsaved_bytes + sum(part.own.fill(now_s) for part in self._parts.values())
        self._unsaved_bytes = 0.0
        if len(self._parts) > 1 and (unsaved_bytes or self._lent_bytes):
            # Lend income beyond full parts, as far as the common burst allows.
            room_bytes = self.burst_bytes - sum(part.own.left_bytes for part in self._parts.values())
            self._lent_bytes = max(0.0, min(room_bytes, self._lent_bytes + unsaved_bytes))
