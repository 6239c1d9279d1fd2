"""The ring that a shard's segments go round in.

One segment at most is OPENING. OPEN are the *current* one of each pool, which hands out its space, and those
that are *ready* to take over from it, whichever pool needs one first: all that are kept free, so that writers
who fill one segment after the other don't wait for the page that opens the next.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.dealing import deal, recount
from ostraca_dpu_agent.owner.core.pools import Pool
from ostraca_dpu_agent.owner.core.segments import Segment, SegmentState
from ostraca_dpu_agent.owner.core.shares import COMMON, Measures, dealt
from ostraca_fabric.extent import Generation, generation, generation_parts
from ostraca_fabric.flash.summary import SummaryLog
from ostraca_fabric.ids import OwnerEpoch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from ostraca_fabric.flash.recovery import RecoveredAreas, RecoveredSegment
    from ostraca_fabric.flash.superblock import Superblock

_FREE_SHARE = 16
"""At most one in so many segments is kept free, but one where there are three at least."""

_ONE_FREE_OF = 3

_LOOKED_THROUGH_SHARE = 32
"""One in so many segments has been looked through for what to keep before it is evicted: so much may be
written at once, with no time to look."""

_LISTED_IN = 4
"""A full index is spread over so many segments at least, where the shard has them."""

_INDEX_HEADROOM_SHARE = 8
"""A segment is evicted when less than this share of the index is left (and less than one segment can
list)."""


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
        self.pool_numbers = np.zeros(self.geometry.segments, np.uint64)
        """Of each segment, the pool that it was given to."""

        self.ready: deque[Segment] = deque()
        self.opening: Segment | None = None
        self.draining: list[Segment] = []
        self.withheld: list[Segment] = []
        self.entries_max = min(
            self.geometry.entries_max, -(-blocks_max // min(_LISTED_IN, self.geometry.segments))
        )
        """Blocks that one segment takes: few enough that the index always holds several segments."""

        self.headroom = min(self.entries_max, blocks_max // _INDEX_HEADROOM_SHARE)
        """Room in the index that is made before anybody needs it."""

        self._identity = superblock.identity
        self._epoch = OwnerEpoch(0)
        self._count = 0
        segments = self.geometry.segments
        one_free = int(segments >= _ONE_FREE_OF)
        self._spare = min(free_segments, max(one_free, segments // _FREE_SHARE))
        self._ready_most = max(1, self._spare)
        self._measures = Measures(
            segments,
            self._spare,
            self._spare + max(one_free, segments // _LOOKED_THROUGH_SHARE),
            blocks_max,
            self.entries_max,
            self.headroom,
        )
        self.common = Pool(COMMON, dealt({}, self._measures)[COMMON], self.geometry.data_bytes)
        self.pools: dict[int, Pool] = {}
        """Those with a share, by number."""

        self.asking: dict[int, Pool] = {}
        """Those of them that want more than they have."""

        self.changed: dict[int, Pool] = {}
        """Those of them of which a segment may be due to be looked through."""

        self._earlier_pins_end_s = earlier_pins_end_s
        self.free: deque[Segment] = deque()
        self.unreadable: set[int] = set()
        """Segments of whose summaries something could not be read, until they are written anew."""

    def pool_of(self, number: int) -> Pool:
        """Return the pool whose segments the blocks of pool *number* lie in: the common one, if it has no
        share.
        """
        return self.pools.get(number, self.common)

    def all_pools(self) -> Iterator[Pool]:
        """Yield the common pool, and those with a share."""
        yield self.common
        yield from self.pools.values()

    def share_out(self, shares: Mapping[int, float]) -> None:
        """Give each pool its part, and every segment to whoever has it now."""
        deal(self, dealt(shares, self._measures))

    def ask(self, pool: Pool) -> None:
        """Know that somebody wants space of a pool that has a share."""
        pool.asks, self.asking[pool.number] = True, pool

    def asks_no_more(self, pool: Pool) -> None:
        """Know that a pool has room enough for now."""
        pool.asks = False
        del self.asking[pool.number]

    def take_in(self, areas: RecoveredAreas) -> None:
        """Know of segments what their summary areas say. They get their places when all are known."""
        for found in areas.segments:
            segment = self.segments[found.number]
            self._note(segment, found)
            if len(found.entries):
                segment.state, segment.quiet_at_s = SegmentState.SEALED, self._earlier_pins_end_s
        for number in areas.unreadable:  # readers may hold pins on blocks that nothing tells of any more
            self.segments[number].quiet_at_s = self._earlier_pins_end_s
        self.unreadable.update(areas.unreadable)
        self._count = max(self._count, areas.highest_count)

    def _note(self, segment: Segment, found: RecoveredSegment) -> None:
        if found.generation > segment.generation:
            segment.entries_used, segment.pool = 0, COMMON
        segment.generation = self.generations[found.number] = found.generation
        # Read again, it may list less than before: not all of it may be readable then.
        segment.entries_used = max(segment.entries_used, len(found.entries))
        if len(found.entries):
            segment.bytes_used, segment.pool = self.geometry.data_bytes, found.pool or segment.pool
        self.pool_numbers[found.number] = segment.pool

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
                self.pool_of(segment.pool).sealed.append(segment)
            elif number in self.unreadable:
                self._drain(segment)
            else:
                self.free.append(segment)
        recount(self)

    def renew(self, found: RecoveredSegment) -> None:
        """Know of a withheld segment what it lists, in this generation. Where the store was lost it may be of
        an owner with the same epoch, whose page was on its way when this one read.
        """
        segment = self.segments[found.number]
        self._count = max(self._count, generation_parts(found.generation)[1])
        if segment.entries_used:
            self.pool_of(segment.pool).leave(segment)
        self._note(segment, found)
        if segment.entries_used:
            pool = self.pool_of(segment.pool)
            pool.enter(segment)
            pool.bound_excess(is_new=True)

    def retire(self, is_listed: dict[int, bool]) -> None:
        """Give withheld segments their places among the others: for each, whether it has blocks."""
        retired = [segment for segment in self.withheld if segment.number in is_listed]
        self.withheld = [segment for segment in self.withheld if segment.number not in is_listed]
        sealed: dict[int, list[tuple[Generation, Segment]]] = {}
        for segment in retired:
            if is_listed[segment.number]:
                segment.state = SegmentState.SEALED
                of_pool = sealed.setdefault(self.pool_of(segment.pool).number, [])
                of_pool.append((segment.generation, segment))
            else:
                if segment.entries_used:
                    self.pool_of(segment.pool).leave(segment)
                self._drain(segment)
        for number, segments in sealed.items():
            self.pool_of(number).join(segments)
        self.changed = dict(self.pools)

    @property
    def generations_made(self) -> int:
        """The highest count of a generation: it rises with every segment that is opened, over all owners."""
        return self._count

    def segment_of(self, offsets: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the numbers of the segments these extents lie in."""
        begin = np.uint64(self.geometry.first_segment_offset)
        return ((offsets - begin) // np.uint64(self.geometry.segment_bytes)).astype(np.intp)

    @property
    def needed(self) -> int:
        """How many current segments are about to end."""
        needed = int(self.common.needs_next)
        return needed + sum(pool.needs_next for pool in self.asking.values()) if self.asking else needed

    @property
    def lacks_free(self) -> bool:
        """Whether a segment should be evicted to have one free in time."""
        coming = len(self.free) + len(self.draining) + (self.opening is not None) + len(self.ready)
        if self.pools and self.draining:  # what a pool with a share has emptied is its own again
            emptied = {segment.pool for segment in self.draining} & self.pools.keys()
            coming -= sum(self.pools[number].draining - self.pools[number].returning for number in emptied)
        return coming < max(self._spare, self.needed)

    def most_over(self, *, by_entries: bool) -> list[Pool]:
        """Return the pools that give up a segment when one must go: those above their share, by how far.

        Where none is, those that want the space themselves.
        """
        if not self.pools:
            return [self.common]
        over = [
            (-pool.entry_room if by_entries else pool.segments_over, pool)
            for pool in self.all_pools()
            if pool.sealed
        ]
        above = sorted((each for each in over if each[0] > 0), key=lambda each: (-each[0], each[1].number))
        return [pool for _, pool in above] or [
            pool for pool in (self.common, *self.asking.values()) if pool.needs_next
        ]

    @property
    def ready_least(self) -> int:
        """How many segments must be at hand for the ring to go round: one to open, and one kept ready."""
        return 2 if self._spare else 1

    @property
    def wants_opening(self) -> bool:
        """Whether it is time to open a segment, where there is one to open."""
        has_room = self.opening is None and len(self.ready) < self._ready_most
        is_time = has_room and (self._spare > 0 or self.needed > 0)
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
        self.pool_numbers[number] = COMMON
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
            segment.log = None
            self._drain(segment)

    def place(self, pool: Pool, sizes: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
        """Hand out room of a pool for as many of these, in order, as there is; return offsets and segments.

        *sizes*: whole pages, each at most a data area.
        """
        offsets, segments = np.zeros(len(sizes), np.uint64), np.zeros(len(sizes), np.intp)
        placed = 0
        while placed < len(sizes):
            segment = pool.current or self.take_over(pool)
            if segment is None:
                break
            ends = np.cumsum(sizes[placed:])
            fits = int(np.searchsorted(ends, self.geometry.data_bytes - segment.bytes_used, side="right"))
            fits = min(fits, pool.part.entries_max - segment.entries_used)
            if fits <= 0:  # its share of the index may have fallen since it was opened
                segment.is_short = True
                if self.take_over(pool) is None:
                    break
                continue
            here = slice(placed, placed + fits)
            begin = self.geometry.data_offset(segment.number) + segment.bytes_used
            offsets[here], segments[here] = begin + ends[:fits] - sizes[here], segment.number
            segment.bytes_used += int(ends[fits - 1])
            segment.entries_used += fits
            segment.held += fits
            pool.entries += fits
            placed += fits
        return offsets[:placed], segments[:placed]

    def take_over(self, pool: Pool) -> Segment | None:
        """Make a ready segment the current one of a pool; the one before it is sealed. None when none is
        ready, or the pool has all that it may have.
        """
        if not self.ready or not pool.may_take:
            return None
        pool.seal_current()
        segment = pool.current = self.ready.popleft()
        segment.pool = self.pool_numbers[segment.number] = pool.number
        assert segment.log is not None, "what is ready was opened"
        segment.log.pool = pool.number
        pool.enter(segment)
        pool.taken += 1
        self._has_changed(pool)
        return segment

    def begin_draining(self, pool: Pool, oldest: Iterator[Segment]) -> Segment | None:
        """Take the first of these sealed segments of a pool out of use.

        None when there is none, while commits to it are being written, and while a younger one than the
        oldest has writers still at work.
        """
        segment = next(oldest, None)
        if segment is None or segment.queued or segment.is_writing:
            return None
        if segment.held and segment is not pool.sealed[0]:
            return None
        pool.take_out(segment)
        pool.leave(segment)
        self._has_changed(pool)
        self._drain(segment)
        return segment

    def _has_changed(self, pool: Pool) -> None:
        if pool.has_share:
            self.changed[pool.number] = pool

    def _drain(self, segment: Segment) -> None:
        segment.state = SegmentState.DRAINING
        self.draining.append(segment)
        self.pool_of(segment.pool).draining += 1

    def end_draining(self, now_s: float, pins: NDArray[np.int64]) -> None:
        """Free the segments that nobody reads or writes in any more."""
        for segment in list(self.draining):
            if not pins[segment.number] and not segment.held and now_s >= segment.quiet_at_s:
                self.draining.remove(segment)
                pool = self.pool_of(segment.pool)
                pool.draining -= 1
                pool.bound_excess()
                segment.state = SegmentState.FREE
                segment.pool = self.pool_numbers[segment.number] = COMMON
                self.free.append(segment)
