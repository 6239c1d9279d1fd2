"""Decisions of a shard owner, composed of parts with separate state."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core.allocator import SpaceAllocator
from ostraca_dpu_agent.shards.core.answers import (
    Allocations,
    CommitResults,
    Resolution,
    ShardCounters,
    ShardCounts,
    ShardSettings,
    SummaryWrite,
)
from ostraca_dpu_agent.shards.core.catalog import NO_END_S, BlockCatalog
from ostraca_dpu_agent.shards.core.commits import CommitQueue
from ostraca_dpu_agent.shards.core.eviction import Eviction, Reinsertion
from ostraca_dpu_agent.shards.core.grants import Grants
from ostraca_dpu_agent.shards.core.recovery import Adoption, IndexRecovery
from ostraca_dpu_agent.shards.core.reservations import ReservationTable
from ostraca_dpu_agent.shards.core.ring.pools import SegmentState
from ostraca_dpu_agent.shards.core.ring.ring import Ring, RingProgress
from ostraca_dpu_agent.shards.core.write_budget import ShardWriteBudget
from ostraca_fabric.errors import UsageError
from ostraca_fabric.flash.index import listed_in_each
from ostraca_fabric.flash.recovery import RecoveredAreas
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.ids import OwnerEpoch, PlacementEpoch
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.wire.codec import KEY_BYTES, Outcomes, distinct

_GENERATIONS = 1 << 23
_RESERVATIONS_BITS, _PINS_BITS = 17, 40
"""Bits for reservations and pins per generation of a segment: fewer are made under one generation."""

_ENDED_SHARE_MAX = 2
_ENDED_MAX = 1024
"""End times of released pins are dropped when this many more exist than pins."""

_COUNTERS = tuple(counter.name for counter in fields(ShardCounters))
"""Names of the counters: every agent copies all counters of its shards each second."""


class Pins:
    """Pins on segments: a pinned segment is not reused before the pin's end."""

    def __init__(self, segments: int) -> None:
        self.on_segment = np.zeros(segments, np.int64)
        self._pins: dict[int, NDArray[np.intp]] = {}
        self._ends: list[tuple[float, int]] = []
        self._last = 0

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, end_s: float, segments: NDArray[np.intp]) -> int:
        """Pin segments, each given once; return the number of the pin, above 0."""
        self._last += 1
        self._pins[self._last] = segments
        self.on_segment[segments] += 1
        heapq.heappush(self._ends, (end_s, self._last))
        if len(self._ends) > _ENDED_SHARE_MAX * len(self._pins) + _ENDED_MAX:
            self._ends = [(end_s, pin) for end_s, pin in self._ends if pin in self._pins]
            heapq.heapify(self._ends)
        return self._last

    def number_from(self, number: int) -> None:
        """Start the numbers of new pins above *number*."""
        self._last = max(self._last, number)

    def end(self, pins: Iterable[int]) -> None:
        """End pins; ignore unknown numbers."""
        for pin in pins:
            segments = self._pins.pop(pin, None)
            if segments is not None:
                self.on_segment[segments] -= 1

    def expire(self, now_s: float) -> None:
        """End expired pins."""
        while self._ends and self._ends[0][0] <= now_s:
            self.end([heapq.heappop(self._ends)[1]])


