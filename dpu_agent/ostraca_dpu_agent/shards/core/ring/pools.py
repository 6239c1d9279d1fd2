"""Segments and pools of a shard: a pool is a share of the segments.

A *pool* is a number for a share of the flash: blocks of one pool never displace blocks of another. A pool
with a share has segments of its own. All other blocks lie in the common pool, number 0.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, islice
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core.ring.pool_limits import COMMON, PoolLimits, RingDimensions, pool_limits
from ostraca_fabric.flash.summary import SummaryLog
from ostraca_fabric.model.extent import Generation

_NEVER_WRITTEN = Generation(0)


class SegmentState(Enum):
    """State of a segment in the cycle."""

    FREE = "free"
    OPENING = "opening"
    """An empty summary page of the new generation is being written."""

    OPEN = "open"
    """The segment has space for new blocks."""

    SEALED = "sealed"
    """The segment is full, and its blocks are readable. Its last reservations may still be committed."""

    DRAINING = "draining"
    """The segment left the index, and waits for the end of its pins and reservations."""

    WITHHELD = "withheld"
    """The grant of an earlier owner epoch covers the segment, and is not retired. Its blocks are readable."""


@dataclass(slots=True)
class Segment:
    """Segment in one generation."""

    number: int
    state: SegmentState = SegmentState.FREE
    generation: Generation = _NEVER_WRITTEN
    log: SummaryLog | None = None
    """Summary, if this owner opened the segment."""

    pool: int = 0
    """Pool of this generation, as the summary records."""

    bytes_used: int = 0
    """Bytes of the data area allocated in this generation."""

    entries_used: int = 0
    """Reservations made in this generation: each may become an entry."""

    held: int = 0
    """Reservations neither committed nor ended."""

    quiet_at_s: float = 0.0
    """Time when failed or abandoned writes, and readers of an earlier owner, have ended."""

    touched_s: float = -math.inf
    """Time of the last end of a reservation or a summary write."""

    queued: list[NDArray[np.intp]] = field(default_factory=list)
    """Committed reservations for the next summary write."""

    is_writing: bool = False
    is_broken: bool = False
    """A summary write failed: nothing more is listed in this generation."""

    is_aged: bool = False
    """Reads of its blocks so far are forgotten."""

    is_examined: bool = False
    """Reinsertion has chosen the blocks to keep."""

    is_kept: bool = False
    """The segment stayed in place for another round at least once."""

    is_short: bool = False
    """A block did not fit into the rest of the segment."""

    @property
    def is_busy(self) -> bool:
        """Whether the segment has reservations, or blocks to list."""
        return bool(self.held or self.queued or self.is_writing)


_NEXT_AT = 0.75
"""Fill level of the current segment at which the next is made ready."""


class Pool:
    """Segments of a pool on a shard."""

    __slots__ = (
        "_data_bytes",
        "credit_bytes",
        "current",
        "draining",
        "entries",
        "examined",
        "excess",
        "has_demand",
        "limits",
        "number",
        "recently_taken",
        "sealed",
        "segments",
        "unlisted_up_to",
    )

    def __init__(self, number: int, limits: PoolLimits, data_bytes: int) -> None:
        self.number = number
        self.limits = limits
        self._data_bytes = data_bytes
        self.current: Segment | None = None
        self.sealed: deque[Segment] = deque()
        """Sealed segments in order of eviction: as sealed, or last kept."""

        self.examined = 0
        """Number of sealed segments, the oldest, that reinsertion has examined."""

        self.segments = 0
        """Number of segments: current, sealed, and withheld with entries."""

        self.draining = 0
        """Number of evicted segments that may still be read or written."""

        self.entries = 0
        """Reservations made in the segments: each may take an index entry."""

        self.excess = 0
        """Segments above the limit, after recovery or a lower limit."""

        self.has_demand = number == COMMON
        """Whether space was requested since the pool last had enough. The common pool always has demand: a
        segment is made ready ahead of requests."""

        self.recently_taken = 0.0
        """Segments taken lately: a forecast for the grant."""

        self.credit_bytes = 0.0
        """Bytes of the pool's blocks that may be reinserted."""

        self.unlisted_up_to = 0
        """Highest generation left out of the index by recovery for lack of room."""

    @property
    def has_share(self) -> bool:
        """Whether the pool has a share, and never exceeds the limit."""
        return self.number != COMMON

    @property
    def needs_next(self) -> bool:
        """Whether the pool is being written, and the current segment is nearly full."""
        current = self.current
        if current is None or current.is_short:
            return self.has_demand
        return (
            current.bytes_used >= _NEXT_AT * self._data_bytes
            or current.entries_used >= _NEXT_AT * self.limits.entries_max
        )

    @property
    def may_take(self) -> bool:
        """Whether one more segment is within the limit."""
        return not self.has_share or self.segments + self.draining < self.limits.segments_max

    @property
    def lacks_room(self) -> bool:
        """Whether the pool must give up a segment of its own.

        Either the pool needs another segment at the limit, or the index entries are nearly used up.
        """
        if self.number == COMMON:
            return False
        return self.lacks_segments or self.entry_room < self.limits.headroom

    @property
    def lacks_segments(self) -> bool:
        """Whether the pool needs another segment at the limit."""
        return self.segments >= self.limits.segments_max and self.needs_next

    @property
    def entry_room(self) -> int:
        """Index entries left to the pool."""
        return self.limits.index_entries_max - self.entries

    @property
    def segments_over(self) -> int:
        """Segments above the limit, including the next one if needed."""
        return self.segments + (self.has_demand and self.needs_next) - self.limits.segments_max

    @property
    def returning(self) -> int:
        """Draining segments beyond the limit of the pool."""
        return self.draining - max(0, min(self.draining, self.limits.segments_max - self.segments))

    def enter(self, segment: Segment) -> None:
        """Count a segment of the pool."""
        self.segments += 1
        self.entries += segment.entries_used

    def leave(self, segment: Segment) -> None:
        """Uncount a segment of the pool."""
        self.segments -= 1
        self.entries -= segment.entries_used

    def bound_excess(self, *, is_new: bool = False) -> None:
        """Update the excess. The excess only falls, unless the pool was given segments (*is_new*)."""
        over = max(0, self.segments + self.draining - self.limits.segments_max)
        self.excess = over if is_new else min(self.excess, over)

    def seal_current(self) -> None:
        """Seal the current segment: it becomes the youngest of the sealed."""
        if self.current is not None:
            self.current.state = SegmentState.SEALED
            self.sealed.append(self.current)
            self.current = None

    def remove(self, segment: Segment) -> None:
        """Remove a sealed segment."""
        self.sealed.remove(segment)
        self.examined -= segment.is_examined
        self.leave(segment)

    def take_for_examination(self, free: int) -> Segment | None:
        """Mark and return the next sealed segment for examination; each segment once.

        *free*: segments that the common pool may take before an eviction.
        """
        # Called very often, with hundreds of segments: examined ones stand before the others.
        if self.has_share:
            free = self.limits.segments_max - self.segments
        if self.examined >= min(self.limits.look_ahead - free, len(self.sealed)):
            return None
        segment = self.sealed[self.examined]
        segment.is_examined = True
        self.examined += 1
        return segment

    def keep(self, segment: Segment) -> None:
        """Let the segment examined last stay for another round, as if sealed now."""
        self.examined -= 1
        assert segment is self.sealed[self.examined], "it was examined last"
        del self.sealed[self.examined]
        self.sealed.append(segment)
        segment.is_kept, segment.is_aged, segment.is_examined = True, False, False

    def next_to_age(self) -> Segment | None:
        """Return a sealed segment whose reads so far are to be forgotten."""
        place = len(self.sealed) - 1 - self.limits.aged_behind
        return self.sealed[place] if place >= 0 and not self.sealed[place].is_aged else None

    def in_turn(self) -> list[tuple[Generation, Segment]]:
        """Return the sealed segments, each with its turn: the newest generation up to the segment."""
        # A kept segment stays behind segments of newer generations.
        turns = accumulate((segment.generation for segment in self.sealed), max)
        return list(zip(turns, self.sealed, strict=True))

    def join(self, others: Iterable[tuple[Generation, Segment]]) -> None:
        """Insert sealed segments, each by its turn."""
        in_turn = sorted([*self.in_turn(), *others], key=itemgetter(0))
        self.sealed = deque(segment for _, segment in in_turn)
        # Segments inserted before an examined one are not examined: their turn has passed.
        examined = [place for place, segment in enumerate(self.sealed) if segment.is_examined]
        self.examined = max(examined, default=-1) + 1
        for segment in islice(self.sealed, self.examined):
            segment.is_examined = True

    def retain(self, segments: Iterable[Segment]) -> None:
        """Drop all other sealed segments. *segments*: in order."""
        self.sealed = deque(segments)
        self.examined = sum(segment.is_examined for segment in self.sealed)


