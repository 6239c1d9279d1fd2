"""A put: blocks from the worker's arena to flash.

Owners reserve first, so that a block already there costs nothing more. Each wave then goes through its
stages by itself: lease staging, fetch, check against the SDK's tag, write, commit. A put acknowledged as
STAGED is answered when every wave is past the check; its waves go on to the commit. The mover never makes a
tag: bytes that don't match the SDK's are not stored.
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
    """One put. ``run`` answers it; waves go on to flash after that.

    A few *lanes* carry the waves, one after the other each. When the request is over, waves that no lane has
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
        """Reserve, then carry every wave; ends when none touches the arena or flash any more."""
        mover = self._mover
        try:
            reserved = await self._reserve()
            per_wave = mover.blocks_per_put(self._slot_bytes)
            self._waiting = [
                (drive, deque(cut(its, per_wave))) for drive, its in self._space.by_drive(reserved)
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
            await self._wave(drive, waiting.popleft())

    async def _wave(self, drive: DriveId, positions: NDArray[np.intp]) -> None:
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
                within_s=self._clocked.left_s,
                drive=drive_id,
                given_up=None if drive is None else drive.given_up,
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
        """Take one wave from the arena to the summary."""
        mover = self._mover
        kept, writes = np.zeros(len(positions), np.bool_), WaveIO()
        keep = keeper(self._blocks, self._tags, positions, kept)
        try:
            good = await self._fetch(positions, lease)
            self._space.release(positions[~good])
            if not good.any():
                return
            is_checked.set_result(None)
            rows = np.flatnonzero(good)
            if self._space.has_run_out:
                self._end(positions[rows], PutState.DECLINED, Reason.EXPIRED)
                return
            mover.staging.onto_drive(lease, drive)
            reasons, writes = await self._write(positions, rows, lease)
            if not writes.given_up:
                mover.staging.off_drive(lease)
            kept[rows] = await self._commit(positions[rows], reasons, writes)
        finally:
            mover.release(lease, writes, keep=keep)

    async def _fetch(self, positions: NDArray[np.intp], lease: Lease) -> NDArray[np.bool_]:
        """Fetch a wave and check it; says which blocks may be stored. None may once the request is over."""
        wave = Wave(
            staging=lease.offsets,
            arena=self._slots[positions],
            lengths=self._blocks.lengths[positions],
            staging_slot_bytes=lease.slot_bytes,
            arena_slot_bytes=self._request.slot_bytes,
        )
        self._is_moving[positions] = True
        self._moving.add(lease)
        end = await self._peer.submit(Direction.FROM_WORKER, wave)
        self._moving.discard(lease)
        self._is_moving[positions] = False
        if self._clocked.is_over():
            return np.zeros(len(positions), np.bool_)
        if end is not TransferEnd.DONE:
            self._end(positions, PutState.DECLINED, Reason.TRANSFER_FAILED)
            return np.zeros(len(positions), np.bool_)
        good = await self._mover.checked(self._checks(positions, lease))
        if self._clocked.is_over():
            return np.zeros(len(positions), np.bool_)
        self._end(positions[good], PutState.STAGED, Reason.NONE)
        self._end(positions[~good], PutState.DECLINED, Reason.DAMAGED)
        return good

    def _checks(self, positions: NDArray[np.intp], lease: Lease) -> Callable[[], NDArray[np.bool_]]:
        """Make the check of a wave, to run off the loop; it also blanks what is left of each block's last
        page.
        """
        memory, offsets = self._mover.staging.array, lease.offsets
        lengths, seeds = self._blocks.lengths[positions], self._blocks.seeds[positions]
        tags = self._tags[positions]

        def check() -> NDArray[np.bool_]:
            good = are_good(memory, offsets, lengths, seeds, tags)
            blank_rests(memory, offsets, lengths)
            return good

        return check

    async def _write(
        self, positions: NDArray[np.intp], rows: NDArray[np.intp], lease: Lease
    ) -> tuple[NDArray[np.uint8], WaveIO]:
        """Write the given rows of a wave, adjacent extents in one I/O; returns a Reason for each, NONE where
        it is on flash, and the writes.
        """
        reasons = np.full(len(rows), Reason.DRIVE_ERROR, np.uint8)
        writes = WaveIO()
        try:
            for target, chosen in self._space.by_target(positions[rows]):
                drive = self._mover.drives.get(target.drive)
                pieces = self._pieces(positions, rows[chosen], lease)
                if drive is not None and drive.refuses_writes:
                    reasons[chosen] = Reason.DRIVE_SUSPECT
                elif self._space.has_run_out:  # looked at last: this agent may have been stopped meanwhile
                    reasons[chosen] = Reason.EXPIRED
                elif drive is not None:
                    writes.add(drive, chosen, drive.submit_write(pieces))
            await writes.ended_or_given_up()
        except BaseException:  # whatever went wrong: the lease must outlive every write that was begun
            await writes.ended()
            raise
        for write in writes.begun:
            if write.is_given_up:
                reasons[write.rows] = Reason.DRIVE_SUSPECT
            else:
                reasons[write.rows[write.ends.result()]] = Reason.NONE
        return reasons, writes

    def _pieces(self, positions: NDArray[np.intp], rows: NDArray[np.intp], lease: Lease) -> Pieces:
        chosen = positions[rows]
        return Pieces(
            self._mover.staging.array,
            lease.offsets[rows],
            self._space.drive_offsets(chosen),
            whole_pages(self._blocks.lengths[chosen]),
        )

    async def _commit(
        self, positions: NDArray[np.intp], reasons: NDArray[np.uint8], writes: WaveIO
    ) -> NDArray[np.bool_]:
        """Commit what was written; says which blocks are committed.

        What a write that was given up may still reach keeps its space until the reservation runs out.
        """
        has_failed = reasons != Reason.NONE
        self._end(positions[has_failed], PutState.DECLINED, reasons[has_failed])
        is_begun = np.zeros(len(positions), np.bool_)
        for write in writes.begun:
            is_begun[write.rows] = True
        self._space.release(positions[has_failed & ~is_begun])
        for write in writes.begun:
            if not write.is_given_up:
                self._space.release(positions[write.rows[has_failed[write.rows]]], may_land=True)
        chosen = positions[~has_failed]
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
