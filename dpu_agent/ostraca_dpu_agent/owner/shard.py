"""One owned shard: the pure core, its drive, and the group commit between them.

A commit waits for others, a few milliseconds and no longer than anybody holds space that could be committed;
then all of them go to flash in one summary write, and each is answered when that write has ended. Nothing is
gettable before. Should writing summaries crash, which is a bug, the shard declines puts from then on and says
that it is failing, until it is begun anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ostraca_dpu_agent.owner.carrying import Carrier
from ostraca_dpu_agent.owner.core import Passing, Reservations, Scrub, ShardCore, ShardSettings
from ostraca_dpu_agent.owner.suspects import Suspects
from ostraca_dpu_agent.owner.tickets import Tickets
from ostraca_dpu_agent.owner.writing import SummaryWriter
from ostraca_fabric.chain import DEPTH_UNKNOWN
from ostraca_fabric.explain import EventKind
from ostraca_fabric.outcome import PutState, Reason
from ostraca_fabric.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from numpy.typing import NDArray

    from ostraca_dpu_agent.events import EventRing
    from ostraca_dpu_agent.owner.core import CommitsDone
    from ostraca_dpu_agent.settings import OwnerSettings
    from ostraca_fabric.fabric_map import ShardRecord
    from ostraca_fabric.flash.recovery import RecoveredAreas
    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.ids import OwnerEpoch
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.wire.messages import Damage

log = logging.getLogger(__name__)

_EXPIRE_EVERY_S = 0.5

_LOOK_FOR_STILLNESS_S = 0.01

_MAY_BECOME_FREE = (Reason.NO_SPACE, Reason.INDEX_FULL)


def core_of(superblock: Superblock, settings: OwnerSettings, *, earlier_pins_end_s: float = 0.0) -> ShardCore:
    """Make the core of a shard that is to be recovered; for a large one a thing of some tens of ms.

    Readers may hold pins of an earlier owner until *earlier_pins_end_s*.
    """
    return ShardCore(
        superblock,
        earlier_pins_end_s=earlier_pins_end_s,
        settings=ShardSettings(
            blocks_max=settings.blocks_per_shard_max,
            free_segments=settings.free_segments,
            carry_share=settings.carry_share,
            pin_max_s=settings.pin_max_s,
            hold_max_s=settings.hold_s,
            late_write_s=settings.late_write_s,
            endurance=settings.endurance,
        ),
    )


class OwnedShard:
    """A shard under one owner epoch. Lives on the event loop's thread; ``close`` ends it."""

    def __init__(
        self,
        record: ShardRecord,
        drive: Drive,
        core: ShardCore,
        *,
        settings: OwnerSettings,
        clock: Callable[[], float],
        events: EventRing,
        on_damage: Callable[[int], None] | None = None,
    ) -> None:
        """Answer for what *core* knows, which is recovering: see ``core_of``.

        *on_damage* is told of each block found damaged, by where on the drive it begins.
        """
        self.record = record
        self._drive = drive
        self._clock = clock
        self._events = events
        self._on_damage = on_damage
        self._settings = settings
        self.core = core
        self.passing = Passing(core)
        self.is_failing = False
        self.has_crashed = False
        """Whether a part has crashed that this can't go on without: it is to be begun anew."""

        self.scrub: Scrub | None = None
        """How far its scrub is; None where there is none."""

        self.grant_due = asyncio.Event()
        """Set while another grant is wanted: have ``grant_wanted`` recorded, and say so with ``granted``. Set
        for good when the shard is closed."""

        self._asked_at = 0
        self._is_stilling = False
        self._outside_quiet_at_s = -math.inf

        self._tickets = Tickets(self.core.settings.reservations_max)
        self._commits_due = asyncio.Event()
        self._written = asyncio.Event()
        self._begun = asyncio.Event()
        self._carry_due = asyncio.Event()
        self.when_doubted: Callable[[], None] = _let_be
        """Called when somebody names a higher epoch than this owner's: ask the store, and ``confirm``."""
        self._closed = asyncio.Event()
        self._closing: asyncio.Task[bool] | None = None
        self._writer = SummaryWriter(self, drive, clock, settings)
        self._carrier = Carrier(self, drive, clock)
        self._suspects = Suspects(self, drive, events)
        self._tasks = Tasks(f"shard {record.id}")
        self.spawn(self._write_summaries(), is_vital=True)
        self.spawn(self._expire(), is_vital=True)
        self.spawn(self._carry(), is_vital=True)

    @property
    def epoch(self) -> OwnerEpoch:
        """The owner epoch; 0 while recovering."""
        return self.core.epoch

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed.is_set()

    @property
    def is_stranded(self) -> bool:
        """Whether this owner never writes again, or not as it should: another one has come after it, or a
        part of it has crashed.
        """
        return self.core.grants.is_fenced or self.has_crashed

    def left_over(self) -> Callable[[], bool]:
        """Return what says whether nothing is under way any more, once ``close`` was called: what had not
        ended then may have since. Where writing has crashed only the drive knows, when it has nothing to do
        at all; the index is not kept for that.
        """
        tasks, drive, core = self._tasks, self._drive, self.core
        if self.has_crashed and not core.is_writable:
            return lambda: not (len(tasks) or drive.queued)
        return lambda: not len(tasks) and core.is_writable

    @property
    def may_write(self) -> bool:
        """Whether this owner may write now what lies in no segment; ask right before it is submitted."""
        grants = self.core.grants
        return bool(grants.own) and grants.may_write(self._clock())

    def doubt_outside(self) -> None:
        """Hear that a write of what lies in no segment has failed: it may land within ``late_write_s``."""
        self._outside_quiet_at_s = self._clock() + self._settings.late_write_s

    @property
    def is_outside_in_doubt(self) -> bool:
        """Whether such a write may land yet."""
        return self._clock() < self._outside_quiet_at_s

    def spawn(self, work: Coroutine[Any, Any, None], *, is_vital: bool = False) -> None:
        """Do something beside on the shard's drive; ``close`` waits for its end. What *is_vital* this shard
        can't go on without.
        """
        task = self._tasks.spawn(work)
        if is_vital:
            task.add_done_callback(self._vital_ended)

    def _vital_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.has_crashed = True

    def begin(
        self,
        epoch: OwnerEpoch,
        *,
        withheld: frozenset[int] = frozenset(),
        resumed: frozenset[int] = frozenset(),
    ) -> None:
        """End recovery, as ``ShardCore.begin``. Then ``confirm``, and record what ``grant_due`` asks for."""
        self.core.begin(self._clock(), epoch=epoch, withheld=withheld, resumed=resumed)
        self._begun.set()
        self.wake()
        self._ask_for_grant()

    def share_out(self, shares: Mapping[int, float]) -> None:
        """Say which part of the shard each pool may take, as ``ShardCore.share_out``."""
        self.core.share_out(shares)
        self.wake()
        self._ask_for_grant()

    def own_alone(self) -> None:
        """Be granted everything for ever, where no other owner knows of this shard."""
        self.core.own_alone(self._clock())
        self.wake()

    def confirm(self, until_s: float, *, asked_s: float = math.inf) -> None:
        """Write until then: the time before the claim was asked for, and found to stand, plus ``grant_s``;
        *asked_s* is that time.
        """
        self.core.confirm(until_s, asked_s=asked_s)
        self.core.expire(self._clock())
        self.wake()

    def fence(self) -> None:
        """Write nothing any more, for another owner has a higher epoch; go on answering look-ups."""
        self.core.fence(self._clock())
        self.wake()

    def grant_wanted(self) -> tuple[int, ...] | None:
        """Return the segments to have recorded as this epoch's grant, when ``grant_due`` is set."""
        return self.core.grant_wanted(self._clock())

    def granted(self, segments: Iterable[int]) -> None:
        """Take these segments for the grant, as they are recorded in place of those before."""
        self.core.granted(self._clock(), segments)
        self.grant_due.clear()
        self.wake()
        self._ask_for_grant()

    @property
    def withheld(self) -> frozenset[int]:
        """The segments under unretired grants, whose summaries are to be read again and ``adopt``-ed."""
        return self.core.grants.withheld

    def adopt(self, areas: RecoveredAreas) -> int:
        """Know what was read again of withheld segments' summaries; return how many blocks are new."""
        new = self.core.adopt(self._clock(), areas)
        self.wake()
        return new

    def retire(self, segments: Iterable[int]) -> None:
        """Use these segments like any other, once what their summaries said in the end was adopted."""
        self.core.retire(self._clock(), segments)
        self.wake()
        self._ask_for_grant()

    async def stilled(self, *, within_s: float) -> bool:
        """Hand out no more space, and wait until what was handed out has ended; say whether it has."""
        self._is_stilling = True
        until_s = self._clock() + within_s
        while len(self.core.reservations) and self._clock() < until_s and not self.is_closed:
            await self.closed_within(_LOOK_FOR_STILLNESS_S)
        return not len(self.core.reservations)

    def in_doubt(self) -> tuple[int, ...]:
        """Return the granted segments that a write may reach yet, once this is closed and all has ended.

        Where only one of what lies in no segment may, one segment stands for it: that goes with the grant.
        """
        segments = self.core.grants.in_doubt(self._clock())
        if self.is_outside_in_doubt and not segments:
            return tuple(sorted(self.core.grants.own))[:1]
        return segments

    async def reserve(
        self,
        keys: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
        *,
        hold_s: float,
        within_s: float,
        depths: NDArray[np.uint32] | None = None,
        ttl_s: float = math.inf,
        pool: int = 0,
    ) -> Reservations:
        """Hand out space of a pool; waits for a segment that is just being opened, at most *within_s*, before
        that for the end of a recovery, but not for long, and for nothing else.
        """
        until_s = self._clock() + min(within_s, self._settings.hold_s)
        if self.core.is_recovering:
            await _set_within(self._begun, min(until_s - self._clock(), self._settings.recovery_wait_s))
        if self._is_stilling:
            return Reservations.none(self.core.index.find(keys) >= 0, Reason.NO_OWNER)
        if self._drive.refuses_writes:
            return Reservations.none(self.core.index.find(keys) >= 0, Reason.DRIVE_SUSPECT)
        if depths is None:
            depths = np.full(len(keys), DEPTH_UNKNOWN, np.uint32)
        core = self.core

        def reserve(rows: NDArray[np.intp]) -> Reservations:
            now_s, some = self._clock(), (keys[rows], lengths[rows])
            return core.reserve(now_s, *some, hold_s=hold_s, depths=depths[rows], ttl_s=ttl_s, pool=pool)

        return await self._placed(reserve, len(keys), until_s)

    async def reserve_carried(
        self, keys: NDArray[np.uint8], lengths: NDArray[np.uint32], *, hold_s: float
    ) -> Reservations:
        """Hand out space for copies of blocks that are carried forward, as far as there is any."""
        if self._drive.refuses_writes or self._is_stilling:
            return Reservations.none(np.zeros(len(keys), np.bool_), Reason.DRIVE_SUSPECT)

        def reserve(rows: NDArray[np.intp]) -> Reservations:
            return self.core.reserve_carried(self._clock(), keys[rows], lengths[rows], hold_s=hold_s)

        return await self._placed(reserve, len(keys), self._clock() + hold_s)

    async def _placed(
        self, reserve: Callable[[NDArray[np.intp]], Reservations], count: int, until_s: float
    ) -> Reservations:
        """Have space handed out; again for those that find none, while a segment is being opened, unless this
        shard is being stilled by then: it may have been found still.
        """
        made = reserve(np.arange(count))
        self.wake()
        short = np.flatnonzero(np.isin(made.reasons, _MAY_BECOME_FREE))
        while len(short) and self.core.ring.opening is not None:
            waits_s = min(until_s - self._clock(), self._settings.opening_wait_s)
            if not await _set_within(self._written, waits_s):
                break
            if self._is_stilling:
                made.reasons[short] = Reason.NO_OWNER
                break
            more = reserve(short)
            self.wake()
            made.states[short], made.reasons[short] = more.states, more.reasons
            made.reservations[short], made.offsets[short] = more.reservations, more.offsets
            short = np.flatnonzero(np.isin(made.reasons, _MAY_BECOME_FREE))
        return made

    async def commit(
        self,
        reservations: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        seeds: NDArray[np.uint64],
        *,
        epoch: OwnerEpoch,
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """List blocks; returns (states, reasons) once their summary write has ended."""
        if self._closed.is_set():
            declined = np.full(len(reservations), PutState.DECLINED, np.uint8)
            return declined, np.full(len(reservations), Reason.NO_OWNER, np.uint8)
        was_doubted = self.core.grants.is_doubted
        answer = self.core.commit(self._clock(), reservations, tags, seeds, epoch=epoch)
        if self.core.grants.is_doubted and not was_doubted:
            self.when_doubted()
        ticket = self._tickets.issue(reservations, answer)
        self.wake()
        await ticket.done
        return ticket.states, ticket.reasons

    def keys_of(self, reservations: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Return the keys that space is reserved for, shape (n, 16); zeros where a reservation is unknown."""
        table = self.core.reservations
        slots = table.slots_of(reservations)
        keys: NDArray[np.uint8] = np.where(slots[:, None] >= 0, table.keys[slots], np.uint8(0))
        return keys

    def check_damage(self, report: Damage) -> None:
        """Read a block that someone found damaged again, and drop it when it is."""
        self._suspects.check(report)

    @property
    def is_sure(self) -> bool:
        """Whether nobody else can have written here until now: not after a stop that was too long."""
        return self.core.grants.may_write(self._clock())

    def count_damage(self, offset: int) -> None:
        """Tell of damage found at this place of the shard, unless a successor may have written there."""
        if self._on_damage is not None and self.is_sure:
            self._on_damage(self.record.offset + offset)

    async def closed_within(self, seconds: float) -> None:
        """Wait for so long, or until ``close`` is called."""
        await _set_within(self._closed, seconds)

    def wake(self) -> None:
        """Look for writes that have become due after a call of the core, and for what it evicted."""
        for keys in self.core.eviction.take_evicted():
            self._events.record(EventKind.EVICTED, keys, label="")
        if self.core.eviction.has_carry_due:
            self._carry_due.set()
        for done in self.core.take_declined():
            self.answer(done)
        if self.core.has_writes_due:
            self._commits_due.set()
            if not self.core.may_get_commits:
                self._writer.has_all_commits.set()
        if self.core.ring.generations_made != self._asked_at:  # in a small ring the next is needed at once
            self._ask_for_grant()

    def answer(self, done: CommitsDone) -> None:
        """Tell who waits how commits ended."""
        self._tickets.answer(done)
        self._say_written()

    def _ask_for_grant(self) -> None:
        """Look whether more is wanted: whenever a segment was opened, and now and then."""
        self._asked_at = self.core.ring.generations_made
        if self.grant_wanted() is not None:
            self.grant_due.set()

    async def close(self, *, within_s: float) -> bool:
        """Write what has been committed so far, then stop; say whether every I/O has ended by *within_s*.

        What has not goes on, and its memory stays mapped. Where writing has crashed, nobody knows. Called
        again, it says the same.
        """
        if self._closing is None:
            self._closed.set()
            self.grant_due.set()
            self._commits_due.set()
            self._writer.has_all_commits.set()
            self._carry_due.set()
            self._closing = asyncio.ensure_future(self._ended(within_s))
        return await asyncio.shield(self._closing)

    async def _ended(self, within_s: float) -> bool:
        has_ended = await self._tasks.finish(within_s=within_s) and self.core.is_writable
        if has_ended:
            self._writer.pages.close()
        else:
            self._writer.pages.leak()
        return has_ended

    async def _write_summaries(self) -> None:
        try:
            await self._writer.run(self._commits_due)
        except Exception:
            self.is_failing = True
            self.core.end_writing()
            self._tickets.decline_all(Reason.DRIVE_ERROR)
            self._say_written()
            log.error("shard %s writes no more, and is to be begun anew", self.record.id)  # noqa: TRY400 (Tasks logs the crash)
            raise

    def _say_written(self) -> None:
        """Let reservations that wait for space look again."""
        written, self._written = self._written, asyncio.Event()
        written.set()

    async def _carry(self) -> None:
        """Copy forward what eviction says, and let it go on."""
        while not self._closed.is_set():
            await self._carry_due.wait()
            self._carry_due.clear()
            carry = self.core.eviction.take_carry()
            if carry is not None:
                try:
                    await self._carrier.copy(carry)
                finally:
                    self.core.eviction.end_carry(self._clock())
                    self.wake()

    async def _expire(self) -> None:
        while not self._closed.is_set():
            self.core.expire(self._clock())
            self.wake()
            self._ask_for_grant()
            await self.closed_within(_EXPIRE_EVERY_S)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, but no longer than so; say whether it came."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


def _let_be() -> None:
    """Do nothing."""