class PoolSet:
    """All pools of one shard."""

    def __init__(self, ring: RingDimensions, data_bytes: int) -> None:
        self._ring = ring
        self._data_bytes = data_bytes
        self.common = Pool(COMMON, pool_limits({}, ring)[COMMON], data_bytes)
        self.by_number: dict[int, Pool] = {}
        """Pools with a share."""

        self.in_demand: dict[int, Pool] = {}
        """Pools with a share that need more space."""

        self.changed: dict[int, Pool] = {}
        """Pools with a share and a segment that may be due for examination."""

    def __iter__(self) -> Iterator[Pool]:
        yield self.common
        yield from self.by_number.values()

    def of(self, number: int) -> Pool:
        """Return the pool of blocks with this number: the common pool if the number has no share."""
        return self.by_number.get(number, self.common)

    def request(self, pool: Pool) -> None:
        """Note a request for space of a pool with a share."""
        pool.has_demand, self.in_demand[pool.number] = True, pool

    def satisfy(self, pool: Pool) -> None:
        """Note that a pool has enough room for now."""
        pool.has_demand = False
        del self.in_demand[pool.number]

    def mark_changed(self, pool: Pool) -> None:
        """Note a segment of a pool that may be due for examination."""
        if pool.has_share:
            self.changed[pool.number] = pool

    @property
    def segments_needed(self) -> int:
        """Number of current segments that are nearly full."""
        return int(self.common.needs_next) + sum(pool.needs_next for pool in self.in_demand.values())

    def most_over(self, *, by_entries: bool) -> list[Pool]:
        """Return the pools to evict from, the farthest above the limit first.

        If no pool is above the limit, the pools in need of space give up a segment themselves.
        """
        if not self.by_number:
            return [self.common]
        over = [
            (-pool.entry_room if by_entries else pool.segments_over, pool) for pool in self if pool.sealed
        ]
        above = sorted((each for each in over if each[0] > 0), key=lambda each: (-each[0], each[1].number))
        return [pool for _, pool in above] or [
            pool for pool in (self.common, *self.in_demand.values()) if pool.needs_next
        ]

    def share_out(
        self, shares: Mapping[int, float], segments: Iterable[Segment], draining: Iterable[Segment]
    ) -> None:
        """Set the pools' shares, and assign each segment to a pool accordingly.

        Nothing is evicted. Segments of a pool without a share any more belong to the common pool: the pool's
        current segment is sealed, and so is the common pool's, if older.
        """
        limits = pool_limits(shares, self._ring)
        earlier, known = list(self), self.by_number
        self.common.limits = limits.pop(COMMON)
        self.by_number = {
            number: known.get(number) or Pool(number, each, self._data_bytes)
            for number, each in limits.items()
        }
        self.in_demand = {number: pool for number, pool in self.in_demand.items() if number in self.by_number}
        for number, pool in self.by_number.items():
            pool.limits = limits[number]
            if number not in known:
                pool.unlisted_up_to = self.common.unlisted_up_to
        for pool in earlier:
            self._reassign(pool)
        self.recount(segments, draining)

    def _reassign(self, pool: Pool) -> None:
        """Move sealed segments of a pool to other pools by the new shares."""
        if pool.has_share and pool.number not in self.by_number:
            pool.seal_current()
            self.common.unlisted_up_to = max(self.common.unlisted_up_to, pool.unlisted_up_to)
            self.common.credit_bytes += pool.credit_bytes
        leaving: dict[int, list[tuple[Generation, Segment]]] = {}
        for turn, segment in pool.in_turn():
            taker = self.of(segment.pool)
            if taker is not pool:
                segment.is_examined = False  # its turn among others may be far
                leaving.setdefault(taker.number, []).append((turn, segment))
        if leaving:
            pool.retain(segment for segment in pool.sealed if self.of(segment.pool) is pool)
            for number, segments in leaving.items():
                taker = self.of(number)
                if taker.current is not None and max(turn for turn, _ in segments) > taker.current.generation:
                    taker.seal_current()  # its place is before the new segments
                taker.join(segments)

    def recount(self, segments: Iterable[Segment], draining: Iterable[Segment]) -> None:
        """Count each pool's segments anew, after recovery or a change of shares."""
        for pool in self:
            pool.segments = pool.draining = pool.entries = 0
        for segment in segments:
            has_entries = segment.state is SegmentState.WITHHELD and segment.entries_used > 0
            if segment.state is SegmentState.SEALED or has_entries:
                self.of(segment.pool).enter(segment)
        for pool in self:
            if pool.current is not None:
                pool.enter(pool.current)
        for segment in draining:
            self.of(segment.pool).draining += 1
        for pool in self.by_number.values():
            pool.bound_excess(is_new=True)
        self.changed = dict(self.by_number)
