"""Cycle of a shard's segments.

At most one segment is OPENING. OPEN segments are either the *current* segment of a pool, with space for new
blocks, or *ready* to replace the current segment of any pool. All segments kept free are made ready, so a
fast writer never waits for an opening page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core.ring.pool_limits import COMMON, RingDimensions
from ostraca_dpu_agent.shards.core.ring.pools import Pool, PoolSet, Segment, SegmentState
from ostraca_fabric.flash.recovery import RecoveredAreas, RecoveredSegment
from ostraca_fabric.flash.summary import SummaryLog
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.extent import Generation, generation, generation_parts
from ostraca_fabric.model.fabric_map import EARLIER_PLACEMENTS_MAX
from ostraca_fabric.model.ids import OwnerEpoch, PlacementEpoch

_FREE_SHARE = 16
"""At most ``1 / _FREE_SHARE`` of the segments is kept free, but at least one of three or more."""

_ONE_FREE_OF = 3

_EXAMINED_SHARE = 32
"""A share of ``1 / _EXAMINED_SHARE`` of the segments is examined ahead of eviction, for bursts of writes."""

_LISTED_IN = 4
"""A full index covers at least this many segments, if the shard has them."""

_INDEX_HEADROOM_SHARE = 8
"""A segment is evicted when less than ``1 / _INDEX_HEADROOM_SHARE`` of the index, and less than a segment's
entries, is left."""


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
        segments = self.geometry.segments
        self.segments = [Segment(number) for number in range(segments)]
        self.generations = np.zeros(segments, np.uint64)
        self.pool_numbers = np.zeros(segments, np.uint64)
        """Pool of each segment."""

        self.free: deque[Segment] = deque()
        self.opening: Segment | None = None
        self.ready: deque[Segment] = deque()
        self.draining: list[Segment] = []
        self.withheld: list[Segment] = []
        self._withheld_empty = 0
        self.unreadable: set[int] = set()
        """Segments with unreadable summary pages, until the pages are written anew."""

        self.generations_made = 0
        """Highest count of a generation; rises with every segment opened, over all owners."""

        self._identity = superblock.identity
        self._epoch = OwnerEpoch(0)
        self._earlier_pins_end_s = earlier_pins_end_s
        one_free = int(segments >= _ONE_FREE_OF)
        self._kept_free = min(free_segments, max(one_free, segments // _FREE_SHARE))
        # Few enough blocks in one segment that the index always holds several segments.
        entries_max = min(self.geometry.entries_max, -(-blocks_max // min(_LISTED_IN, segments)))
        self.headroom = min(entries_max, blocks_max // _INDEX_HEADROOM_SHARE)
        """Index entries kept free ahead of need."""

        dimensions = RingDimensions(
            segments,
            self._kept_free,
            self._kept_free + max(one_free, segments // _EXAMINED_SHARE),
            blocks_max,
            entries_max,
            self.headroom,
        )
        self.pools = PoolSet(dimensions, self.geometry.data_bytes)

    def share_out(self, shares: Mapping[int, float]) -> None:
        """Set the pools' shares of the shard."""
        self.pools.share_out(shares, self.segments, self.draining)

    def take_in(self, areas: RecoveredAreas) -> None:
        """Take in the summaries of some segments. ``begin`` assigns places when all are known."""
        for found in areas.segments:
            segment = self.segments[found.number]
            self._note(segment, found)
            if len(found.entries):
                segment.state, segment.quiet_at_s = SegmentState.SEALED, self._earlier_pins_end_s
        for number in areas.unreadable:  # readers may hold pins on blocks that are unknown now
            self.segments[number].quiet_at_s = self._earlier_pins_end_s
        self.unreadable.update(areas.unreadable)
        self.generations_made = max(self.generations_made, areas.highest_count)

    def _note(self, segment: Segment, found: RecoveredSegment) -> None:
        if found.generation > segment.generation:
            segment.entries_used, segment.pool = 0, COMMON
        segment.generation = self.generations[found.number] = found.generation
        # Read again, a summary may list less than before: parts may be unreadable then.
        segment.entries_used = max(segment.entries_used, len(found.entries))
        if len(found.entries):
            segment.bytes_used, segment.pool = self.geometry.data_bytes, found.pool or segment.pool
        self.pool_numbers[found.number] = segment.pool

    def begin(self, epoch: OwnerEpoch, is_withheld: NDArray[np.bool_]) -> None:
        """Assign every segment its place after recovery; new generations are of *epoch*."""
        self._epoch = epoch
        self.generations_made += len(self.unreadable)  # each may be newer than all readable ones
        # Free segments of the lowest generation first, so that flash wears evenly over restarts.
        for number in np.argsort(self.generations, kind="stable").tolist():
            segment = self.segments[number]
            if is_withheld[number]:
                segment.state = SegmentState.WITHHELD
                self.withheld.append(segment)
            elif segment.state is SegmentState.SEALED:
                self.pools.of(segment.pool).sealed.append(segment)
            elif number in self.unreadable:
                self._drain(segment)
            else:
                self.free.append(segment)
        self._count_withheld()
        self.pools.recount(self.segments, self.draining)

    def renew(self, found: RecoveredSegment) -> None:
        """Take in the summary of a withheld segment again.

        After the loss of the store's state the generation may be of an owner with the same epoch: its page
        landed after this owner's first read.
        """
        segment = self.segments[found.number]
        self.generations_made = max(self.generations_made, generation_parts(found.generation)[1])
        if segment.entries_used:
            self.pools.of(segment.pool).leave(segment)
        self._note(segment, found)
        self._count_withheld()
        if segment.entries_used:
            pool = self.pools.of(segment.pool)
            pool.enter(segment)
            pool.bound_excess(is_new=True)

    def note_unreadable(self, areas: RecoveredAreas) -> None:
        """Update the unreadable segments after another reading of their summaries."""
        self.unreadable.difference_update(found.number for found in areas.segments)
        self.unreadable.update(areas.unreadable)

    def retire(self, is_listed: dict[int, bool]) -> None:
        """Give withheld segments places among the others. *is_listed*: whether each has blocks."""
        retired = [segment for segment in self.withheld if segment.number in is_listed]
        self.withheld = [segment for segment in self.withheld if segment.number not in is_listed]
        sealed: dict[int, list[tuple[Generation, Segment]]] = {}
        for segment in retired:
            pool = self.pools.of(segment.pool)
            if is_listed[segment.number]:
                segment.state = SegmentState.SEALED
                sealed.setdefault(pool.number, []).append((segment.generation, segment))
            else:
                if segment.entries_used:
                    pool.leave(segment)
                self._drain(segment)
        for number, segments in sealed.items():
            self.pools.of(number).join(segments)
        self.pools.changed = dict(self.pools.by_number)
        self._count_withheld()

    def _count_withheld(self) -> None:
        self._withheld_empty = sum(not segment.entries_used for segment in self.withheld)

    @property
    def lacks_free(self) -> bool:
        """Whether a segment must be evicted to be free in time."""
        return self._lacks(self._retiring)

    @property
    def awaits_retirement(self) -> bool:
        """Whether empty withheld segments save others from eviction."""
        return self._lacks(0) and not self._lacks(self._retiring)

    @property
    def _retiring(self) -> int:
        """Number of withheld segments that will be free after the retirement of earlier grants.

        A ring with room waits for them: several changes of owner in a short time withhold many segments, and
        would otherwise evict blocks although the ring is almost empty. The segments kept free by a full ring
        do not count, since waiting for them would stop all puts after a change of owner.
        """
        return max(0, self._withheld_empty - self._kept_free)

    def _lacks(self, retiring: int) -> bool:
        coming = retiring + len(self.free) + len(self.draining) + len(self.ready)
        coming += self.opening is not None
        pools = self.pools.by_number
        if pools and self.draining:  # what a pool with a share has emptied is its own again
            emptied = {segment.pool for segment in self.draining} & pools.keys()
            coming -= sum(pools[number].draining - pools[number].returning for number in emptied)
        return coming < max(self._kept_free, self.pools.segments_needed)

    @property
    def segments_ahead_min(self) -> int:
        """Minimum of segments at hand to go round: to open, and to keep ready."""
        return 2 if self._kept_free else 1

    @property
    def wants_opening(self) -> bool:
        """Whether a free segment should be opened."""
        has_room = self.opening is None and len(self.ready) < max(1, self._kept_free)
        is_time = has_room and (self._kept_free > 0 or self.pools.segments_needed > 0)
        return is_time and len(self.free) > 0

    def begin_opening(self, freed: Segment) -> Segment:
        """Take a free segment into its next generation."""
        self.free.remove(freed)
        number = freed.number
        self.generations_made += 1
        newest = generation(epoch=self._epoch, count=self.generations_made)
        assert newest > int(self.generations[number]), (
            f"generation {generation_parts(newest)} is not the newest"
        )
        log = SummaryLog(self.geometry, self._identity, number, newest, self._epoch)
        segment = Segment(number, SegmentState.OPENING, newest, log)
        self.segments[number], self.generations[number], self.opening = segment, newest, segment
        self.pool_numbers[number] = COMMON
        self.unreadable.discard(number)
        return segment

    def end_opening(self, *, is_ok: bool) -> None:
        """Make the opened segment ready. After a failed write drain it, because the page may still land."""
        segment, self.opening = self.opening, None
        assert segment is not None, "no segment is opening"
        if is_ok:
            segment.state = SegmentState.OPEN
            self.ready.append(segment)
        else:
            segment.log = None
            self._drain(segment)

    def place(self, pool: Pool, sizes: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
        """Allocate a pool's space for as many blocks, in order, as fit.

        *sizes*: whole pages, each at most a data area. Returns (offsets, segments).
        """
        offsets, segments = np.zeros(len(sizes), np.uint64), np.zeros(len(sizes), np.intp)
        placed = 0
        while placed < len(sizes):
            segment = pool.current or self.take_next(pool)
            if segment is None:
                break
            ends = sizes[placed:].cumsum()
            fits = int(ends.searchsorted(self.geometry.data_bytes - segment.bytes_used, side="right"))
            fits = min(fits, pool.limits.entries_max - segment.entries_used)
            if fits <= 0:  # the pool's limit may have fallen since the segment was opened
                segment.is_short = True
                if self.take_next(pool) is None:
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

    def take_next(self, pool: Pool) -> Segment | None:
        """Seal a pool's current segment, and replace it by a ready segment.

        Returns None if no segment is ready, or the pool is at its limit.
        """
        if not self.ready or not pool.may_take:
            return None
        pool.seal_current()
        segment = pool.current = self.ready.popleft()
        segment.pool = self.pool_numbers[segment.number] = pool.number
        assert segment.log is not None, "what is ready was opened"
        segment.log.pool = pool.number
        pool.enter(segment)
        pool.recently_taken += 1
        self.pools.mark_changed(pool)
        return segment

    def begin_draining(self, pool: Pool, oldest: Iterator[Segment]) -> Segment | None:
        """Take the first sealed segment of *oldest* out of use.

        Returns None if there is none, or commits to it are being written. No writer may be at work there: the
        writer would fail, and the segment could not be reused before the writer ends.
        """
        segment = next(oldest, None)
        if segment is None or segment.queued or segment.is_writing:
            return None
        assert not segment.held, "writers are at work there"
        pool.remove(segment)
        self.pools.mark_changed(pool)
        self._drain(segment)
        return segment

    def _drain(self, segment: Segment) -> None:
        segment.state = SegmentState.DRAINING
        self.draining.append(segment)
        self.pools.of(segment.pool).draining += 1

    def end_draining(self, now_s: float, pins: NDArray[np.int64]) -> None:
        """Free the draining segments without readers and writers. *pins*: number of pins, by segment."""
        for segment in list(self.draining):
            if not pins[segment.number] and not segment.held and now_s >= segment.quiet_at_s:
                self.draining.remove(segment)
                pool = self.pools.of(segment.pool)
                pool.draining -= 1
                pool.bound_excess()
                segment.state = SegmentState.FREE
                segment.pool = self.pool_numbers[segment.number] = COMMON
                self.free.append(segment)

    def is_sealed(self, number: int, generation: Generation) -> bool:
        """Return whether a segment is sealed, in this generation."""
        segment = self.segments[number]
        return segment.state is SegmentState.SEALED and segment.generation == generation

    def quiet_sealed(self) -> list[int]:
        """Return the sealed segments without open reservations and writes."""
        return [
            segment.number
            for segment in self.segments
            if segment.state is SegmentState.SEALED and not segment.is_busy
        ]

    def keep_quiet(self, segments: NDArray[np.intp], until_s: float | NDArray[np.float64]) -> None:
        """Do not reuse segments before *until_s*, as late writes may still land there."""
        each_s = np.broadcast_to(until_s, segments.shape)
        for number, quiet_at_s in zip(segments.tolist(), each_s.tolist(), strict=True):
            segment = self.segments[number]
            segment.quiet_at_s = max(segment.quiet_at_s, quiet_at_s)


_EMPTY = (SegmentState.FREE, SegmentState.DRAINING)


@dataclass(frozen=True, slots=True)
class _Mark:
    """State of the ring when the owner learned of an epoch."""

    epoch: PlacementEpoch
    newest: int
    """Newest generation."""

    count: int
    """Count of generations."""


class RingProgress:
    """Placement epochs known to a ring.

    Blocks placed by an ended epoch lie in segments opened before its end. Once as many segments were opened
    as the ring has, and none of the old ones is left, the shard has *turned over*. An empty ring has to go
    round too: in an enclosure without new puts, only the turnover of all other shards tells the age of
    blocks.

    While earlier epochs are still asked, no segment from before an epoch stays for another round: the shard
    would turn over later, and blocks that belong elsewhere now would stay.

    Known only since this owner began: a new owner takes every segment for older.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._marks: list[_Mark] = []
        """By epoch."""

    def begin_epoch(self, epoch: PlacementEpoch) -> int | None:
        """Note the current placement epoch; return the newest generation, or None for a known epoch."""
        if self._marks and epoch <= self._marks[-1].epoch:
            return None
        mark = _Mark(epoch, int(self._ring.generations.max()), self._ring.generations_made)
        self._marks = [*self._marks[-EARLIER_PLACEMENTS_MAX:], mark]
        return mark.newest

    def turned_over(self) -> PlacementEpoch:
        """Return the newest epoch since whose beginning the ring has gone round; 0 without any."""
        ring = self._ring
        used = [segment.generation for segment in ring.segments if segment.state not in _EMPTY]
        for mark in reversed(self._marks):
            has_turned = ring.generations_made - mark.count >= len(ring.segments)
            if has_turned and min(used, default=mark.newest + 1) > mark.newest:
                return mark.epoch
        return PlacementEpoch(0)
