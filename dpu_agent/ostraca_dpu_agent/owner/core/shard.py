"""The owner's decisions about one shard."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.admitting import Spending, admitted
from ostraca_dpu_agent.owner.core.answers import (
    CommitAnswer,
    CommitsDone,
    Reservations,
    Resolution,
    SummaryWrite,
)
from ostraca_dpu_agent.owner.core.check import check
from ostraca_dpu_agent.owner.core.counts import ShardCounts, counts_of
from ostraca_dpu_agent.owner.core.evicting import Eviction, listed, reserve_carried
from ostraca_dpu_agent.owner.core.holds import COMMITTING, HELD, Pins, Promises, ReservationTable
from ostraca_dpu_agent.owner.core.lifetimes import NO_END_S, Lifetimes, end_of
from ostraca_dpu_agent.owner.core.recovering import number_above, take_in
from ostraca_dpu_agent.owner.core.resolving import resolved
from ostraca_dpu_agent.owner.core.segments import Ring, Segment, SegmentState
from ostraca_dpu_agent.owner.core.settings import ShardSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.flash.index import BlockIndex
from ostraca_fabric.ids import OwnerEpoch
from ostraca_fabric.outcome import PutState, Reason
from ostraca_fabric.rows import distinct
from ostraca_fabric.wire.columns import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ostraca_fabric.flash.recovery import RecoveredAreas
    from ostraca_fabric.flash.superblock import Superblock

_NONE = np.zeros(0, np.intp)

_WRITE_ENTRIES_MAX = 1600
"""Blocks in one summary write: 33 pages at most. More wait for the next."""


class ShardCore:
    """One shard under one owner epoch.

    It recovers first: ``take_in`` tells what can be found, nothing is stored before ``begin``. After every
    call that takes the time, look at ``has_writes_due``; take the writes with ``writes_due``, do the I/O, and
    report each with ``written``. One call at a time; nothing here blocks.
    """

    def __init__(
        self, superblock: Superblock, *, settings: ShardSettings, earlier_pins_end_s: float = 0.0
    ) -> None:
        """Own a shard, and know nothing yet of what it holds: ``take_in`` says it, and then ``begin``.

        No recovered block is evicted before *earlier_pins_end_s*: pass the time plus ``pin_max_s`` where
        readers may still hold pins that an earlier owner gave.
        """
        geometry = superblock.geometry
        self.epoch = OwnerEpoch(0)  # while recovering, when nothing is handed out
        self.highest_epoch = OwnerEpoch(0)  # of those found on flash so far
        self.areas_taken_in = 0
        self.is_recovering = True
        self.superblock = superblock
        self.geometry = geometry
        self.settings = settings
        self.index = BlockIndex(
            blocks_max=min(settings.blocks_max, geometry.segments * geometry.entries_max),
            segments=geometry.segments,
        )
        self.ring = Ring(
            superblock,
            free_segments=settings.free_segments,
            blocks_max=self.index.blocks_max,
            earlier_pins_end_s=earlier_pins_end_s,
        )
        self.lifetimes = Lifetimes(geometry.segments)
        self.pins = Pins(geometry.segments)
        self.promises = Promises(geometry.segments)
        self.reservations = ReservationTable(settings.reservations_max)
        self.spending = Spending(settings.endurance, geometry.shard_bytes)
        self.is_writable = True
        self._writes: dict[int, tuple[Segment, NDArray[np.intp]]] = {}
        self._queued: dict[int, Segment] = {}
        self._opening_due: Segment | None = None
        self._open_after_s = 0.0
        self._earlier_pins_end_s = earlier_pins_end_s
        self.counted: Counter[str] = Counter()
        self.eviction = Eviction(self, carry_share=settings.carry_share)

    def take_in(self, areas: RecoveredAreas) -> None:
        """Know of some segments what ``flash.recovery.recover`` found: their blocks can be got from here on.

        In any order, each segment once, only while recovering.
        """
        self.highest_epoch = max(self.highest_epoch, areas.highest_epoch)
        self.areas_taken_in += areas.areas
        take_in(self, areas, self._earlier_pins_end_s)

    def begin(self, now_s: float, *, epoch: OwnerEpoch) -> None:
        """End recovery: segments that were not taken in are lost, and are taken for free.

        Raises UsageError when *epoch* is below ``highest_epoch``: claim with ``epoch_at_least`` above that.
        The first summary writes are due at once; space is handed out when they are written.
        """
        if epoch < self.highest_epoch:
            raise UsageError(
                f"owner epoch {epoch} of the shard is below {self.highest_epoch}, which wrote there: claim "
                "the shard with a higher one"
            )
        self.epoch, self.is_recovering, self._open_after_s = epoch, False, now_s
        self.ring.begin(epoch)
        number_above(self)
        self.spending.begin(now_s)
        self._advance(now_s)

    def resolve(
        self,
        now_s: float,
        keys: NDArray[np.uint8],
        *,
        pin_s: float,
        promises: bool = False,
        is_counted: bool = True,
    ) -> Resolution:
        """Find blocks and keep their segments from being reused for *pin_s*, at most ``pin_max_s``.

        With *promises* they can also be found for as long: none is evicted, and one that can't be promised
        is not found now. *keys*: shape (n, 16). Counts as a read of every block found, unless *is_counted* is
        false. A *pin_s* of 0 pins nothing.
        """
        self.expire(now_s)
        return resolved(self, now_s, keys, pin_s=pin_s, promises=promises, is_counted=is_counted)

    def reserve(
        self,
        now_s: float,
        keys: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
        *,
        hold_s: float,
        depths: NDArray[np.uint32] | None = None,
        ttl_s: float = NO_END_S,
    ) -> Reservations:
        """Hand out space, in the order asked and adjacent where one segment holds it, for *hold_s* at most.

        *depths* in their chains, where they are known, say which blocks matter most; *ttl_s* from now on the
        blocks are no longer worth carrying forward. The holder writes within the reservation, then commits or
        releases it.
        """
        self.expire(now_s)
        count = len(keys)
        states, reasons = np.full(count, PutState.DECLINED, np.uint8), np.zeros(count, np.uint8)
        numbers, offsets = np.zeros(count, np.uint64), np.zeros(count, np.uint64)
        sizes = -(-lengths.astype(np.int64) // PAGE_BYTES) * PAGE_BYTES
        wanted = admitted(self, now_s, keys, sizes, depths, states, reasons)
        placed, segments = self.ring.place(sizes[wanted])
        taken = wanted[: len(placed)]
        reasons[wanted[len(placed) :]] = Reason.NO_SPACE
        if len(taken):
            end_s = now_s + min(hold_s, self.settings.hold_max_s)
            kept_until_s = end_of(now_s, ttl_s)
            numbers[taken] = self.reservations.add(
                end_s, keys[taken], lengths[taken], placed, segments, kept_until_s=kept_until_s
            )
            offsets[taken], states[taken] = placed, PutState.STAGED
            self.counted["blocks_reserved"] += len(taken)
            self.spending.spend(int(sizes[taken].sum()))
        self._advance(now_s)
        return Reservations(states, reasons, numbers, offsets)

    def reserve_carried(
        self, now_s: float, keys: NDArray[np.uint8], lengths: NDArray[np.uint32], *, hold_s: float
    ) -> Reservations:
        """Hand out space for copies of blocks that ``eviction.take_carry`` named, as far as there is any.

        Committing one moves the block there.
        """
        self.expire(now_s)
        made = reserve_carried(self, now_s, keys, lengths, hold_s=hold_s)
        self._advance(now_s)
        return made

    def commit(
        self,
        now_s: float,
        reservations: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        seeds: NDArray[np.uint64],
        *,
        epoch: OwnerEpoch,
    ) -> CommitAnswer:
        """Take blocks whose bytes are on flash into the next summary write.

        *tags*: shape (n, 16), each made with its seed.
        """
        self.expire(now_s)
        states = np.full(len(reservations), PutState.DECLINED, np.uint8)
        reasons = np.full(len(reservations), Reason.EXPIRED, np.uint8)
        if epoch != self.epoch:
            return CommitAnswer(states, reasons)
        table = self.reservations
        slots = table.slots_of(reservations)
        known = np.flatnonzero(slots >= 0)
        reasons[known[table.states[slots[known]] == COMMITTING]] = Reason.IN_FLIGHT
        held = known[table.states[slots[known]] == HELD]
        segments = table.segments[slots[held]]
        for number in distinct(segments).tolist():
            segment = self.ring.segments[number]
            here = held[segments == number]
            segment.held -= len(here)
            is_broken = segment.is_broken or not self.is_writable
            if is_broken or segment.state is SegmentState.DRAINING:
                table.end(slots[here])
                reasons[here] = Reason.DRIVE_ERROR if is_broken else Reason.EXPIRED
                continue
            table.states[slots[here]] = COMMITTING
            table.tags[slots[here]], table.seeds[slots[here]] = tags[here], seeds[here]
            segment.queued.append(slots[here])
            self._queued[number] = segment
            states[here], reasons[here] = PutState.STAGED, Reason.NONE
        self._advance(now_s)
        return CommitAnswer(states, reasons)

    @property
    def has_writes_due(self) -> bool:
        """Whether ``writes_due`` would return anything."""
        return self.is_writable and (
            self._opening_due is not None or any(not segment.is_writing for segment in self._queued.values())
        )

    @property
    def may_get_commits(self) -> bool:
        """Whether somebody holds space, whose commit a summary write may be kept open for."""
        return self.reservations.has_held

    def writes_due(self) -> list[SummaryWrite]:
        """Take the summary writes to do now: commits gathered so far, and openings of segments.

        A segment has at most one write under way; what is committed meanwhile waits for the next. Every write
        taken must be reported to ``written``. A write has at most 33 pages.
        """
        writes: list[SummaryWrite] = []
        if not self.is_writable:
            return writes
        if self._opening_due is not None:
            assert self._opening_due.log is not None, "an opening segment has a summary"
            writes.append(self._write(self._opening_due, _NONE, self._opening_due.log.opening()))
            self._opening_due = None
        for segment in [segment for segment in self._queued.values() if not segment.is_writing]:
            assert segment.log is not None, "commits go to segments opened by this owner"
            gathered = np.concatenate(segment.queued)
            slots, later = gathered[:_WRITE_ENTRIES_MAX], gathered[_WRITE_ENTRIES_MAX:]
            segment.queued = [later] if len(later) else []
            if not segment.queued:
                del self._queued[segment.number]
            table = self.reservations
            entries = table.entries(slots)
            writes.append(self._write(segment, slots, segment.log.append(entries)))
        return writes

    def written(self, now_s: float, write: SummaryWrite, *, is_ok: bool) -> CommitsDone:
        """Say how a summary write ended: *is_ok* only when every piece is durable.

        Blocks of a good write are in the index from here on. A failed one declines its blocks, and those
        gathered behind it, and seals the segment.
        """
        segment, slots = self._writes.pop(write.number)
        segment.is_writing = False
        self.counted["summary_write_failures"] += not is_ok
        if not is_ok:
            self._keep_quiet(np.array([segment.number]), now_s)
        if segment is self.ring.opening:
            self.ring.end_opening(is_ok=is_ok)
            if not is_ok:
                self._open_after_s = now_s + self.settings.retry_s
        elif not is_ok:
            slots = self._break(segment, slots)
        table = self.reservations
        if is_ok and len(slots):
            listed(self, slots, segment.number)
        table.end(slots)
        done = CommitsDone(
            table.numbers[slots],
            np.full(len(slots), PutState.COMMITTED if is_ok else PutState.DECLINED, np.uint8),
            np.full(len(slots), Reason.NONE if is_ok else Reason.DRIVE_ERROR, np.uint8),
        )
        self._advance(now_s)
        return done

    def end_writing(self) -> None:
        """Hand out no space and list nothing any more; what can be got stays so.

        For a caller that can't write summaries. What is under way is never reported to ``written``.
        """
        self.is_writable = False

    def release(
        self, now_s: float, pins: Sequence[int], reservations: NDArray[np.uint64], *, may_land: bool = False
    ) -> None:
        """End pins and reservations early; unknown or ended ones are ignored.

        A released reservation's extent is not handed out again in this generation. The holder says with it
        that no write of its own is under way there any more; one that can't tell lets it run out instead.
        With *may_land* its writes have failed, and a path may deliver them yet: their segments are not used
        again for ``late_write_s``.
        """
        self.pins.end(pins)
        slots = self.reservations.slots_of(reservations)
        slots = slots[slots >= 0]
        held = slots[self.reservations.states[slots] == HELD]
        if may_land:
            self._keep_quiet(self.reservations.segments[held], now_s)
        self._end_held(held)
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """End what has run out, and evict and open segments ahead of need. Call about once a second."""
        self.spending.advance(now_s)
        self.pins.expire(now_s)
        expired = self.reservations.take_expired(now_s)
        if len(expired):
            segments, ends_s = self.reservations.segments[expired], self.reservations.ends_s[expired]
            for number in distinct(segments).tolist():
                segment = self.ring.segments[number]
                quiet_at_s = float(ends_s[segments == number].max()) + self.settings.late_write_s
                segment.quiet_at_s = max(segment.quiet_at_s, quiet_at_s)
            self._end_held(expired)
        self._advance(now_s)

    def is_current(self, key: bytes, *, offset: int, generation: int, tag: bytes) -> bool:
        """Say whether this extent is what the index lists for *key*.

        A damage report of anything else is ignored. The caller of a current one reads the extent again itself
        before it calls ``drop``.
        """
        if len(key) != KEY_BYTES:
            return False
        row = self.index.find(np.frombuffer(key, np.uint8).reshape(1, KEY_BYTES))
        if row[0] < 0 or int(self.index.offsets(row)[0]) != offset:
            return False
        number = self.ring.segment_of(self.index.offsets(row))[0]
        return int(self.ring.generations[number]) == generation and self.index.tags(row).tobytes() == tag

    def drop(self, key: bytes, *, offset: int, generation: int, tag: bytes) -> bool:
        """Take a damaged block out of the index, if it is still current; say whether it was."""
        if not self.is_current(key, offset=offset, generation=generation, tag=tag):
            return False
        self.index.remove(self.index.find(np.frombuffer(key, np.uint8).reshape(1, KEY_BYTES)))
        self.counted["blocks_dropped"] += 1
        return True

    def check(self) -> None:
        """Assert every invariant of this state. For tests: looks at every block."""
        check(self)

    def counts(self) -> ShardCounts:
        """Return what the shard holds and has done."""
        return counts_of(self)

    def _write(
        self, segment: Segment, slots: NDArray[np.intp], pieces: tuple[tuple[int, bytes], ...]
    ) -> SummaryWrite:
        self.counted["summary_writes"] += 1
        number = self.counted["summary_writes"]
        self.counted["summary_bytes"] += sum(len(pages) for _, pages in pieces)
        self._writes[number] = (segment, slots)
        segment.is_writing = True
        self.spending.spend(sum(len(pages) for _, pages in pieces))
        return SummaryWrite(number, segment.number, segment.generation, pieces)

    def _break(self, segment: Segment, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """List nothing more in a segment whose summary can't be written; return the commits that fail."""
        segment.is_broken = True
        failed = np.concatenate([slots, *segment.queued])
        segment.queued = []
        self._queued.pop(segment.number, None)
        if segment is self.ring.current:
            self.ring.seal_current()
        return failed

    def _keep_quiet(self, segments: NDArray[np.intp], since_s: float) -> None:
        """Use segments no more until writes that ended nowhere known by then can't land any more."""
        for number in distinct(segments).tolist():
            segment = self.ring.segments[number]
            segment.quiet_at_s = max(segment.quiet_at_s, since_s + self.settings.late_write_s)

    def _end_held(self, slots: NDArray[np.intp]) -> None:
        held = np.bincount(self.reservations.segments[slots])
        for number in np.flatnonzero(held).tolist():
            self.ring.segments[number].held -= int(held[number])
        self.reservations.end(slots)

    def _advance(self, now_s: float) -> None:
        """Free what has drained, evict and open ahead of need."""
        ring = self.ring
        ring.end_draining(now_s, self.pins.on_segment)
        if self.is_recovering or not self.is_writable:
            return
        self.eviction.advance(now_s)
        if now_s >= self._open_after_s and self._opening_due is None:
            self._opening_due = ring.begin_opening()
