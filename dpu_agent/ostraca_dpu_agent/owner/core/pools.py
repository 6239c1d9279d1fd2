"""What a pool has of a shard: the segment that it writes, and those that it has filled.

A *pool* is a number that tells whose blocks may not push each other's out. A pool with a share of the shard
has segments of its own; everybody else's blocks lie in the common pool, number 0.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate, islice
from operator import itemgetter
from typing import TYPE_CHECKING

from ostraca_dpu_agent.owner.core.segments import SegmentState
from ostraca_dpu_agent.owner.core.shares import COMMON

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ostraca_dpu_agent.owner.core.segments import Segment
    from ostraca_dpu_agent.owner.core.shares import Part
    from ostraca_fabric.extent import Generation

_NEXT_AT = 0.75
"""How full the current segment is when the next one is made ready."""


class Pool:
    """One pool's segments on one shard."""

    __slots__ = (
        "_data_bytes",
        "asks",
        "credit_bytes",
        "current",
        "draining",
        "entries",
        "excess",
        "looked_through",
        "number",
        "part",
        "sealed",
        "segments",
        "taken",
        "unlisted_up_to",
    )

    def __init__(self, number: int, part: Part, data_bytes: int) -> None:
        """Have nothing yet."""
        self.number = number
        self.part = part
        self._data_bytes = data_bytes
        self.current: Segment | None = None
        self.sealed: deque[Segment] = deque()
        """Those that go first stand first: in the order in which they were sealed, or last kept."""

        self.looked_through = 0
        """How many of the sealed, the oldest, were looked through."""

        self.segments = 0
        """It has: its current one, sealed ones, and withheld ones that list anything."""

        self.draining = 0
        """It has emptied, and somebody may still read or write there."""

        self.entries = 0
        """Handed out in the segments it has: each may take room in the index."""

        self.excess = 0
        """How many segments above its share it has, because they came by recovery, or its share fell."""

        self.asks = number == COMMON
        """Whether somebody has wanted space of it since it last had room enough. Always of the common one,
        whose next segment is made ready before anybody asks."""

        self.taken = 0.0
        """How many segments it has taken of late: so it is told what is granted ahead."""

        self.credit_bytes = 0.0
        """How much of its blocks may be copied forward."""

        self.unlisted_up_to = 0
        """Segments of this generation and below are not in the index, which had no room for them when they
        were recovered."""

    @property
    def has_share(self) -> bool:
        """Whether it has a share of its own, which it never exceeds."""
        return self.number != COMMON

    @property
    def needs_next(self) -> bool:
        """Whether it is written, and the current segment is about to end."""
        current = self.current
        if current is None or current.is_short:
            return self.asks
        return (
            current.bytes_used >= _NEXT_AT * self._data_bytes
            or current.entries_used >= _NEXT_AT * self.part.entries_max
        )

    @property
    def may_take(self) -> bool:
        """Whether one more segment is within its share."""
        return not self.has_share or self.segments + self.draining < self.part.segments_max

    @property
    def lacks_room(self) -> bool:
        """Whether it has to give up a segment of its own: it needs the next one and is at its share, or its
        share of the index is about to end.
        """
        if self.number == COMMON:
            return False
        return (self.segments >= self.part.segments_max and self.needs_next) or (
            self.entry_room < self.part.headroom
        )

    @property
    def entry_room(self) -> int:
        """How many more blocks its share of the index takes."""
        return self.part.entries_most - self.entries

    @property
    def segments_over(self) -> int:
        """How many segments above its share it has, or is about to have."""
        return self.segments + (self.asks and self.needs_next) - self.part.segments_max

    @property
    def returning(self) -> int:
        """How many of those that drain it will not take again within its share."""
        return self.draining - max(0, min(self.draining, self.part.segments_max - self.segments))

    def enter(self, segment: Segment) -> None:
        """Count a segment that it has from now on."""
        self.segments += 1
        self.entries += segment.entries_used

    def leave(self, segment: Segment) -> None:
        """Count a segment that it has no more."""
        self.segments -= 1
        self.entries -= segment.entries_used

    def bound_excess(self, *, is_new: bool = False) -> None:
        """Remember how far above its share it is: less than before, unless segments came that it did not
        take.
        """
        over = max(0, self.segments + self.draining - self.part.segments_max)
        self.excess = over if is_new else min(self.excess, over)

    def seal_current(self) -> None:
        """Hand out no more space of the current segment: it is the youngest of the sealed."""
        if self.current is not None:
            self.current.state = SegmentState.SEALED
            self.sealed.append(self.current)
            self.current = None

    def take_out(self, segment: Segment) -> None:
        """Let a sealed segment go."""
        self.sealed.remove(segment)
        self.looked_through -= segment.is_looked_through

    def look_through(self, free: int) -> Segment | None:
        """Take a sealed segment that will soon be evicted, to look for what to keep of it; each once.

        *free*: how many the common pool may take before one is.
        """
        # Asked at every call, and there may be hundreds: those looked through stand before the others.
        if self.has_share:
            free = self.part.segments_max - self.segments
        if self.looked_through >= min(self.part.look_ahead - free, len(self.sealed)):
            return None
        segment = self.sealed[self.looked_through]
        segment.is_looked_through = True
        self.looked_through += 1
        return segment

    def keep(self, segment: Segment) -> None:
        """Let the segment looked through last go round once more, as if it were sealed now."""
        self.looked_through -= 1
        assert segment is self.sealed[self.looked_through], "it was looked through last"
        del self.sealed[self.looked_through]
        self.sealed.append(segment)
        segment.is_kept, segment.is_aged, segment.is_looked_through = True, False, False

    def to_age(self) -> Segment | None:
        """Return a sealed segment that has come to where its reads so far are forgotten."""
        place = len(self.sealed) - 1 - self.part.aged_behind
        return self.sealed[place] if place >= 0 and not self.sealed[place].is_aged else None

    def in_turn(self) -> list[tuple[Generation, Segment]]:
        """Return the sealed segments, each with what tells its turn among others: the newest generation up to
        it.
        """
        # One that was kept stays behind those it was put behind, though they are of newer generations.
        turns = accumulate((segment.generation for segment in self.sealed), max)
        return list(zip(turns, self.sealed, strict=True))

    def join(self, others: Iterable[tuple[Generation, Segment]]) -> None:
        """Give sealed segments their places among its own, each by its turn."""
        in_turn = sorted([*self.in_turn(), *others], key=itemgetter(0))
        self.sealed = deque(segment for _, segment in in_turn)
        # Those that come to stand before one that was looked through will not be: their turn has passed.
        looked = [place for place, segment in enumerate(self.sealed) if segment.is_looked_through]
        self.looked_through = max(looked, default=-1) + 1
        for segment in islice(self.sealed, self.looked_through):
            segment.is_looked_through = True

    def split(self, stays: Iterable[Segment]) -> None:
        """Have these sealed segments alone, in the order in which they stand."""
        self.sealed = deque(stays)
        self.looked_through = sum(segment.is_looked_through for segment in self.sealed)
