"""Owned shard: pure core, drive, and the tasks between both.

After a crash of summary writes, a bug, the shard declines puts and reports as failing, until begun anew.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.settings import OwnerSettings, ScrubSettings
from ostraca_dpu_agent.shards.core import (
    Allocations,
    ReinsertionBatch,
    ShardCore,
    ShardSettings,
    may_get_space,
)
from ostraca_dpu_agent.shards.group_commit import GroupCommit
from ostraca_dpu_agent.shards.reinsertion import Reinserter
from ostraca_dpu_agent.shards.scrub import DamageChecker, ShardScrubber
from ostraca_dpu_agent.shards.scrub_plan import ScrubProgress
from ostraca_fabric.flash.recovery import RecoveredAreas
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.chain import DEPTH_UNKNOWN
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.runtime.tasks import Tasks, completed, set_within
from ostraca_fabric.telemetry.explain import EventKind
from ostraca_fabric.telemetry.requests import EventRing
from ostraca_fabric.wire.codec import Outcomes, Rows
from ostraca_fabric.wire.messages import Damage

log = logging.getLogger(__name__)

_EXPIRY_INTERVAL_S = 0.5

_QUIESCE_CHECK_S = 0.01

_NO_SPACE = int(Reason.NO_SPACE)  # numpy takes three times as long with an enum's member

_MAY_GET_SPACE = np.isin(np.arange(256), (Reason.NO_SPACE, Reason.INDEX_FULL))


def core_of(superblock: Superblock, settings: OwnerSettings, *, earlier_pins_end_s: float = 0.0) -> ShardCore:
    """Build the core of a shard before recovery; takes tens of milliseconds for a large shard.

    Readers may hold pins of an earlier owner until *earlier_pins_end_s*.
    """
    return ShardCore(
        superblock,
        earlier_pins_end_s=earlier_pins_end_s,
        settings=ShardSettings(
            blocks_max=settings.blocks_per_shard_max,
            free_segments=settings.free_segments,
            reinsertion_share=settings.reinsertion_share,
            pin_max_s=settings.pin_max_s,
            hold_max_s=settings.hold_s,
            late_write_s=settings.late_write_s,
            endurance=settings.endurance,
        ),
    )


class OwnedShard:
    """Shard under one owner epoch. Lives on the event loop's thread; ``close`` ends it."""

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
        """Serve what *core*, from ``core_of``, knows: recovery has not ended.

        *on_damage* receives the offset on the drive of each block found damaged.
        """
        self.record = record
        self._drive = drive
        self._clock = clock
        self._events = events
        self._on_damage = on_damage
        self._settings = settings
        self.core = core
        self._is_failing = False
        self.has_crashed = False
        """Whether a vital task has crashed: the shard must be begun anew."""

        self.scrub: ScrubProgress | None = None
        """Progress of the scrub; None without one."""

        self.grant_due = asyncio.Event()
        """Set while another grant is wanted: record ``wanted_grant``, then call ``apply_grant``. Set for good
        after ``close``."""

        self.on_doubt: Callable[[], None] | None = None
        """Called when a higher epoch than this owner's is named: ask the store, and ``confirm``."""

        self._grant_checked_at = 0
        self._is_quiescing = False
        self._volumes_quiet_at_s = -math.inf
        self._begun = asyncio.Event()
        self._reinsertion_due = asyncio.Event()
        self._closed = asyncio.Event()
        self._closing: asyncio.Task[bool] | None = None
        self._commits = GroupCommit(
            core,
            record,
            drive,
            clock,
            settings,
            reservations_max=core.settings.reservations_max,
            on_end=self.wake,
        )
        self._reinserter = Reinserter(
            self, record, drive, core.superblock, clock, hold_max_s=core.settings.hold_max_s
        )
        self._damage = DamageChecker(self, record, drive, events)
        self._tasks = Tasks(f"shard {record.id}")
        for work in (self._write_summaries(), self._expire(), self._reinsert()):
            self.spawn(work, is_vital=True)

    # ------------------------------------------------------------------------------------------- lifecycle

    @property
    def epoch(self) -> OwnerEpoch:
        """Owner epoch; 0 during recovery."""
        return self.core.epoch

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed.is_set()

    @property
    def is_failing(self) -> bool:
        """Whether a write of summaries or volume records has failed."""
        return self._is_failing or self._commits.has_failed

    @property
    def is_stranded(self) -> bool:
        """Whether this owner never writes again: it has a successor, or a vital task has crashed."""
        return self.core.grants.is_fenced or self.has_crashed

    @property
    def is_exclusive(self) -> bool:
        """Whether no other owner can have written to the shard until now, even after a long stop."""
        return self.core.grants.may_write(self._clock())

    def spawn(self, work: Coroutine[Any, Any, None], *, is_vital: bool = False) -> None:
        """Run *work* in the background; ``close`` waits for its end.

        The shard must be begun anew after the crash of a task that *is_vital*.
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
        """End recovery, as ``ShardCore.begin``. Then ``confirm``, and serve ``grant_due``."""
        self.core.begin(self._clock(), epoch=epoch, withheld=withheld, resumed=resumed)
        self._begun.set()
        self.wake()
        self._check_grant()

    def begin_scrub(
        self, settings: ScrubSettings, *, is_suspended: Callable[[], bool] = lambda: False
    ) -> None:
        """Scrub the shard in the background until it is closed, unless settings turn the scrub off."""
        if settings.bytes_s:
            core = self.core
            scrubber = ShardScrubber(
                self,
                self.record,
                core.superblock,
                core.ring,
                core.index,
                self._drive,
                self._clock,
                settings,
                is_suspended=is_suspended,
            )
            self.scrub = scrubber.progress
            self.spawn(scrubber.run())

    async def closed_within(self, seconds: float) -> None:
        """Wait, or until ``close`` is called."""
        await set_within(self._closed, seconds)

    async def quiesce(self, *, within_s: float) -> bool:
        """Reserve no more space, and wait for the end of all reservations; return whether they ended."""
        self._is_quiescing = True
        until_s = self._clock() + within_s
        while len(self.core.reservations) and self._clock() < until_s and not self.is_closed:
            await self.closed_within(_QUIESCE_CHECK_S)
        return not len(self.core.reservations)

    async def close(self, *, within_s: float) -> bool:
        """Write all commits so far, then stop; return whether every I/O has ended by *within_s*.

        An I/O under way goes on, and its memory stays mapped. After a crash of the writer the end is unknown,
        so the result is False. A repeated call returns the same.
        """
        if self._closing is None:
            for event in (self._closed, self.grant_due, self._reinsertion_due):
                event.set()
            self._commits.close()
            self._closing = asyncio.ensure_future(self._end(within_s))
        return await asyncio.shield(self._closing)

    async def _end(self, within_s: float) -> bool:
        has_ended = await self._tasks.finish(within_s=within_s) and self.core.is_writable
        self._commits.pages.end(is_quiet=has_ended)
        return has_ended

    def idle_check(self) -> Callable[[], bool]:
        """Return a function for use after ``close``: True once nothing is under way any more.

        After a crash of the writer only an idle drive tells. The function does not keep the index alive.
        """
        tasks, drive, core = self._tasks, self._drive, self.core
        if self.has_crashed and not core.is_writable:
            return lambda: not (len(tasks) or drive.queued)
        return lambda: not len(tasks) and core.is_writable

    # ------------------------------------------------------------------------------------------- ownership

    def share_out(self, shares: Mapping[int, float]) -> None:
        """Set each pool's share of the shard, as ``ShardCore.share_out``."""
        self.core.share_out(shares)
        self.wake()
        self._check_grant()

    def confirm(self, until_s: float, *, asked_s: float = math.inf) -> None:
        """Write until *until_s*, as ``ShardCore.confirm``."""
        self.core.confirm(until_s, asked_s=asked_s)
        self.core.expire(self._clock())
        self.wake()

    def fence(self) -> None:
        """Stop all writes, as another owner has a higher epoch; lookups go on."""
        self.core.fence(self._clock())
        self.wake()

    def wanted_grant(self) -> tuple[int, ...] | None:
        """Return the segments to record as this epoch's grant, when ``grant_due`` is set."""
        return self.core.wanted_grant(self._clock())

    def apply_grant(self, segments: Iterable[int]) -> None:
        """Use a recorded grant in place of the one before."""
        self.core.apply_grant(self._clock(), segments)
        self.grant_due.clear()
        self.wake()
        self._check_grant()

    def _check_grant(self) -> None:
        """Set ``grant_due`` if more is wanted: whenever a segment was opened, and at intervals."""
        self._grant_checked_at = self.core.ring.generations_made
        if self.wanted_grant() is not None:
            self.grant_due.set()

    @property
    def withheld(self) -> frozenset[int]:
        """Segments under unretired grants of earlier epochs."""
        return self.core.grants.withheld

    def adopt(self, areas: RecoveredAreas) -> int:
        """Take in summaries of withheld segments, read again; return the number of new blocks."""
        new = self.core.adopt(self._clock(), areas)
        self.wake()
        return new

    def retire(self, segments: Iterable[int]) -> None:
        """Use segments of a retired grant like all others, after the last ``adopt``."""
        self.core.retire(self._clock(), segments)
        self.wake()
        self._check_grant()

    def segments_in_doubt(self) -> tuple[int, ...]:
        """Return the granted segments that a write may still reach after ``close``.

        If only a write of volume records is in doubt, a single segment stands for the write: no grant covers
        the records.
        """
        segments = self.core.grants.in_doubt(self._clock())
        if self.is_volume_write_in_doubt and not segments:
            return tuple(sorted(self.core.grants.segments))[:1]
        return segments

    @property
    def may_write_volumes(self) -> bool:
        """Whether this owner may write volume records now; check right before submission."""
        grants = self.core.grants
        return bool(grants.segments) and grants.may_write(self._clock())

    def note_failure(self) -> None:
        """Report the shard as failing."""
        self._is_failing = True

    def expect_late_volume_write(self) -> None:
        """Note the failure of a write of volume records: it may land within ``late_write_s``."""
        self._volumes_quiet_at_s = self._clock() + self._settings.late_write_s

    @property
    def is_volume_write_in_doubt(self) -> bool:
        """Whether a failed write of volume records may still land."""
        return self._clock() < self._volumes_quiet_at_s

    # -------------------------------------------------------------------------------------- space, commits

    def reserve(
        self,
        keys: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
        *,
        hold_s: float,
        within_s: float,
        depths: NDArray[np.uint32] | None = None,
        ttl_s: float = math.inf,
        pool: int = 0,
        is_again: bool = False,
    ) -> asyncio.Future[Allocations]:
        """Reserve space, as ``ShardCore.reserve``; usually the future is done.

        Waits at most *within_s*: for the end of a recovery and for checks of reported blocks, though not for
        long, then for a segment that is being opened.
        """
        until_s = self._clock() + min(within_s, self._settings.hold_s)
        if depths is None:
            depths = np.full(len(keys), DEPTH_UNKNOWN, np.uint32)

        def take(rows: Rows) -> Allocations:
            return self.core.reserve(
                self._clock(),
                keys[rows],
                lengths[rows],
                hold_s=hold_s,
                depths=depths[rows],
                ttl_s=ttl_s,
                pool=pool,
                is_again=is_again,
            )

        if self.core.is_recovering or self._damage.checks:
            return asyncio.ensure_future(self._reserve_later(keys, take, until_s))
        return self._reserve(keys, take, until_s)

    async def _reserve_later(
        self, keys: NDArray[np.uint8], take: Callable[[Rows], Allocations], until_s: float
    ) -> Allocations:
        """Reserve space when the index is known."""
        if self.core.is_recovering:
            await set_within(self._begun, min(until_s - self._clock(), self._settings.recovery_wait_s))
        await self._damage.wait(keys, min(until_s - self._clock(), self._settings.recovery_wait_s))
        return await self._reserve(keys, take, until_s)

    def _reserve(
        self, keys: NDArray[np.uint8], take: Callable[[Rows], Allocations], until_s: float
    ) -> asyncio.Future[Allocations]:
        if self._is_quiescing:
            return completed(self.decline(keys, Reason.NO_OWNER))
        if self._drive.refuses_writes:
            return completed(self.decline(keys, Reason.DRIVE_SUSPECT))
        allocations = take(slice(None))
        self.wake()
        if self.core.ring.opening is None or not _MAY_GET_SPACE[allocations.reasons].any():
            return completed(allocations)
        return asyncio.ensure_future(self._retry(allocations, take, until_s))

    def decline(self, keys: NDArray[np.uint8], reason: Reason) -> Allocations:
        """Reserve nothing: existing blocks EXIST, and the others are declined for *reason*."""
        return Allocations.none(self.core.index.find(keys) >= 0, reason)

    def with_busy(self, allocations: Allocations, *, within_s: float) -> Allocations:
        """Replace NO_SPACE by BUSY if space may come within *within_s*.

        The caller waits then, not this owner: held-back answers would fill up the caller's connection.
        """
        lacks = allocations.reasons == _NO_SPACE
        core, now_s = self.core, self._clock()
        if lacks.any() and may_get_space(core.ring, core.grants, now_s, within_s=within_s):
            return replace(allocations, reasons=np.where(lacks, np.uint8(Reason.BUSY), allocations.reasons))
        return allocations

    async def _retry(
        self, allocations: Allocations, take: Callable[[Rows], Allocations], until_s: float
    ) -> Allocations:
        """Retry rows without space after the opening of a segment, which was under way at the call.

        Ends without a retry once the shard quiesces, as it may have been found quiet already.
        """
        short, is_opening = np.flatnonzero(_MAY_GET_SPACE[allocations.reasons]), True
        while len(short) and is_opening:
            wait_s = min(until_s - self._clock(), self._settings.opening_wait_s)
            if self.core.ring.opening is not None and not await self._commits.ended_within(wait_s):
                break
            if self._is_quiescing:
                allocations.reasons[short] = Reason.NO_OWNER
                break
            more = take(short)
            self.wake()
            allocations.states[short], allocations.reasons[short] = more.states, more.reasons
            allocations.reservations[short], allocations.offsets[short] = more.reservations, more.offsets
            short = np.flatnonzero(_MAY_GET_SPACE[allocations.reasons])
            is_opening = self.core.ring.opening is not None
        return allocations

    async def commit(
        self,
        reservations: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        seeds: NDArray[np.uint64],
        *,
        epoch: OwnerEpoch,
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """List blocks; return (states, reasons) at the end of their summary write."""
        if self._closed.is_set():
            declined = Outcomes.filled(len(reservations), PutState.DECLINED, Reason.NO_OWNER)
            return declined.states, declined.reasons
        was_doubted = self.core.grants.is_doubted
        answer = self.core.commit(self._clock(), reservations, tags, seeds, epoch=epoch)
        if self.core.grants.is_doubted and not was_doubted and self.on_doubt is not None:
            self.on_doubt()
        ticket = self._commits.issue(reservations, answer)
        self.wake()
        await ticket.done
        return ticket.states, ticket.reasons

    def release(self, pins: Sequence[int], reservations: NDArray[np.uint64], *, may_land: bool) -> None:
        """End pins and reservations early, as ``ShardCore.release``."""
        if self.core.release(self._clock(), pins, reservations, may_land=may_land):
            self.wake()

    def keys_of(self, reservations: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Return the keys of reservations, shape (n, 16); zeros for unknown ones."""
        table = self.core.reservations
        slots = table.slots_of(reservations)
        keys: NDArray[np.uint8] = np.where(slots[:, None] >= 0, table.keys[slots], np.uint8(0))
        return keys

    def wake(self) -> None:
        """Act on changes by a call of the core: writes due, evictions, ended commits."""
        core = self.core
        for keys in core.catalog.take_evicted():
            self._events.record(EventKind.EVICTED, keys, label="")
        if core.reinsertion.is_due:
            self._reinsertion_due.set()
        for results in core.commits.take_declined():
            self._commits.answer(results)
        self._commits.begin_due()
        if core.ring.generations_made != self._grant_checked_at:  # a small ring needs the next one at once
            self._check_grant()

    async def _write_summaries(self) -> None:
        try:
            await self._commits.run()
            self.core.expire(self._clock())  # commits overtaken by the fence are answered as well
            self.wake()
        except Exception:
            self._is_failing = True
            self.core.end_writing()
            self._commits.fail()
            log.error("shard %s stops writing, and must be begun anew", self.record.id)  # noqa: TRY400 (Tasks logs the crash)
            raise

    async def _expire(self) -> None:
        while not self.is_closed:
            self.core.expire(self._clock())
            self.wake()
            self._check_grant()
            await self.closed_within(_EXPIRY_INTERVAL_S)

    # --------------------------------------------------------------------------------- reinsertion, damage

    async def _reinsert(self) -> None:
        """Copy the batches that the core chooses."""
        while not self.is_closed:
            await self._reinsertion_due.wait()
            self._reinsertion_due.clear()
            batch = self.core.reinsertion.take()
            if batch is not None:
                try:
                    await self._reinserter.copy(batch)
                finally:
                    self.core.end_reinsertion(self._clock())
                    self.wake()

    def is_current(self, batch: ReinsertionBatch) -> bool:
        """Return whether a batch's segment is still there, and the shard open."""
        return not self.is_closed and self.core.reinsertion.is_current(batch)

    async def reserve_copies(
        self, keys: NDArray[np.uint8], lengths: NDArray[np.uint32], *, hold_s: float
    ) -> Allocations:
        """Reserve space for reinsertion, as far as there is any."""
        if self._drive.refuses_writes or self._is_quiescing:
            return Allocations.none(np.zeros(len(keys), np.bool_), Reason.DRIVE_SUSPECT)

        return await self._reserve(
            keys,
            lambda rows: self.core.reserve_copies(self._clock(), keys[rows], lengths[rows], hold_s=hold_s),
            self._clock() + hold_s,
        )

    def check_damage(self, report: Damage) -> None:
        """Read a reported block again, and drop it if damaged."""
        self._damage.check(report)

    def is_listed(self, report: Damage) -> bool:
        """Return whether the index lists exactly the reported extent."""
        index, key = self.core.index, report.key
        return self.core.is_current(
            key, offset=report.offset, generation=report.generation, tag=report.tag
        ) and report.length == int(index.lengths(index.find(np.frombuffer(key, np.uint8).reshape(1, -1)))[0])

    def drop(self, report: Damage) -> bool:
        """Remove a damaged block from the index; return whether it was still listed."""
        return self.core.drop(report.key, offset=report.offset, generation=report.generation, tag=report.tag)

    def count_damage(self, offset: int) -> None:
        """Report damage at this offset in the shard, unless a successor may have written there."""
        if self._on_damage is not None and self.is_exclusive:
            self._on_damage(self.record.offset + offset)
