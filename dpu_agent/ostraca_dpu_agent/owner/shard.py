"""One owned shard: the pure core, its drive, and the group commit between them.

A commit waits for others, a few milliseconds and no longer than anybody holds space that could be committed;
then all of them go to flash in one summary write, and each is answered when that write has ended. Nothing is
gettable before. Should writing summaries crash, which is a
bug, the shard declines puts from then on, says that it is failing, and goes on serving gets.
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
from ostraca_dpu_agent.owner.tickets import Tickets
from ostraca_fabric.chain import DEPTH_UNKNOWN
from ostraca_fabric.explain import EventKind
from ostraca_fabric.extent import rounded_up
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.outcome import PutState, Reason
from ostraca_fabric.ports.drive import Pieces
from ostraca_fabric.tags import matches
from ostraca_fabric.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from numpy.typing import NDArray

    from ostraca_dpu_agent.events import EventRing
    from ostraca_dpu_agent.owner.core import SummaryWrite
    from ostraca_dpu_agent.settings import OwnerSettings
    from ostraca_fabric.fabric_map import ShardRecord
    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.ids import OwnerEpoch
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.wire.messages import Damage

log = logging.getLogger(__name__)

_EXPIRE_EVERY_S = 0.5

RECOVERY_WAIT_S = 0.25
"""How long a put waits for a recovery to end. Its blocks are held in staging memory meanwhile, which puts to
other shards want too; small shards are recovered sooner."""

OPENING_WAIT_S = 0.25
"""How long a put waits for a segment that is being opened: a write of one page. Blocks that go to other
drives wait with it, so a drive that hangs must not be waited for."""

_MAY_BECOME_FREE = (Reason.NO_SPACE, Reason.INDEX_FULL)

_SUSPECTS_MAX = 64
"""Damaged blocks read again at once; further reports are ignored, and come again with the next read."""


def core_of(superblock: Superblock, settings: OwnerSettings) -> ShardCore:
    """Make the core of a shard that is to be recovered; for a large one a thing of some tens of ms."""
    return ShardCore(
        superblock,
        settings=ShardSettings(
            blocks_max=settings.blocks_per_shard_max,
            free_segments=settings.free_segments,
            carry_share=settings.carry_share,
            pin_max_s=settings.pin_max_s,
            hold_max_s=settings.hold_s,
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
        self._group_commit_s = settings.group_commit_s
        self._hold_max_s = settings.hold_s
        self.core = core
        self.passing = Passing(core)
        self.is_failing = False
        self.scrub: Scrub | None = None
        """How far its scrub is; None where there is none."""
        self._suspects: set[bytes] = set()
        self._tickets = Tickets(self.core.settings.reservations_max)
        self._commits_due = asyncio.Event()
        self._has_all_commits = asyncio.Event()
        self._written = asyncio.Event()
        self._begun = asyncio.Event()
        self._carry_due = asyncio.Event()
        self._closed = asyncio.Event()
        self._pages = HugeMemory(1 << 20, prefault=False)
        self._carrier = Carrier(self, drive, clock)
        self._tasks = Tasks(f"shard {record.id}")
        self._tasks.spawn(self._write_summaries())
        self._tasks.spawn(self._expire())
        self._tasks.spawn(self._carry())

    @property
    def epoch(self) -> OwnerEpoch:
        """The owner epoch; 0 while recovering."""
        return self.core.epoch

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed.is_set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside on the shard's drive; ``close`` waits for its end."""
        self._tasks.spawn(work)

    def begin(self, epoch: OwnerEpoch) -> None:
        """End recovery; the first summary writes start at once."""
        self.core.begin(self._clock(), epoch=epoch)
        self._begun.set()
        self.wake()

    async def reserve(
        self,
        keys: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
        *,
        hold_s: float,
        within_s: float,
        depths: NDArray[np.uint32] | None = None,
        ttl_s: float = math.inf,
    ) -> Reservations:
        """Hand out space; waits for a segment that is just being opened, at most *within_s*, before that for
        the end of a recovery, but not for long, and for nothing else.
        """
        until_s = self._clock() + min(within_s, self._hold_max_s)
        if self.core.is_recovering:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._begun.wait(), min(until_s - self._clock(), RECOVERY_WAIT_S))
        if self._drive.refuses_writes:
            return Reservations.none(self.core.index.find(keys) >= 0, Reason.DRIVE_SUSPECT)
        if depths is None:
            depths = np.full(len(keys), DEPTH_UNKNOWN, np.uint32)
        core = self.core

        def reserve(rows: NDArray[np.intp]) -> Reservations:
            return core.reserve(
                self._clock(), keys[rows], lengths[rows], hold_s=hold_s, depths=depths[rows], ttl_s=ttl_s
            )

        return await self._placed(reserve, len(keys), until_s)

    async def reserve_carried(
        self, keys: NDArray[np.uint8], lengths: NDArray[np.uint32], *, hold_s: float
    ) -> Reservations:
        """Hand out space for copies of blocks that are carried forward, as far as there is any."""
        if self._drive.refuses_writes:
            return Reservations.none(np.zeros(len(keys), np.bool_), Reason.DRIVE_SUSPECT)

        def reserve(rows: NDArray[np.intp]) -> Reservations:
            return self.core.reserve_carried(self._clock(), keys[rows], lengths[rows], hold_s=hold_s)

        return await self._placed(reserve, len(keys), self._clock() + hold_s)

    async def _placed(
        self, reserve: Callable[[NDArray[np.intp]], Reservations], count: int, until_s: float
    ) -> Reservations:
        """Have space handed out; again for those that find none, while a segment is being opened."""
        made = reserve(np.arange(count))
        self.wake()
        short = np.flatnonzero(np.isin(made.reasons, _MAY_BECOME_FREE))
        while len(short) and self.core.ring.opening is not None:
            written = self._written
            try:
                await asyncio.wait_for(written.wait(), min(until_s - self._clock(), OPENING_WAIT_S))
            except TimeoutError:
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
        answer = self.core.commit(self._clock(), reservations, tags, seeds, epoch=epoch)
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
        is_current = self.core.is_current(
            report.key, offset=report.offset, generation=report.generation, tag=report.tag
        )
        if not is_current or report.key in self._suspects or len(self._suspects) >= _SUSPECTS_MAX:
            return
        row = self.core.index.find(np.frombuffer(report.key, np.uint8).reshape(1, -1))
        if int(self.core.index.lengths(row)[0]) == report.length:
            self._suspects.add(report.key)
            self._tasks.spawn(self._read_again(report))

    def count_damage(self, offset: int) -> None:
        """Tell of damage found at this place of the shard."""
        if self._on_damage is not None:
            self._on_damage(self.record.offset + offset)

    async def closed_within(self, seconds: float) -> None:
        """Wait for so long, or until ``close`` is called."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)

    def wake(self) -> None:
        """Look for writes that have become due after a call of the core, and for what it evicted."""
        for keys in self.core.eviction.take_evicted():
            self._events.record(EventKind.EVICTED, keys, label="")
        if self.core.eviction.has_carry_due:
            self._carry_due.set()
        if self.core.has_writes_due:
            self._commits_due.set()
            if not self.core.may_get_commits:
                self._has_all_commits.set()

    async def close(self, *, within_s: float) -> bool:
        """Write what has been committed so far, then stop; say whether every I/O has ended by *within_s*.

        What has not goes on, and its memory stays mapped. Where writing has crashed, nobody knows.
        """
        self._closed.set()
        self._commits_due.set()
        self._has_all_commits.set()
        self._carry_due.set()
        has_ended = await self._tasks.finish(within_s=within_s) and self.core.is_writable
        if has_ended:
            self._pages.close()
        else:
            self._pages.leak()
        return has_ended

    async def _read_again(self, report: Damage) -> None:
        try:
            is_damaged = await self._is_damaged(report)
        finally:
            self._suspects.discard(report.key)
        if is_damaged and self.core.drop(
            report.key, offset=report.offset, generation=report.generation, tag=report.tag
        ):
            self._events.record(EventKind.DROPPED, np.frombuffer(report.key, np.uint8).reshape(1, -1))
            log.warning("shard %s dropped a damaged block of %d bytes", self.record.id, report.length)
            self.count_damage(report.offset)

    async def _is_damaged(self, report: Damage) -> bool:
        memory = HugeMemory(rounded_up(report.length), prefault=False)
        try:
            block = memory.array[: rounded_up(report.length)]
            where = Pieces.one(block, drive_offset=self.record.offset + report.offset)
            (is_read,) = await self._drive.submit_read(where)
            return bool(is_read) and not matches(block[: report.length].data, report.seed, report.tag)
        finally:
            memory.close()

    async def _write_summaries(self) -> None:
        try:
            await self._write_until_closed()
        except Exception:
            self.is_failing = True
            self.core.end_writing()
            self._tickets.decline_all(Reason.DRIVE_ERROR)
            self._say_written()
            log.error("shard %s writes no more: it declines puts and serves gets", self.record.id)  # noqa: TRY400 (Tasks logs the crash)
            raise

    async def _write_until_closed(self) -> None:
        while True:
            await self._commits_due.wait()
            self._commits_due.clear()
            await self._gather()
            while self.core.has_writes_due:
                await self._write(self.core.writes_due())
            if self._closed.is_set():
                return

    async def _gather(self) -> None:
        """Wait for commits that may share the next write, as long as there may be any."""
        self._has_all_commits.clear()
        if self.core.may_get_commits and not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._group_commit_s):
                    await self._has_all_commits.wait()

    async def _write(self, writes: list[SummaryWrite]) -> None:
        is_ok = [await self._flushed()] * len(writes)
        pieces = [(number, *piece) for number, write in enumerate(writes) for piece in write.pieces]
        for batch in _batches(pieces, len(self._pages.view)):
            lengths = np.array([len(pages) for _, _, pages in batch], np.uint32)
            places = np.cumsum(lengths, dtype=np.int64) - lengths
            offsets = np.array([self.record.offset + offset for _, offset, _ in batch], np.int64)
            for (_, _, pages), at in zip(batch, places.tolist(), strict=True):
                self._pages.view[at : at + len(pages)] = pages
            ends = await self._drive.submit_write(Pieces(self._pages.array, places, offsets, lengths))
            for (number, _, _), end in zip(batch, ends.tolist(), strict=True):
                is_ok[number] &= end
        if not await self._flushed():
            is_ok = [False] * len(writes)
        for write, good in zip(writes, is_ok, strict=True):
            self._answer(write, is_ok=good)

    async def _flushed(self) -> bool:
        """Make what was written before durable, where the drive's cache would lose it."""
        return not self._drive.has_volatile_cache or await self._drive.submit_flush()

    def _answer(self, write: SummaryWrite, *, is_ok: bool) -> None:
        if not is_ok:
            self.is_failing = True
            log.warning("shard %s could not write its summary; the blocks in it are declined", self.record.id)
        self._tickets.answer(self.core.written(self._clock(), write, is_ok=is_ok))
        self._say_written()

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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), _EXPIRE_EVERY_S)


def _batches(pieces: list[tuple[int, int, bytes]], room: int) -> Iterator[list[tuple[int, int, bytes]]]:
    """Cut (write, offset, pages) into batches of at most *room* bytes, splitting what is longer."""
    batch: list[tuple[int, int, bytes]] = []
    used = 0
    for write, offset, pages in pieces:
        for start in range(0, len(pages), room):
            part = pages[start : start + room]
            if used + len(part) > room:
                yield batch
                batch, used = [], 0
            batch.append((write, offset + start, part))
            used += len(part)
    if batch:
        yield batch
