"""Permission of an owner epoch to write: grant of segments, and fence.

A *grant* lists the segments that an owner epoch may write. The owner opens only segments of its own grant,
and no segment under an unretired grant of an earlier epoch: such a segment is *withheld*. Space is allocated
and summaries are written only until the *fence*, the time until which the owner's claim is known to be valid.
Each confirmation postpones the fence; a higher epoch on flash or in the membership store is a final fence. A
mere mention of a higher epoch, as in a commit, puts the claim in *doubt*: nothing is allocated or written
until the store has been asked again. Only the store can end an owner.

The wanted grant covers the segments in use and the segments next in line to be opened. After recording it the
caller calls ``apply_grant``. Until then the wanted grant stays the same, and no segment outside it is opened.
A segment leaves the grant ``late_write_s`` after the end of its last reservation or summary write: then no
write to it is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter

import numpy as np

from ostraca_dpu_agent.shards.core.ring.pools import Pool, Segment, SegmentState
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_dpu_agent.shards.core.write_budget import ShardWriteBudget
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.runtime.sentences import counted

AHEAD_S = 600.0
"""Time that a grant lasts at the rate of the write budget: etcd is asked at most every five minutes, and may
be down for as long."""

AHEAD_BYTES_S = 1e9
"""Rate without a budget."""

AHEAD_MAX = 1024
"""Limit of segments granted ahead. A longer record is costly; an extension each minute costs little."""

_SHARD_SHARE = 4
"""At most ``1 / _SHARD_SHARE`` of the segments is granted ahead: a successor has the others at once."""

_ASK_BELOW = 0.5
_ASK_BELOW_OF_PART = 0.25
_REMEMBERED = 2
"""Multiple of the line up to which segments taken by pools are remembered; then the counts are halved."""

_DAY_S = 86_400.0

_DOUBT_INTERVAL_S = 1.0
"""Minimum interval between doubts about a claim found valid: a caller with wrong higher epochs stops writes
only for a query to the store per interval."""


class Grants:
    """Permission of one owner epoch to write; none at first."""

    def __init__(self, ring: Ring, budget: ShardWriteBudget, *, late_write_s: float) -> None:
        """Begin in recovery: without a grant, and with the fence passed."""
        self._ring = ring
        self._budget = budget
        self._late_write_s = late_write_s
        self.epoch = OwnerEpoch(0)
        """Owner epoch; 0 during recovery."""

        self.is_recovering = True
        self.is_writable = True
        """False once summaries can't be written any more."""

        self.segments: frozenset[int] = frozenset()
        """Segments of the recorded grant. This epoch writes no other segment."""

        self.is_withheld = np.zeros(ring.geometry.segments, np.bool_)
        """Whether each segment is under an unretired grant of an earlier epoch."""

        self.until_s = -math.inf
        """Time of the fence."""

        self.is_fenced = False
        """Whether the fence is final."""

        self.is_doubted = False
        """Whether a higher epoch was named, and the store was not asked since."""

        self._doubted_s = -math.inf
        self._trusted_until_s = -math.inf
        self._resumed: frozenset[int] = frozenset()
        self._requested: frozenset[int] | None = None

    @property
    def withheld(self) -> frozenset[int]:
        """Segments under unretired grants."""
        return frozenset(np.flatnonzero(self.is_withheld).tolist())

    def begin(self, epoch: OwnerEpoch, *, withheld: frozenset[int], resumed: frozenset[int]) -> None:
        """End recovery under *epoch*. *resumed* segments are withheld too, but stay in the own grant."""
        self.epoch, self.is_recovering = epoch, False
        self.is_withheld[list(withheld | resumed)] = True
        self._resumed = resumed

    def retire(self, segments: list[int]) -> None:
        """End the withholding of these segments."""
        self.is_withheld[segments] = False
        self._resumed -= frozenset(segments)

    def confirm(self, until_s: float, asked_s: float) -> None:
        """Postpone the fence, unless it is final. A doubt ends if the store was asked after it."""
        self.until_s = max(self.until_s, until_s)
        if self.is_doubted and asked_s >= self._doubted_s:
            self.is_doubted = False
            self._trusted_until_s = self._doubted_s + _DOUBT_INTERVAL_S

    def fence(self) -> None:
        """Make the fence final."""
        self.is_fenced = True

    def end_writing(self) -> None:
        """Write nothing any more, as summaries can't be written."""
        self.is_writable = False

    def doubt(self, now_s: float) -> None:
        """Write nothing until the store was asked again, as a higher epoch was named.

        Has no effect without a store, where the fence never passes.
        """
        if not self.is_doubted and now_s >= self._trusted_until_s and self.until_s < math.inf:
            self.is_doubted, self._doubted_s = True, now_s

    def may_write(self, now_s: float) -> bool:
        """Return whether space may be allocated and summaries written now."""
        return not self.is_doubted and not self.has_ended(now_s)

    def has_ended(self, now_s: float) -> bool:
        """Return whether the fence has passed or is final, whatever the doubt."""
        return now_s >= self.until_s or self.is_fenced

    def refusal(self, now_s: float) -> Reason:
        """Return the reason why the shard takes no block now, or NONE."""
        if not self.is_writable:
            return Reason.DRIVE_ERROR
        if self.is_recovering:
            return Reason.RECOVERING
        return Reason.NONE if self.may_write(now_s) else Reason.FENCED

    def may_open(self, number: int) -> bool:
        """Return whether the grant allows the opening of a segment."""
        is_requested = self._requested is None or number in self._requested
        return number in self.segments and is_requested and not self.is_withheld[number]

    def first_free(self) -> Segment | None:
        """Return the next free segment to open, or None if none near the head of the line may be opened."""
        few = islice(self._ring.free, self.ahead)
        return next((segment for segment in few if self.may_open(segment.number)), None)

    def oldest_sealed(self, pool: Pool, *, for_itself: bool = False) -> Iterator[Segment]:
        """Yield sealed segments of a pool that the grant allows to reuse, in turn.

        Stops after too many others: the line needs a new grant then, and no call visits more than the head of
        a long ring. With *for_itself* the pool only has to shrink: if another segment can be opened,
        ungranted segments are yielded too.
        """
        skipped, any_will_do = 0, for_itself and self.first_free() is not None
        for segment in pool.sealed:
            if any_will_do or self.may_open(segment.number):
                yield segment
            elif (skipped := skipped + 1) > self.ahead:
                return

    def may_spare(self, number: int) -> bool:
        """Return whether the grant allows a sealed segment that is next in line to stay in place.

        A granted segment may stay while at least one, and nearly half of the line, remains granted: the store
        may be unable to grant more.
        """
        if not self.may_open(number):
            return True
        granted = self.segments if self._requested is None else self.segments & self._requested
        return len(granted.intersection(self._line()) - {number}) >= max(1, self._granted_min - 1)

    @property
    def ahead(self) -> int:
        """Number of segments next in line that the grant should hold."""
        geometry = self._ring.geometry
        rate = self._budget.budget_bytes_per_day / _DAY_S or AHEAD_BYTES_S
        wanted = math.ceil(AHEAD_S * rate / geometry.segment_bytes)
        return max(self._ring.segments_ahead_min, min(wanted, geometry.segments // _SHARD_SHARE, AHEAD_MAX))

    def wanted(self, now_s: float) -> tuple[int, ...] | None:
        """Return the segments to record as the own grant; None while the present grant suffices.

        The answer stays the same until ``apply``.
        """
        if self.is_recovering or self.is_fenced or not self.is_writable:
            return None
        if self._requested is None:
            line = self._line()
            # Sealed segments that are still granted are of no use while others are free.
            has_next = not self._ring.free or self.first_free() is not None
            if has_next and self._granted_of(line) >= self._granted_min and not self._any_pool_lacks():
                return None
            in_use = (number for number in self.segments if self._is_in_use(number, now_s))
            wanted = frozenset(line).union(in_use, self._resumed)
            if wanted <= self.segments:
                return None
            self._requested = wanted
        return tuple(sorted(self._requested))

    def apply(self, segments: Iterable[int]) -> None:
        """Use the grant as recorded now."""
        self.segments, self._requested = frozenset(segments), None
        pools = list(self._ring.pools)
        if sum(pool.recently_taken for pool in pools) > _REMEMBERED * self.ahead:
            for pool in pools:
                pool.recently_taken /= 2

    def in_doubt(self, now_s: float) -> tuple[int, ...]:
        """Return the granted segments still in reach of a write, once nothing is allocated any more.

        Such segments have reservations, or a write abandoned or failed within ``late_write_s``.
        """
        segments = self._ring.segments
        return tuple(
            number
            for number in sorted(self.segments)
            if segments[number].is_busy or now_s < segments[number].quiet_at_s
        )

    @property
    def granted_ahead(self) -> int:
        """Number of granted segments that are next in line."""
        return self._granted_of(self._line())

    def _line(self) -> list[int]:
        ring = self._ring
        sealed: Iterator[Segment]
        if ring.pools.by_number:
            sealed = chain.from_iterable(islice(pool.sealed, part) for pool, part in self._parts())
        else:
            sealed = iter(ring.pools.common.sealed)
        return [segment.number for segment in islice(chain(ring.free, ring.draining, sealed), self.ahead)]

    def _parts(self) -> list[tuple[Pool, int]]:
        """Return how many of each pool's oldest segments are in line behind the free ones.

        The forecast is the recent use by pools. A pool at the limit takes its own segments; the others take
        segments of the pool farthest above the limit.
        """
        ring = self._ring
        left = self.ahead - len(ring.free) - len(ring.draining)
        if left <= 0:
            return []
        pools = [pool for pool in ring.pools if pool.sealed]
        gives_way = max(
            pools, key=lambda pool: pool.segments - pool.limits.segments_max, default=ring.pools.common
        )
        takes = {pool.number: 0.0 for pool in pools}
        for pool in ring.pools:
            giver = pool if pool.has_share and pool.segments >= pool.limits.segments_max - 1 else gives_way
            takes[giver.number] = takes.get(giver.number, 0.0) + pool.recently_taken
        weights = [takes[pool.number] for pool in pools]
        if not any(weights):
            weights = [float(len(pool.sealed)) for pool in pools]
        whole = sum(weights)
        parts: list[tuple[Pool, int]] = []
        for pool, weight in sorted(zip(pools, weights, strict=True), key=itemgetter(1), reverse=True):
            part = min(left - sum(part for _, part in parts), math.ceil(left * weight / whole))
            if part > 0:
                parts.append((pool, part))
        return parts

    def _any_pool_lacks(self) -> bool:
        """Return whether hardly any of some pool's part of the line is granted."""
        if not self._ring.pools.by_number:
            return False
        for pool, part in self._parts():
            heads = [segment.number for segment in islice(pool.sealed, part)]
            if heads and self._granted_of(heads) < max(1, _ASK_BELOW_OF_PART * len(heads)):
                return True
        return False

    def _granted_of(self, line: list[int]) -> int:
        return sum(number in self.segments for number in line)

    @property
    def _granted_min(self) -> float:
        return max(1, _ASK_BELOW * self.ahead)

    def _is_in_use(self, number: int, now_s: float) -> bool:
        segment = self._ring.segments[number]
        is_open = segment.state in (SegmentState.OPENING, SegmentState.OPEN)
        return is_open or segment.is_busy or now_s < segment.touched_s + self._late_write_s


@dataclass(frozen=True, slots=True)
class SpaceShortage:
    """Cause of a lack of space, and its duration.

    Segments come back by themselves: grants of earlier owners are retired, readers and late writes end, the
    store records a grant. Until then every put of a new block waits, or is declined at its deadline.
    """

    why: str
    """A clause."""

    ends_in_s: float | None
    """Longest time until there is space again; None if unknown."""


def space_shortage(
    ring: Ring, grants: Grants, now_s: float, *, retires_in_s: float | None
) -> SpaceShortage | None:
    """Return the cause if nothing could be allocated now for lack of space, or None.

    *retires_in_s*: time until the last grant of an earlier owner may be retired.
    """
    if grants.refusal(now_s) is not Reason.NONE or _has_space(ring, grants):
        return None
    withheld = SpaceShortage(
        f"writes of an earlier owner may still land in {len(ring.withheld)} of its "
        f"{counted(len(ring.segments), 'segment')}",
        retires_in_s,
    )
    if ring.awaits_retirement:
        return withheld
    if any(next(grants.oldest_sealed(pool), None) is not None for pool in ring.pools):
        return SpaceShortage("the segments that it may write are still being written or read", None)
    if ring.free or any(pool.sealed for pool in ring.pools):
        return SpaceShortage("the membership store has not recorded its grant of more segments yet", None)
    if ring.draining:
        left_s = max(0.0, min(segment.quiet_at_s for segment in ring.draining) - now_s)
        waits = f"{counted(len(ring.draining), 'evicted segment')} may still be read or written"
        return SpaceShortage(waits, left_s or None)
    return withheld


def may_get_space(ring: Ring, grants: Grants, now_s: float, *, within_s: float) -> bool:
    """Return whether a shard without space may get some by itself within *within_s*.

    A shard that waits for withheld segments counts as full: only the end of a takeover helps there.
    """
    if grants.refusal(now_s) is not Reason.NONE:
        return False
    if ring.ready or ring.opening or ring.free:
        return True
    if any(pool.sealed for pool in ring.pools) and not ring.awaits_retirement:
        return True
    return any(segment.quiet_at_s < now_s + within_s for segment in ring.draining)


def _has_space(ring: Ring, grants: Grants) -> bool:
    if ring.ready or ring.opening is not None or grants.first_free() is not None:
        return True
    return any(_has_room(pool, ring.geometry.data_bytes) for pool in ring.pools)


def _has_room(pool: Pool, data_bytes: int) -> bool:
    """Return whether the current segment of a pool takes one more small block."""
    current = pool.current
    return (
        current is not None
        and not current.is_short
        and current.bytes_used + PAGE_BYTES <= data_bytes
        and current.entries_used < pool.limits.entries_max
    )
