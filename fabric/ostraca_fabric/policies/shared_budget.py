"""One write budget, of which pools with a share have a part each.

A part is a token bucket of its own: as much of the rate, and of the burst, as its pool's share. The common
pool has the rest. What finds no room in a part that is full is *lent*: it pays for whoever has spent its own,
first come, first served. So nobody spends what has come in for another, and what nobody saves up is not lost;
and all that is saved up, in parts and to lend, is never more than one burst. With no parts this is the
``WriteBudget`` that it was made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.policies.write_budget import WriteBudget

if TYPE_CHECKING:
    from collections.abc import Mapping

_FILL_EVERY_S = 1.0
"""How often all parts are looked at for what they lend. What came in since is not counted in what all may
save up."""

_REST = 0
"""The part of everybody that has none."""


class Part:
    """What pays for one pool."""

    def __init__(self, whole: SharedBudget, own: WriteBudget) -> None:
        """Pay with what is its own, then with what others lend."""
        self._whole = whole
        self.own = own

    @property
    def burst_bytes(self) -> float:
        """What can be saved up of its own."""
        return self.own.burst_bytes

    def level_at(self, now_s: float) -> float:
        """Return what it may write now."""
        return self._whole.level_of(self, now_s)


class SharedBudget:
    """Bytes that may be written now, and by whom."""

    def __init__(self, whole: WriteBudget, now_s: float) -> None:
        """Begin with no parts."""
        self._bytes_per_day, self.burst_bytes = whole.bytes_per_day, whole.burst_bytes
        self._lent_bytes = 0.0
        self._unsaved_bytes = 0.0
        """Came in where it found no room, and was not lent yet."""

        self._filled_s = now_s
        self._shares = {_REST: 1.0}
        self._parts = {_REST: Part(self, whole)}

    def part_of(self, pool: int) -> Part:
        """Return what pays for a pool."""
        return self._parts.get(pool) or self._parts[_REST]

    def share_out(self, shares: Mapping[int, float], now_s: float) -> None:
        """Give each of these pools its share, 0 to 1 in all, and the others the rest.

        Nothing is gained or lost by it: a pool that is new takes along as much of the rest's level as of its
        rate, and what a part can't hold any more, or leaves behind, is the rest's.
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
            pool: Part(self, self._bucket(share, levels[pool], now_s)) for pool, share in after.items()
        }

    def level_at(self, now_s: float) -> float:
        """Return what may be written now by all together; below zero when too much was."""
        if len(self._parts) == 1:
            return self._parts[_REST].own.level_at(now_s) + self._lent_bytes
        self._fill(now_s)
        return sum(part.own.level_at(now_s) for part in self._parts.values()) + self._lent_bytes

    def level_of(self, part: Part, now_s: float) -> float:
        """Return what one part may write now."""
        if len(self._parts) > 1 and now_s >= self._filled_s + _FILL_EVERY_S:
            self._fill(now_s)
        self._unsaved_bytes += part.own.fill(now_s)
        return part.own.level_at(now_s) + self._lent_bytes

    def spend(self, written_bytes: int, pool: int = _REST) -> None:
        """Count a write, whether or not the level allows it: of the pool's own, and then of what is lent."""
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
            # What found no room where it came in, as far as all together may save it up.
            room_bytes = self.burst_bytes - sum(part.own.left_bytes for part in self._parts.values())
            self._lent_bytes = max(0.0, min(room_bytes, self._lent_bytes + unsaved_bytes))
