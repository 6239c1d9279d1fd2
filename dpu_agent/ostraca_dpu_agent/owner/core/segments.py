"""A shard's segments and the ring they go round in.

One segment at most is OPENING. OPEN are the *current* one, which hands out space, and those that are *ready*
to take over from it: all that are kept free, so that writers who fill one segment after the other don't wait
for the page that opens the next.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, islice
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.extent import Generation, generation, generation_parts
from ostraca_fabric.flash.summary import SummaryLog
from ostraca_fabric.ids import OwnerEpoch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ostraca_fabric.flash.recovery import RecoveredAreas
    from ostraca_fabric.flash.superblock import Superblock

_NEXT_AT = 0.75
"""How full the current segment is when the next one is made ready."""

_FREE_SHARE = 16
"""At most one in so many segments is kept free, but one where there are three at least."""

_ONE_FREE_OF = 3

_AGED_AT = 0.2
"""Where, on a sealed segment's way to being looked through, reads of its blocks begin to count."""

_LOOKED_THROUGH_SHARE = 32
"""One in so many segments has been looked through for what to keep before it is evicted: so much may be
written at once, with no time to look."""


_NEVER_WRITTEN = Generation(0)


_LISTED_IN = 4
"""A full index is spread over so many segments at least, where the shard has them."""


class SegmentState(Enum):
    """Where a segment is in its round."""

    FREE = "free"
    OPENING = "opening"
    """An empty summary page of its new generation is being written."""

    OPEN = "open"
    """Hands out space."""

    SEALED = "sealed"
    """Full; its blocks can be got. Commits of its last reservations still come in."""

    DRAINING = "draining"
    """Out of the index; waits for pins and reservations on it to end."""

    WITHHELD = "withheld"
    """Lies under the grant of an earlier owner epoch, which may write it until that is retired. Its blocks
    can be got."""


@dataclass(slots=True)
class Segment:
    """One segment in one generation."""

    number: int
    state: SegmentState = SegmentState.FREE
    generation: Generation = _NEVER_WRITTEN
    log: SummaryLog | None = None
    """Its summary, when this owner opened it."""

    bytes_used: int = 0
    """Of the data area, handed out in this generation."""

    entries_used: int = 0
    """Reservations handed out in this generation: each may become an entry."""

    held: int = 0
    """Reservations on it that are neither committed nor ended."""

    quiet_at_s: float = 0.0
    """From when on no write that was abandoned or has failed, and no reader of an earlier owner, is left."""

    touched_s: float = -math.inf
    """When a reservation on it, or a write of its summary, ended last."""

    queued: list[NDArray[np.intp]] = field(default_factory=list)
    """Committed reservations for the next summary write."""

    is_writing: bool = False
    is_broken: bool = False
    """Writing its summary failed: nothing more is listed in this generation."""

    is_aged: bool = False
    """It came to the middle of the ring, where reads so far are forgotten."""

    is_looked_through: bool = False
    """What is worth keeping of it was copied, or is being copied, to where new blocks go."""

    is_kept: bool = False
    """It went round again where it is, at least once."""

    is_short: bool = False
    """A block did not fit into what is left of it."""


