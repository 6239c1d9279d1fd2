"""The owner's decisions about one shard."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.admitting import Spending, admitted
from ostraca_dpu_agent.owner.core.adopting import Adoption
from ostraca_dpu_agent.owner.core.answers import (
    CommitAnswer,
    CommitsDone,
    Reservations,
    Resolution,
    SummaryWrite,
)
from ostraca_dpu_agent.owner.core.check import check
from ostraca_dpu_agent.owner.core.counts import ShardCounts, counts_of
from ostraca_dpu_agent.owner.core.evicting import Eviction, placed, reserve_carried
from ostraca_dpu_agent.owner.core.granting import Grants
from ostraca_dpu_agent.owner.core.holds import HELD, Pins, Promises, ReservationTable
from ostraca_dpu_agent.owner.core.lifetimes import NO_END_S, Lifetimes, end_of
from ostraca_dpu_agent.owner.core.listing import Listing
from ostraca_dpu_agent.owner.core.recovering import number_above, take_in
from ostraca_dpu_agent.owner.core.resolving import known, resolved
from ostraca_dpu_agent.owner.core.ring import Ring
from ostraca_dpu_agent.owner.core.settings import ShardSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.flash.index import BlockIndex
from ostraca_fabric.ids import OwnerEpoch
from ostraca_fabric.outcome import PutState, Reason
from ostraca_fabric.rows import distinct
from ostraca_fabric.wire.columns import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from ostraca_fabric.flash.recovery import RecoveredAreas
    from ostraca_fabric.flash.superblock import Superblock


class ShardCore:
    """One shard under one owner epoch.

    It recovers first: ``take_in`` tells what can be found, nothing is stored before ``begin``. Then it stores
    in the segments that it was ``granted``, until the time it was last told with ``confirm``. After every
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
        self._told_s = 0.0
        self._earlier_pins_end_s = earlier_pins_end_s
        self.counted: Counter[str] = Counter()
        self.eviction = Eviction(self, carry_share=settings.carry_share)
        self.grants = Grants(self)
        self.adoption = Adoption(self)
        self.listing = Listing(self)

    def take_in(self, areas: RecoveredAreas) -> None:
        """Know of some segments what ``flash.recovery.recover`` found: their blocks can be got from here on.

        In any order, each segment once, only while recovering.
        """
        self.highest_epoch = max(self.highest_epoch, areas.highest_epoch)
        self.areas_taken_in += areas.areas
        take_in(self, areas, self._earlier_pins_end_s)

    def begin(
        self,
        now_s: float,
        *,
        epoch: OwnerEpoch,
        withheld: frozenset[int] = frozenset(),
        resumed: frozenset[int] = frozenset(),
    ) -> None:
        """End recovery: segments that were not taken in are taken for free, and those that can't be read and
        list nothing too, once no pin of an earlier owner is left.

        *withheld*: those under unretired grants of earlier epochs, until ``retire``. *resumed*: those that an
        earlier core was granted under this same epoch; they are withheld too, and stay in the grant. Space
        is handed out when there was a ``confirm`` and something was ``granted``, and the first summary
        writes, due then, are written.

        Raises UsageError when *epoch* is below ``highest_epoch``: claim with ``epoch_at_least`` above that.
        """
        if epoch < self.highest_epoch:
            raise UsageError(
                f"owner epoch {epoch} of the shard is below {self.highest_epoch}, which wrote there: claim "
                "the shard with a higher one"
            )
        self.epoch, self.is_recovering = epoch, False
        self.grants.withhold(withheld, resumed)
        self.ring.begin(epoch, self.grants.is_withheld)
        self.adoption.begin()
        self.listing.begin(now_s)
        number_above(self)
        self.spending.begin(now_s)
        self._advance(now_s)

    def share_out(self, shares: Mapping[int, float]) -> None:
        """Say which part of the shard each pool may take, from 0 to 1. Others' blocks share the common pool.

        At any time; before anything is taken in, so that what recovery has no room for is left out by shares
        too. What a pool has above a share that fell goes when somebody needs the space, before anything else.
        """
        self.ring.share_out(shares)
        there_are = sum(pool.part.segments_max for pool in self.ring.all_pools())
        self.spending.share_out(
            {number: pool.part.segments_max / there_are for number, pool in self.ring.pools.items()}
        )

    def confirm(self, until_s: float, *, asked_s: float = math.inf) -> None:
        """Hand out space and write summaries until then, or until a later time that was said before.

        *until_s*: the time before the claim was asked for, and found to stand, plus ``grant_s``. *asked_s*:
        that time; by default after anything that may have thrown doubt on the claim.
        """
        self.grants.confirm(until_s, asked_s)

    def fence(self, now_s: float) -> None:
        """Hand out and write nothing any more: another owner has a higher epoch, or will have one. Goes on
        resolving, and promises nothing beyond what that one leaves alone for an earlier owner's readers.
        """
        self.grants.fence()
        self.promises.end(now_s + self.settings.pin_max_s)
        self._advance(now_s)

    def grant_wanted(self, now_s: float) -> tuple[int, ...] | None:
        """Return the segments to have recorded as this epoch's grant, and then ``granted``; None while the
        one that it has will do. Ask about once a second.
        """
        return self.grants.wanted(now_s)

    def granted(self, now_s: float, segments: Iterable[int]) -> None:
        """Take these segments for this epoch's grant: it is recorded, in place of the one before."""
        self.grants.granted(segments)
        self._advance(now_s)

    def own_alone(self, now_s: float) -> None:
        """Be granted everything for ever: no other owner knows of this shard."""
        self.confirm(math.inf)
        self.granted(now_s, range(self.geometry.segments))

    def adopt(self, now_s: float, areas: RecoveredAreas) -> int:
        """Know what was read again of withheld segments' summaries; return how many blocks are new.

        Others are left out, so whoever reads may be late. A higher epoch found there is the end of this one.
        """
        new = self.adoption.adopt(areas)
        self._advance(now_s)
        return new

    def retire(self, now_s: float, segments: Iterable[int]) -> None:
        """Use segments whose grant is retired like any other.

        Before that read their summaries once more, begun when no write to them could land any more, and
        ``adopt`` what they say.
        """
        self.adoption.retire(segments)
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
        if pin_s > 0:  # what else has run out makes no difference to what is found
            self.expire(now_s)
        return resolved(self, now_s, keys, pin_s=pin_s, promises=promises, is_counted=is_counted)

    def has(self, keys: NDArray[np.uint8], *, is_counted: bool = True) -> NDArray[np.bool_]:
        """Say which blocks ``resolve`` would find that pins nothing, and count it as the same."""
        return known(self, keys, is_counted=is_counted)

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
    ) -> Reservations:
        """Hand out space, in the order asked and adjacent where one segment holds it, for *hold_s* at most.

        *depths* in their chains, where they are known, say which blocks matter most; *ttl_s* from now on the
        blocks are no longer worth carrying forward; *pool*: whose share of the shard they take. The holder
        writes within the reservation, then commits or
        releases it.
        """
        self.expire(now_s)
        count = len(keys)
        states, reasons = np.full(count, PutState.DECLINED, np.uint8), np.zeros(count, np.uint8)
        numbers, offsets = np.zeros(count, np.uint64), np.zeros(count, np.uint64)
        sizes = -(-lengths.astype(np.int64) // PAGE_BYTES) * PAGE_BYTES
        of_pool = self.ring.pool_of(pool)
        wanted = admitted(self, now_s, keys, sizes, depths, states, reasons, pool=of_pool)
        there, segments = placed(self, now_s, of_pool, sizes[wanted])
        taken = wanted[: len(there)]
        reasons[wanted[len(there) :]] = Reason.NO_SPACE
        if len(taken):
            end_s = now_s + min(hold_s, self.settings.hold_max_s)
            kept_until_s = end_of(now_s, ttl_s)
            numbers[taken] = self.reservations.add(
                end_s, keys[taken], lengths[taken], there, segments, kept_until_s=kept_until_s
            )
            offsets[taken], states[taken] = there, PutState.STAGED
            self.counted["blocks_reserved"] += len(taken)
            self.spending.spend(int(sizes[taken].sum()), of_pool.number)
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

        *tags*: shape (n, 16), each made with its seed. One under a higher epoch throws doubt on the claim:
        where ``grants.is_doubted`` is set then, ask the store and ``confirm``.
        """
        self.expire(now_s)
        if epoch == self.epoch:
            answer = self.listing.commit(now_s, reservations, tags, seeds)
        else:
            if epoch > self.epoch and not self.is_recovering:
                self.grants.doubt(now_s)
            states = np.full(len(reservations), PutState.DECLINED, np.uint8)
            answer = CommitAnswer(states, np.full(len(reservations), Reason.EXPIRED, np.uint8))
        self._advance(now_s)
        return answer

    @property
    def has_writes_due(self) -> bool:
        """Whether ``writes_due`` would return anything, at the time that was told last."""
        return self.is_writable and self.listing.is_due and self.grants.may_write(self._told_s)

    @property
    def may_get_commits(self) -> bool:
        """Whether somebody holds space, whose commit a summary write may be kept open for."""
        return self.reservations.has_held

    def writes_due(self, now_s: float) -> list[SummaryWrite]:
        """Take the summary writes to do now: commits gathered so far, and openings of segments.

        A segment has at most one write under way; what is committed meanwhile waits for the next. Every write
        taken must be reported to ``written``, or to ``dropped``. A write has at most 33 pages.
        """
        self._told_s = now_s
        return self.listing.take_due() if self.has_writes_due else []

    def written(self, now_s: float, write: SummaryWrite, *, is_ok: bool) -> CommitsDone:
        """Say how a summary write ended: *is_ok* only when every piece is durable.

        Blocks of a good write are in the index from here on. A failed one declines its blocks, and those
        gathered behind it, and seals the segment.
        """
        if not is_ok:
            self._keep_quiet(np.array([write.segment]), now_s)
        done = self.listing.end(now_s, write, Reason.NONE if is_ok else Reason.DRIVE_ERROR)
        self._advance(now_s)
        return done

    def dropped(self, now_s: float, write: SummaryWrite) -> CommitsDone:
        """Say that nothing of a summary write was submitted, and never will be: it declines its blocks like
        a failed one.
        """
        done = self.listing.end(now_s, write, Reason.FENCED)
        self._advance(now_s)
        return done

    def take_declined(self) -> list[CommitsDone]:
        """Return commits that ended since the last call because the fence came before their write."""
        return self.listing.take_declined()

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
        self._end_held(held, now_s)
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
            self._end_held(expired, now_s)
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

    def counts(self, *, by_segment: bool = True) -> ShardCounts:
        """Return what the shard holds and has done; without what takes a look at each segment, unless
        *by_segment*.
        """
        return counts_of(self, by_segment=by_segment)

    def _keep_quiet(self, segments: NDArray[np.intp], since_s: float) -> None:
        """Use segments no more until writes that ended nowhere known by then can't land any more."""
        for number in distinct(segments).tolist():
            segment = self.ring.segments[number]
            segment.quiet_at_s = max(segment.quiet_at_s, since_s + self.settings.late_write_s)

    def _end_held(self, slots: NDArray[np.intp], now_s: float) -> None:
        held = np.bincount(self.reservations.segments[slots])
        for number in np.flatnonzero(held).tolist():
            self.ring.segments[number].held -= int(held[number])
            self.ring.segments[number].touched_s = now_s
        self.reservations.end(slots)

    def _advance(self, now_s: float) -> None:
        """Free what has drained, evict and open ahead of need."""
        ring = self.ring
        ring.end_draining(now_s, self.pins.on_segment)
        self._told_s = now_s
        if self.is_recovering or not self.is_writable:
            return
        if self.grants.has_ended(now_s):
            self.listing.decline_queued(now_s)
        self.eviction.advance(now_s)
        self.listing.open_next(now_s)
