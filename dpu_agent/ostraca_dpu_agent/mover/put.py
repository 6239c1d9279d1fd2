"""A put: blocks from the worker's arena to flash.

Owners reserve first, so that a block already there costs nothing more. Blocks for one drive then go in
*groups*, each by itself: lease staging, fetch and check against the SDK's tag wave by wave, write each wave
behind its check, commit all. A put acknowledged as STAGED is answered when everything is past the check; its
groups go on to the commit. The mover never makes a tag: bytes that don't match the SDK's are not stored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.mover.depths import is_too_short
from ostraca_dpu_agent.mover.drive_io import WaveIO
from ostraca_dpu_agent.mover.request import Blocks, all_ended, check_sizes, cut, in_turns, keeper
from ostraca_dpu_agent.mover.space import Space
from ostraca_dpu_agent.mover.staging import NO_ROOM_REASONS, Lease, NoRoom, Purpose
from ostraca_fabric.errors import UsageError
from ostraca_fabric.extent import rounded_up, whole_pages
from ostraca_fabric.outcome import Ack, PutState, Reason
from ostraca_fabric.ports.drive import Pieces
from ostraca_fabric.ports.transport import Direction, TransferEnd, Wave
from ostraca_fabric.tags import are_good, blank_rests
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import PutDone, Settled

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.mover import Mover
    from ostraca_dpu_agent.mover.request import Queue, Worker
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.ids import DriveId
    from ostraca_fabric.wire.messages import Put


_EXISTS_SHARE = 0.25
"""How much of what is left of its time a put waits at most for word of blocks that exist already."""

_OWNER_CANT_SAY = (Reason.RECOVERING, Reason.NO_OWNER)
"""Why a put is declined by who does not know whether the block is there: one who had the shard before may."""


class PutRun:
    """One put. ``run`` answers it; groups go on to flash after that.

    A few *lanes* carry them, one after the other each. When the request is over, groups that no lane has
    begun give their space back.
    """

    def __init__(self, mover: Mover, worker: Worker, volume: ServedVolume, request: Put) -> None:
        """Take the request apart.

        Raises MalformedError when its columns don't fit, UsageError when its sizes can't be, and RefusedError
        when the worker has no arena.
        """
        self._mover = mover
        self._worker = worker
        self._peer = worker.peer
        self._volume = volume
        self._request = request
        self._ack = _ack(request.ack)
        self._blocks = Blocks.of(volume, request.spans, request.lengths)
        check_sizes(volume, self._blocks.lengths, request.slot_bytes)
        count = len(self._blocks)
        self._tags = columns.rows16(request.tags, count)
        self._slots = columns.u64(request.slots, count).astype(np.int64)
        self._slot_bytes = rounded_up(int(self._blocks.lengths.max(initial=1)))
        self._states = columns.filled(count, PutState.LATE)
        self._reasons = columns.filled(count, Reason.DEADLINE)
        self._is_moving = np.zeros(count, np.bool_)
        self._space = Space(
            mover.owners,
            self._blocks,
            self._end,
            clock=mover.clock,
            hold_s=mover.hold_s,
            ttl_s=request.ttl_s,
            pool=volume.pool,
        )
        self._moving: set[Lease] = set()
        self._waiting: list[Queue] = []
        self._unchecked = 0
        self._is_staged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clocked = mover.clocked(request.deadline_s, worker.stopped(request.request))

    async def run(self) -> PutDone:
        """Take the blocks, and answer at the state the caller asked for or at the deadline.

        Whatever raises here, ``Settled`` follows.
        """
        mover = self._mover
        bringing = mover.tasks.spawn(self._bring())
        must_settle = True
        try:
            await self._clocked.wait([self._is_staged if self._ack is Ack.STAGED else bringing])
            if bringing.done():
                bringing.result()
            for _, waiting in self._waiting:
                while waiting:
                    self._space.release(waiting.popleft())
            unsettled = np.flatnonzero(self._is_moving)
            must_settle = len(unsettled) > 0
            for lease in self._moving:
                mover.staging.quarantine(lease)
        finally:
            if must_settle:
                bringing.add_done_callback(self._say_settled)
        states, reasons = self._answered()
        return PutDone(
            self._request.request,
            states.tobytes(),
            reasons.tobytes(),
            unsettled.astype(columns.U32).tobytes(),
        )

    def _answered(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Say what is so now: blocks past the check are STAGED, if that was asked for, else LATE."""
        states, reasons = self._states.copy(), self._reasons.copy()
        if self._ack is Ack.COMMITTED:
            is_staged = states == PutState.STAGED
            states[is_staged], reasons[is_staged] = PutState.LATE, Reason.DEADLINE
        if self._clocked.stopped.done():
            reasons[states == PutState.LATE] = Reason.CANCELLED
        return states, reasons

    async def _bring(self) -> None:
        """Reserve, then carry every group; ends when none touches the arena or flash any more."""
        mover = self._mover
        try:
            reserved = await self._reserve()
            per_group = mover.blocks_per_put(self._slot_bytes)
            self._waiting = [
                (drive, deque(cut(its, per_group))) for drive, its in self._space.by_drive(reserved)
            ]
            self._unchecked = sum(len(waiting) for _, waiting in self._waiting)
            queues = in_turns(self._waiting, lanes=mover.settings.waves_ahead)
            await all_ended([mover.tasks.spawn(self._lane(*queue)) for queue in queues])
        finally:
            committed_bytes = int(self._blocks.lengths[self._states == PutState.COMMITTED].sum())
            mover.ended("put", self._blocks.keys, self._states, self._reasons, committed_bytes)
            self._end_staging()

    def _end_staging(self) -> None:
        if not self._is_staged.done():
            self._is_staged.set_result(None)

    def _say_settled(self, _bringing: asyncio.Task[None]) -> None:
        self._worker.send(Settled(self._request.request))

    async def _reserve(self) -> NDArray[np.intp]:
        """Ask owners for space; returns the positions that got some, others are answered for."""
        mover, within_s = self._mover, self._clocked.left_s
        if within_s <= 0:
            return np.zeros(0, np.intp)
        is_short = is_too_short(self._volume, self._blocks.spans)
        self._end(np.flatnonzero(is_short), PutState.DECLINED, Reason.TOO_SHORT)
        routes, secret = mover.routes(), self._volume.placement_secret
        reserving = self._space.reserve(routes, secret, ~is_short, within_s=within_s)
        if not routes.has_earlier:
            await reserving
            return np.flatnonzero(self._space.is_reserved)
        finding = mover.locator.find_earlier(
            routes,
            self._volume,
            self._blocks.spans,
            self._blocks.keys,
            wanted=~is_short,
            within_s=min(mover.settings.exists_within_s, _EXISTS_SHARE * within_s),
        )
        _, (exists, existed) = await asyncio.gather(reserving, finding)
        exists |= existed & np.isin(self._reasons, _OWNER_CANT_SAY)
        is_reserved = self._space.is_reserved
        self._space.release(np.flatnonzero(is_reserved & exists))
        self._end(np.flatnonzero(exists), PutState.EXISTS, Reason.NONE)
        return np.flatnonzero(is_reserved & ~exists)

    async def _lane(self, drive: DriveId, waiting: deque[NDArray[np.intp]]) -> None:
        while waiting:
            await self._group(drive, waiting.popleft())

    async def _group(self, drive: DriveId, positions: NDArray[np.intp]) -> None:
        is_checked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        is_checked.add_done_callback(self._count_checked)
        try:
            lease = await self._lease(drive, positions)
            if lease is not None:
                await self._carry(drive, positions, lease, is_checked)
        finally:
            if not is_checked.done():
                is_checked.set_result(None)

    def _count_checked(self, _is_checked: asyncio.Future[None]) -> None:
        self._unchecked -= 1
        if not self._unchecked:
            self._end_staging()

    async def _lease(self, drive_id: DriveId, positions: NDArray[np.intp]) -> Lease | None:
        lease: Lease | NoRoom = NoRoom.DEADLINE
        drive = self._mover.drives.get(drive_id)
        if drive is not None and drive.refuses_writes:
            lease = NoRoom.GIVEN_UP
        elif not self._clocked.is_over():
            lease = await self._mover.staging.lease(
                len(positions),
                self._slot_bytes,
                Purpose.PUT,
                holder=self._worker,
                tenant=self._worker.tenant,
                within_s=self._clocked.left_s,
                drive=drive_id,
                given_up=None if drive is None else drive.writes_given_up,
            )
        if isinstance(lease, Lease) and not self._clocked.is_over():
            return lease
        if isinstance(lease, Lease):
            self._mover.staging.release(lease)
        elif lease is not NoRoom.DEADLINE:
            self._end(positions, PutState.DECLINED, NO_ROOM_REASONS[lease])
        self._space.release(positions)
        return None

    async def _carry(
        self,
        drive: DriveId,
        positions: NDArray[np.intp],
        lease: Lease,
        is_checked: asyncio.Future[None],
    ) -> None:
        """Take one group from the arena to the summary: a wave is written as soon as it is checked."""
        mover, count = self._mover, len(positions)
        kept, writes = np.zeros(count, np.bool_), WaveIO()
        keep = keeper(self._blocks, self._tags, positions, kept)
        is_good, reasons = np.zeros(count, np.bool_), np.full(count, Reason.DRIVE_ERROR, np.uint8)
        fetches = self._fetches(positions, lease)
        try:
            for rows, fetched in fetches:
                is_good[rows] = await self._checked(positions, rows, lease, fetched)
                if lease.drive is None:
                    mover.staging.onto_drive(lease, drive)
                self._write(positions, rows[is_good[rows]], lease, reasons, writes)
            is_checked.set_result(None)
            await self._written(reasons, writes)
            if not writes.given_up:
                mover.staging.off_drive(lease)
            kept[:] = await self._commit(positions, is_good, reasons, writes)
        except BaseException:  # whatever went wrong: the lease must outlive all that was begun
            await asyncio.wait([fetched for _, fetched in fetches])
            await writes.ended()
            raise
        finally:
            mover.release(lease, writes, keep=keep)

    def _fetches(
        self, positions: NDArray[np.intp], lease: Lease
    ) -> list[tuple[NDArray[np.intp], asyncio.Future[TransferEnd]]]:
        """Begin to fetch a group, wave by wave: for each, which of the group's blocks it has, and its end."""
        fetches = []
        for rows in cut(np.arange(len(positions)), self._mover.blocks_per_wave(self._slot_bytes)):
            its = positions[rows]
            wave = Wave(
                staging=lease.offsets[rows],
                arena=self._slots[its],
                lengths=self._blocks.lengths[its],
                staging_slot_bytes=lease.slot_bytes,
                arena_slot_bytes=self._request.slot_bytes,
            )
            self._is_moving[its] = True
            fetches.append((rows, self._peer.submit(Direction.FROM_WORKER, wave)))
        self._moving.add(lease)
        return fetches

    async def _checked(
        self,
        positions: NDArray[np.intp],
        rows: NDArray[np.intp],
        lease: Lease,
        fetched: asyncio.Future[TransferEnd],
    ) -> NDArray[np.bool_]:
        """Wait for a wave and check it; says which blocks may be stored, and gives the others' space back.
        None may be once the request is over.
        """
        its = positions[rows]
        end = await fetched
        self._is_moving[its] = False
        if not self._is_moving[positions].any():
            self._moving.discard(lease)
        good = np.zeros(len(its), np.bool_)
        if end is not TransferEnd.DONE:
            if not self._clocked.is_over():
                self._end(its, PutState.DECLINED, Reason.TRANSFER_FAILED)
        elif not self._clocked.is_over():
            is_right = await self._mover.checked(self._checks(its, lease.offsets[rows]))
            if not self._clocked.is_over():
                good = is_right
                self._end(its[good], PutState.STAGED, Reason.NONE)
                self._end(its[~good], PutState.DECLINED, Reason.DAMAGED)
        if not good.all():
            self._space.release(its[~good])
        return good

    def _checks(
        self, positions: NDArray[np.intp], offsets: NDArray[np.int64]
    ) -> Callable[[], NDArray[np.bool_]]:
        """Make the check of a wave, to run off the loop; it also blanks what is left of each block's last
        page.
        """
        memory = self._mover.staging.array
        lengths, seeds = self._blocks.lengths[positions], self._blocks.seeds[positions]
        tags = self._tags[positions]

        def check() -> NDArray[np.bool_]:
            good = are_good(memory, offsets, lengths, seeds, tags)
            blank_rests(memory, offsets, lengths)
            return good

        return check

    def _write(
        self,
        positions: NDArray[np.intp],
        rows: NDArray[np.intp],
        lease: Lease,
        reasons: NDArray[np.uint8],
        writes: WaveIO,
    ) -> None:
        """Begin to write the given rows of a group, adjacent extents in one I/O; those that can't be written
        get their reason.
        """
        for target, chosen in self._space.by_target(positions[rows]):
            drive, its = self._mover.drives.get(target.drive), rows[chosen]
            if drive is not None and drive.refuses_writes:
                reasons[its] = Reason.DRIVE_SUSPECT
            elif self._space.has_run_out:  # looked at last: this agent may have been stopped meanwhile
                reasons[its] = Reason.EXPIRED
            elif drive is not None:
                pieces = Pieces(
                    self._mover.staging.array,
                    lease.offsets[its],
                    self._space.drive_offsets(positions[its]),
                    whole_pages(self._blocks.lengths[positions[its]]),
                )
                writes.add(its, drive.submit_write(pieces), drive.writes_given_up)

    async def _written(self, reasons: NDArray[np.uint8], writes: WaveIO) -> None:
        """Wait for a group's writes; what is on flash gets the reason NONE."""
        await writes.ended_or_given_up()
        for write in writes.begun:
            if write.is_given_up:
                reasons[write.rows] = Reason.DRIVE_SUSPECT
            else:
                reasons[write.rows[write.ends.result()]] = Reason.NONE

    async def _commit(
        self,
        positions: NDArray[np.intp],
        is_good: NDArray[np.bool_],
        reasons: NDArray[np.uint8],
        writes: WaveIO,
    ) -> NDArray[np.bool_]:
        """Commit what was written of a group's good blocks; says which blocks are committed.

        What a write that was given up may still reach keeps its space until the reservation runs out.
        """
        has_failed = is_good & (reasons != Reason.NONE)
        if has_failed.any():
            self._end(positions[has_failed], PutState.DECLINED, reasons[has_failed])
            is_begun = np.zeros(len(positions), np.bool_)
            for write in writes.begun:
                is_begun[write.rows] = True
            self._space.release(positions[has_failed & ~is_begun])
            for write in writes.begun:
                if not write.is_given_up:
                    self._space.release(positions[write.rows[has_failed[write.rows]]], may_land=True)
        chosen = positions[is_good & ~has_failed]
        if self._space.has_run_out:
            self._end(chosen, PutState.DECLINED, Reason.EXPIRED)
        else:
            await self._space.commit(chosen, self._tags)
        is_committed: NDArray[np.bool_] = self._states[positions] == PutState.COMMITTED
        return is_committed

    def _end(
        self,
        positions: NDArray[np.intp],
        states: PutState | NDArray[np.uint8],
        reasons: Reason | NDArray[np.uint8],
    ) -> None:
        self._states[positions] = states
        self._reasons[positions] = reasons


def _ack(ack: int) -> Ack:
    try:
        return Ack(ack)
    except ValueError as error:
        message = f"ack {ack} is no state to acknowledge at: ask for {Ack.STAGED} (staged) or {Ack.COMMITTED}"
        raise UsageError(message) from error