class Ring:
    """All segments of a shard, by state."""

    def __init__(
        self,
        superblock: Superblock,
        *,
        free_segments: int,
        blocks_max: int,
        earlier_pins_end_s: float,
    ) -> None:
        self.geometry = superblock.geometry
        self.segments = [Segment(number) for number in range(self.geometry.segments)]
        self.generations = np.zeros(self.geometry.segments, np.uint64)
        self.sealed: deque[Segment] = deque()
        """Those that go first stand first: in the order in which they were sealed, or last kept."""

        self.current: Segment | None = None
        self.ready: deque[Segment] = deque()
        self.opening: Segment | None = None
        self.draining: list[Segment] = []
        self.withheld: list[Segment] = []
        self.looked_through = 0
        """How many of the sealed, the oldest, were looked through."""

        self.entries_max = min(
            self.geometry.entries_max, -(-blocks_max // min(_LISTED_IN, self.geometry.segments))
        )
        """Blocks that one segment takes: few enough that the index always holds several segments."""

        self._identity = superblock.identity
        self._epoch = OwnerEpoch(0)
        self._count = 0
        one_free = int(self.geometry.segments >= _ONE_FREE_OF)
        self._spare = min(free_segments, max(one_free, self.geometry.segments // _FREE_SHARE))
        self._ready_most = max(1, self._spare)
        self._look_ahead = self._spare + max(one_free, self.geometry.segments // _LOOKED_THROUGH_SHARE)
        open_most = self._ready_most + 1
        self._aged_behind = int(_AGED_AT * max(0, self.geometry.segments - open_most - self._look_ahead))
        self._earlier_pins_end_s = earlier_pins_end_s
        self.free: deque[Segment] = deque()
        self.unlisted_up_to = 0
        """Segments of this generation and below are not in the index, which had no room for them when they
        were recovered."""

        self.unreadable: set[int] = set()
        """Segments of whose summaries something could not be read, until they are written anew."""

    def take_in(self, areas: RecoveredAreas) -> None:
        """Know of segments what their summary areas say. They get their places when all are known."""
        for found in areas.segments:
            segment = self.segments[found.number]
            segment.generation = found.generation
            self.generations[found.number] = found.generation
            if len(found.entries):
                segment.state, segment.quiet_at_s = SegmentState.SEALED, self._earlier_pins_end_s
                segment.bytes_used, segment.entries_used = self.geometry.data_bytes, len(found.entries)
        for number in areas.unreadable:  # readers may hold pins on blocks that nothing tells of any more
            self.segments[number].quiet_at_s = self._earlier_pins_end_s
        self.unreadable.update(areas.unreadable)
        self._count = max(self._count, areas.highest_count)

    def begin(self, epoch: OwnerEpoch, is_withheld: NDArray[np.bool_]) -> None:
        """Give every segment its place, now that all are known; new generations are of *epoch*."""
        self._epoch = epoch
        self._count += len(self.unreadable)  # each may have been opened after all that can be read
        # Free ones of the lowest generation first, so that flash wears evenly over restarts.
        for number in np.argsort(self.generations, kind="stable").tolist():
            segment = self.segments[number]
            if is_withheld[number]:
                segment.state = SegmentState.WITHHELD
                self.withheld.append(segment)
            elif segment.state is SegmentState.SEALED:
                self.sealed.append(segment)
            elif number in self.unreadable:
                segment.state = SegmentState.DRAINING
                self.draining.append(segment)
            else:
                self.free.append(segment)

    def renew(self, number: int, made: Generation, listed: int) -> None:
        """Know of a withheld segment that it lists so many blocks, in this generation."""
        segment = self.segments[number]
        segment.generation = self.generations[number] = made
        segment.bytes_used, segment.entries_used = self.geometry.data_bytes, listed

    def retire(self, is_listed: dict[int, bool]) -> None:
        """Give withheld segments their places among the others: for each, whether it has blocks."""
        retired = [segment for segment in self.withheld if segment.number in is_listed]
        self.withheld = [segment for segment in self.withheld if segment.number not in is_listed]
        for segment in retired:
            segment.state = SegmentState.SEALED if is_listed[segment.number] else SegmentState.DRAINING
        self.draining += [segment for segment in retired if segment.state is SegmentState.DRAINING]
        sealed = [segment for segment in retired if segment.state is SegmentState.SEALED]
        # One that was kept stays behind those it was put behind, though they are of newer generations.
        own = zip(accumulate((segment.generation for segment in self.sealed), max), self.sealed, strict=True)
        in_turn = sorted([*own, *((segment.generation, segment) for segment in sealed)], key=itemgetter(0))
        self.sealed = deque(segment for _, segment in in_turn)
        # Those that come to stand before one that was looked through will not be: their turn has passed.
        looked = [place for place, segment in enumerate(self.sealed) if segment.is_looked_through]
        self.looked_through = max(looked, default=-1) + 1
        for segment in islice(self.sealed, self.looked_through):
            segment.is_looked_through = True

    @property
    def generations_made(self) -> int:
        """The highest count of a generation: it rises with every segment that is opened, over all owners."""
        return self._count

    def segment_of(self, offsets: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the numbers of the segments these extents lie in."""
        begin = np.uint64(self.geometry.first_segment_offset)
        return ((offsets - begin) // np.uint64(self.geometry.segment_bytes)).astype(np.intp)

    @property
    def needs_next(self) -> bool:
        """Whether the current segment is about to end."""
        current = self.current
        if current is None or current.is_short:
            return True
        return (
            current.bytes_used >= _NEXT_AT * self.geometry.data_bytes
            or current.entries_used >= _NEXT_AT * self.entries_max
        )

    @property
    def lacks_free(self) -> bool:
        """Whether a segment should be evicted to have one free in time."""
        coming = len(self.free) + len(self.draining) + (self.opening is not None) + len(self.ready)
        return coming < max(self._spare, int(self.needs_next))

    def look_through(self) -> Segment | None:
        """Take a sealed segment that will soon be evicted, to look for what to keep of it; each once."""
        # Asked at every call, and there may be hundreds: those looked through stand before the others.
        if self.looked_through >= min(self._look_ahead - len(self.free), len(self.sealed)):
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
        place = len(self.sealed) - 1 - self._aged_behind
        return self.sealed[place] if place >= 0 and not self.sealed[place].is_aged else None

    @property
    def ready_least(self) -> int:
        """How many segments must be at hand for the ring to go round: one to open, and one kept ready."""
        return 2 if self._spare else 1

    @property
    def wants_opening(self) -> bool:
        """Whether it is time to open a segment, where there is one to open."""
        has_room = self.opening is None and len(self.ready) < self._ready_most
        is_time = has_room and (self._spare > 0 or self.needs_next)
        return is_time and len(self.free) > 0

    def begin_opening(self, freed: Segment) -> Segment:
        """Take a free segment into its next generation."""
        self.free.remove(freed)
        number = freed.number
        self._count += 1
        made = generation(epoch=self._epoch, count=self._count)
        assert made > int(self.generations[number]), f"generation {generation_parts(made)} is not the newest"
        log = SummaryLog(self.geometry, self._identity, number, made, self._epoch)
        segment = Segment(number, SegmentState.OPENING, made, log)
        self.segments[number], self.generations[number], self.opening = segment, made, segment
        self.unreadable.discard(number)
        return segment

    def end_opening(self, *, is_ok: bool) -> None:
        """Make the segment ready; or let it drain, because the page that was not written may land yet."""
        segment, self.opening = self.opening, None
        assert segment is not None, "no segment is opening"
        if is_ok:
            segment.state = SegmentState.OPEN
            self.ready.append(segment)
        else:
            segment.state, segment.log = SegmentState.DRAINING, None
            self.draining.append(segment)

    def place(self, sizes: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
        """Hand out room for as many of these, in order, as there is; return their offsets and segments.

        *sizes*: whole pages, each at most a data area.
        """
        offsets, segments = np.zeros(len(sizes), np.uint64), np.zeros(len(sizes), np.intp)
        placed = 0
        while placed < len(sizes):
            segment = self.current or self.take_over()
            if segment is None:
                break
            ends = np.cumsum(sizes[placed:])
            fits = int(np.searchsorted(ends, self.geometry.data_bytes - segment.bytes_used, side="right"))
            fits = min(fits, self.entries_max - segment.entries_used)
            if fits == 0:
                segment.is_short = True
                if self.take_over() is None:
                    break
                continue
            here = slice(placed, placed + fits)
            begin = self.geometry.data_offset(segment.number) + segment.bytes_used
            offsets[here], segments[here] = begin + ends[:fits] - sizes[here], segment.number
            segment.bytes_used += int(ends[fits - 1])
            segment.entries_used += fits
            segment.held += fits
            placed += fits
        return offsets[:placed], segments[:placed]

    def take_over(self) -> Segment | None:
        """Make a ready segment the current one; the one before it is sealed. None when none is ready."""
        if not self.ready:
            return None
        self.seal_current()
        self.current = self.ready.popleft()
        return self.current

    def seal_current(self) -> None:
        """Hand out no more space of the current segment."""
        if self.current is not None:
            self.current.state = SegmentState.SEALED
            self.sealed.append(self.current)
            self.current = None

    def begin_draining(self, oldest: Iterator[Segment]) -> Segment | None:
        """Take the first of these sealed segments out of use.

        None when there is none, while commits to it are being written, and while a younger one than the
        oldest has writers still at work.
        """
        segment = next(oldest, None)
        if segment is None or segment.queued or segment.is_writing:
            return None
        if segment.held and segment is not self.sealed[0]:
            return None
        self.sealed.remove(segment)
        self.looked_through -= segment.is_looked_through
        segment.state = SegmentState.DRAINING
        self.draining.append(segment)
        return segment

    def end_draining(self, now_s: float, pins: NDArray[np.int64]) -> None:
        """Free the segments that nobody reads or writes in any more."""
        for segment in list(self.draining):
            if not pins[segment.number] and not segment.held and now_s >= segment.quiet_at_s:
                self.draining.remove(segment)
                segment.state = SegmentState.FREE
                self.free.append(segment)