class ShardCore:
    """Shard under an owner epoch.

    Recovery comes first: ``take_in`` makes blocks readable, and nothing is stored before ``begin``. Then the
    core stores blocks in the segments of ``apply_grant``, until the time of the last ``confirm``. After every
    call with a time, check ``has_writes_due``; take the writes with ``writes_due``, do the I/O, and report
    each with ``written``. Call from a single thread; nothing blocks.
    """

    def __init__(
        self, superblock: Superblock, *, settings: ShardSettings, earlier_pins_end_s: float = 0.0
    ) -> None:
        """Own a shard with unknown content: call ``take_in``, then ``begin``.

        No recovered block is evicted before *earlier_pins_end_s*: pass the present time plus ``pin_max_s`` if
        readers may still hold pins of an earlier owner.
        """
        self.superblock = superblock
        self.geometry = geometry = superblock.geometry
        self.settings = settings
        self.counters = counters = ShardCounters()
        self.budget = ShardWriteBudget(settings.endurance, geometry.shard_bytes)
        self.catalog = BlockCatalog(geometry, blocks_max=settings.blocks_max, counters=counters)
        self.index = self.catalog.index
        self.ring = Ring(
            superblock,
            free_segments=settings.free_segments,
            blocks_max=self.index.blocks_max,
            earlier_pins_end_s=earlier_pins_end_s,
        )
        self.progress = RingProgress(self.ring)
        self.pins = Pins(geometry.segments)
        self.reservations = ReservationTable(settings.reservations_max)
        self.grants = Grants(self.ring, self.budget, late_write_s=settings.late_write_s)
        shared = self.ring, self.catalog, self.grants
        self.eviction = Eviction(
            *shared, self.pins.on_segment, self.reservations, counters, pin_max_s=settings.pin_max_s
        )
        self.reinsertion = Reinsertion(settings.reinsertion_share, *shared, self.budget, counters)
        self.allocator = SpaceAllocator(
            *shared, self.reservations, self.eviction, self.budget, counters, settings
        )
        self.commits = CommitQueue(
            *shared, self.reservations, self.reinsertion, self.budget, counters, retry_s=settings.retry_s
        )
        self.recovery = IndexRecovery(self.ring, self.catalog, earlier_pins_end_s=earlier_pins_end_s)
        self.adoption = Adoption(*shared, self.reservations, counters)
        self._now_s = 0.0

    # ------------------------------------------------------------------------------------------- ownership

    @property
    def epoch(self) -> OwnerEpoch:
        """Owner epoch; 0 during recovery."""
        return self.grants.epoch

    @property
    def is_recovering(self) -> bool:
        """Whether recovery has not ended: nothing is allocated yet."""
        return self.grants.is_recovering

    @property
    def is_writable(self) -> bool:
        """Whether summaries can be written: until ``end_writing``."""
        return self.grants.is_writable

    @property
    def highest_epoch(self) -> OwnerEpoch:
        """Highest owner epoch found on flash by recovery."""
        return self.recovery.highest_epoch

    @property
    def recovered_share(self) -> float:
        """Recovered share of the shard: 1 after ``begin``, and below 1 before."""
        return min(0.99, self.recovery.areas / self.geometry.segments) if self.is_recovering else 1.0

    def take_in(self, areas: RecoveredAreas) -> None:
        """Take in the result of ``flash.recovery.recover`` for some segments: their blocks become readable.

        In any order, each segment once, and only during recovery.
        """
        self.recovery.take_in(areas)

    def begin(
        self,
        now_s: float,
        *,
        epoch: OwnerEpoch,
        withheld: frozenset[int] = frozenset(),
        resumed: frozenset[int] = frozenset(),
    ) -> None:
        """End recovery. Segments not taken in are free; so are unreadable ones, after the earlier pins' end.

        *withheld*: segments under unretired grants of earlier epochs, until ``retire``. *resumed*: segments
        granted to an earlier core under this same epoch; they are withheld too, and stay in the grant. Space
        is allocated after ``confirm``, ``apply_grant``, and the first summary writes, which are due then.

        Raises UsageError if *epoch* is below ``highest_epoch``: claim the shard with a higher epoch.
        """
        if epoch < self.highest_epoch:
            raise UsageError(
                f"owner epoch {epoch} is below {self.highest_epoch}, found on the shard: claim the shard "
                "with a higher epoch"
            )
        self.grants.begin(epoch, withheld=withheld, resumed=resumed)
        self.ring.begin(epoch, self.grants.is_withheld)
        self.adoption.begin()
        self.commits.begin(now_s)
        # Number pins and reservations above those of all earlier owners, so that no caller of theirs ends one
        # of this owner: the count of generations rises with every segment opened, over all owners.
        generations = self.ring.generations_made % _GENERATIONS
        self.pins.number_from(generations << _PINS_BITS)
        self.reservations.number_from(generations << _RESERVATIONS_BITS)
        self.budget.begin(now_s)
        self._advance(now_s)

    def share_out(self, shares: Mapping[int, float]) -> None:
        """Set each pool's share of the shard, 0 to 1. Blocks of other pools share the common pool.

        May be called at any time; call before the first ``take_in``, so recovery respects the shares. A pool
        above a lowered share loses the excess first when space is needed.
        """
        self.ring.share_out(shares)
        total = sum(pool.limits.segments_max for pool in self.ring.pools)
        self.budget.share_out(
            {number: pool.limits.segments_max / total for number, pool in self.ring.pools.by_number.items()}
        )

    def begin_placement_epoch(self, epoch: PlacementEpoch, *, has_earlier: bool) -> None:
        """Note the current placement epoch, and whether earlier ones are still asked.

        Has no effect during recovery, or for a known epoch.
        """
        if not self.is_recovering:
            newest = self.progress.begin_epoch(epoch)
            if newest is not None and has_earlier:
                self.reinsertion.end_stays(newest)

    def confirm(self, until_s: float, *, asked_s: float = math.inf) -> None:
        """Allocate space and write summaries until *until_s*, or a later time confirmed before.

        *until_s*: ``grant_s`` after the query that found the claim valid. *asked_s*: time of the query; by
        default after any doubt about the claim.
        """
        self.grants.confirm(until_s, asked_s)

    def fence(self, now_s: float) -> None:
        """Stop allocations and writes for good: another owner has, or will have, a higher epoch.

        Lookups go on, with promises up to the time for which the successor spares earlier readers.
        """
        self.grants.fence()
        self.catalog.promises.end_by(now_s + self.settings.pin_max_s)
        self._advance(now_s)

    def wanted_grant(self, now_s: float) -> tuple[int, ...] | None:
        """Return the segments to record as this epoch's grant, before ``apply_grant``; None if it suffices.

        Call about once a second.
        """
        return self.grants.wanted(now_s)

    def apply_grant(self, now_s: float, segments: Iterable[int]) -> None:
        """Use a recorded grant in place of the one before."""
        self.grants.apply(segments)
        self._advance(now_s)

    def own_alone(self, now_s: float) -> None:
        """Grant everything for ever: no other owner knows of this shard."""
        self.confirm(math.inf)
        self.apply_grant(now_s, range(self.geometry.segments))

    def adopt(self, now_s: float, areas: RecoveredAreas) -> int:
        """Take in summaries of withheld segments, read again; return the number of new blocks.

        Other segments are ignored, so the reading may be late. A higher epoch on flash is a final fence.
        """
        new = self.adoption.adopt(areas)
        self._advance(now_s)
        return new

    def retire(self, now_s: float, segments: Iterable[int]) -> None:
        """Use segments of a retired grant like all others.

        Before the call, read the summaries once more, when no late write can land any more, and ``adopt`` the
        result.
        """
        self.adoption.retire(segments)
        self._advance(now_s)

    # --------------------------------------------------------------------------------------------- lookups

    def resolve(
        self,
        now_s: float,
        keys: NDArray[np.uint8],
        *,
        pin_s: float,
        promises: bool = False,
        is_counted: bool = True,
    ) -> Resolution:
        """Find blocks, and pin their segments for *pin_s*, at most ``pin_max_s``; 0 pins nothing.

        With *promises* the blocks stay listed for as long instead, which takes no pin: a flood of look-ups
        leaves the pins to readers. A block without a promise is not found. *keys*: shape (n, 16). Counts as a
        read of every block found if *is_counted*.
        """
        self.pins.expire(now_s)
        rows, end_s = self.index.find(keys), now_s + min(pin_s, self.settings.pin_max_s)
        is_pinned = pin_s > 0 and not promises
        if is_pinned and len(self.pins) >= self.settings.pins_max:
            rows[:] = -1
        if promises:
            rows[~self._promise(rows, end_s)] = -1
        found = rows >= 0
        offsets, lengths, tags = self.index.read(rows, is_counted=is_counted)
        generations, pin = np.zeros(len(rows), np.uint64), 0
        hits = int(np.count_nonzero(found))
        if hits:
            segments = self.geometry.segment_of(offsets[found])
            generations[found] = self.ring.generations[segments]
            if is_pinned:
                pin = self.pins.add(end_s, distinct(segments))
        self.counters.keys_asked += len(rows)
        self.counters.keys_found += hits
        return Resolution(offsets, lengths, generations, tags, found, pin)

    def _promise(self, rows: NDArray[np.intp], end_s: float) -> NDArray[np.bool_]:
        """Promise the blocks of *rows* until *end_s*; return a mask of the promised rows.

        Blocks of a withheld segment can't be promised: an earlier owner may reuse the segment.
        """
        found = np.flatnonzero(rows >= 0)
        segments = self.catalog.segments_of(rows[found])
        promises = self.catalog.promises
        may_promise = promises.may_promise(segments, end_s) & ~self.grants.is_withheld[segments]
        promises.make(segments[may_promise], end_s)
        is_promised = np.zeros(len(rows), np.bool_)
        is_promised[found[may_promise]] = True
        return is_promised

    def has(self, keys: NDArray[np.uint8], *, is_counted: bool = True) -> NDArray[np.bool_]:
        """Return which blocks ``resolve`` without a pin would find; counts the same."""
        return has_in_each([(self, len(keys))], keys, is_counted=is_counted)

    # ---------------------------------------------------------------------------------------------- writes

    def reserve(
        self,
        now_s: float,
        keys: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
        *,
        hold_s: float,
        depths: NDArray[np.uint32] | None = None,
        ttl_s: float = NO_END_S,
        pool: int = 0,
        is_again: bool = False,
    ) -> Allocations:
        """Reserve space for blocks, in order and adjacent within a segment, for at most *hold_s*.

        *depths*: positions in chains, if known; blocks near the root matter most. *ttl_s*: time after which
        the blocks are not worth reinsertion. *pool*: pool whose share the blocks take. *is_again*: an earlier
        call admitted the same blocks, and had no room. The holder writes within the reservation, then commits
        or releases it.
        """
        self._end_expired(now_s)
        made = self.allocator.reserve(
            now_s, keys, lengths, hold_s=hold_s, depths=depths, ttl_s=ttl_s, pool=pool, is_again=is_again
        )
        self._advance(now_s)
        return made

    def reserve_copies(
        self, now_s: float, keys: NDArray[np.uint8], lengths: NDArray[np.uint32], *, hold_s: float
    ) -> Allocations:
        """Reserve space for copies of blocks of a ``ReinsertionBatch``, as far as there is any.

        The commit of a copy moves the block there.
        """
        self._end_expired(now_s)
        made = self.allocator.reserve_copies(now_s, keys, lengths, hold_s=hold_s)
        self._advance(now_s)
        return made

    def end_reinsertion(self, now_s: float) -> None:
        """End the batch taken last: all that will be copied is copied."""
        self.reinsertion.end()
        self.eviction.advance(now_s)
        self.reinsertion.advance(now_s)

    def commit(
        self,
        now_s: float,
        reservations: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        seeds: NDArray[np.uint64],
        *,
        epoch: OwnerEpoch,
    ) -> Outcomes:
        """Queue blocks whose bytes are on flash for the next summary write.

        *tags*: shape (n, 16), each made with its seed. A commit under a higher epoch puts the claim in doubt:
        if ``grants.is_doubted`` is set then, ask the store and ``confirm``.
        """
        self._end_expired(now_s)
        if epoch == self.epoch:
            answer = self.commits.commit(now_s, reservations, tags, seeds)
        else:
            if epoch > self.epoch and not self.is_recovering:
                self.grants.doubt(now_s)
            answer = Outcomes.filled(len(reservations), PutState.DECLINED, Reason.EXPIRED)
        self._advance(now_s)
        return answer

    @property
    def has_writes_due(self) -> bool:
        """Whether ``writes_due`` would return anything, at the time of the last call."""
        return self.is_writable and self.commits.is_due and self.grants.may_write(self._now_s)

    def writes_due(self, now_s: float) -> list[SummaryWrite]:
        """Take the summary writes to do now: queued commits, and openings of segments.

        A segment has at most one write under way; later commits wait for the next. Report every write to
        ``written`` or ``dropped``. A write has at most 33 pages.
        """
        self._now_s = now_s
        return self.commits.take_due() if self.has_writes_due else []

    def written(self, now_s: float, write: SummaryWrite, *, is_ok: bool) -> CommitResults:
        """Report the end of a summary write: *is_ok* only if every piece is durable.

        Blocks of a successful write are listed from now on. A failed write declines its blocks and all queued
        blocks, and seals the segment.
        """
        if not is_ok:
            self.allocator.expect_late_writes(np.array([write.segment]), now_s)
        return self._end_write(now_s, write, Reason.NONE if is_ok else Reason.DRIVE_ERROR)

    def dropped(self, now_s: float, write: SummaryWrite) -> CommitResults:
        """Report that no piece of a summary write was, or will be, submitted: its blocks are declined."""
        return self._end_write(now_s, write, Reason.FENCED)

    def _end_write(self, now_s: float, write: SummaryWrite, failed: Reason) -> CommitResults:
        results = self.commits.end(now_s, write, failed)
        self._advance(now_s)
        return results

    def end_writing(self) -> None:
        """Stop allocations and commits for good, as the caller can't write summaries; lookups go on.

        Writes under way are never reported to ``written``.
        """
        self.grants.end_writing()

    def release(
        self, now_s: float, pins: Sequence[int], reservations: NDArray[np.uint64], *, may_land: bool = False
    ) -> bool:
        """End pins and reservations early; ignore unknown or ended ones.

        Returns whether a segment may have become free.

        A released extent is not allocated again in this generation. The holder asserts the end of all its
        writes there; a holder in doubt lets the reservation expire. With *may_land* the writes have failed,
        and a path may still deliver them: the segments are not reused for ``late_write_s``.
        """
        self.pins.end(pins)
        may_free = len(reservations) > 0 or bool(self.ring.draining)
        if may_free:
            self.allocator.release(now_s, reservations, may_land=may_land)
            self.expire(now_s)
        return may_free

    def expire(self, now_s: float) -> None:
        """End expired pins and reservations, and evict and open segments. Call about once a second."""
        self._end_expired(now_s)
        self._advance(now_s)

    def _end_expired(self, now_s: float) -> None:
        self.budget.advance(now_s)
        self.pins.expire(now_s)
        self.allocator.expire(now_s)

    def is_current(self, key: bytes, *, offset: int, generation: int, tag: bytes) -> bool:
        """Return whether the index lists exactly this extent for *key*.

        A damage report of another extent is ignored. Before a ``drop`` the caller reads a current extent
        again.
        """
        if len(key) != KEY_BYTES:
            return False
        row = self.index.find(_row(key))
        if row[0] < 0 or int(self.index.offsets(row)[0]) != offset:
            return False
        (segment,) = self.catalog.segments_of(row)
        return int(self.ring.generations[segment]) == generation and self.index.tags(row).tobytes() == tag

    def drop(self, key: bytes, *, offset: int, generation: int, tag: bytes) -> bool:
        """Remove a damaged block from the index, if still current; return whether it was."""
        if not self.is_current(key, offset=offset, generation=generation, tag=tag):
            return False
        self.index.remove(self.index.find(_row(key)))
        self.counters.blocks_dropped += 1
        return True

    # --------------------------------------------------------------------------------------------- reports

    def counts(self, *, by_segment: bool = True) -> ShardCounts:
        """Return the content of the shard, and events so far.

        The counts by segment and pool take milliseconds for a large shard; they are left empty unless
        *by_segment*.
        """
        segments = self.ring.segments if by_segment else []
        by_state = Counter(segment.state for segment in segments)
        pools: Counter[int] = Counter()
        for segment in segments:
            if segment.entries_used and segment.state not in (SegmentState.FREE, SegmentState.DRAINING):
                pools[segment.pool] += segment.bytes_used
        return ShardCounts(
            **{name: getattr(self.counters, name) for name in _COUNTERS},
            blocks=len(self.index),
            blocks_max=self.index.blocks_max,
            is_index_full=self.eviction.is_for_index and 2 * self.index.room < self.index.blocks_max,
            block_bytes=self.index.block_bytes,
            capacity_bytes=self.geometry.segments * self.geometry.data_bytes,
            segments={state: by_state[state] for state in SegmentState},
            pools=pools,
            pins=len(self.pins),
            reservations=len(self.reservations),
            segments_unreadable=len(self.ring.unreadable),
        )

    def _advance(self, now_s: float) -> None:
        """Free drained segments, and evict and open segments ahead of need."""
        self.ring.end_draining(now_s, self.pins.on_segment)
        self._now_s = now_s
        if self.is_recovering or not self.is_writable:
            return
        if self.grants.has_ended(now_s):
            self.commits.decline_queued(now_s)
        self.eviction.advance(now_s)
        self.reinsertion.advance(now_s)
        self.commits.open_next(now_s)


def _row(key: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(key, np.uint8).reshape(1, KEY_BYTES)


def has_in_each(
    runs: Sequence[tuple[ShardCore | None, int]], keys: NDArray[np.uint8], *, is_counted: bool = True
) -> NDArray[np.bool_]:
    """Return which blocks exist, as ``ShardCore.has``.

    A run is a shard with the number of its blocks, the next of *keys*. Blocks without a shard do not exist.
    """
    indexes = [(None if core is None else core.index, count) for core, count in runs]
    found, hits = listed_in_each(indexes, keys, is_counted=is_counted)
    for (core, count), its in zip(runs, hits, strict=True):
        if core is not None:
            core.counters.keys_asked += count
            core.counters.keys_found += its
    return found
