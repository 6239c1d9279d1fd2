"""A put: blocks from the worker's arena to flash.

Owners reserve first, so that a block already there costs nothing more. Each wave then goes through its
stages by itself: lease staging, fetch, check against the SDK's tag, write, commit. A put acknowledged as
STAGED is answered when every wave is past the check; its waves go on to the commit. The mover never makes a
tag: bytes that don't match the SDK's are not stored.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.mover.request import Blocks, cut, keeper
from ostraca_dpu_agent.mover.runs import joined
from ostraca_dpu_agent.mover.staging import NO_ROOM_REASONS, Lease, NoRoom, Purpose
from ostraca_fabric.errors import ConnectError
from ostraca_fabric.extent import rounded_up
from ostraca_fabric.outcome import Ack, PutState, Reason
from ostraca_fabric.ports.transport import Direction, TransferEnd, Wave
from ostraca_fabric.tags import matches
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import (
    Commit,
    Committed,
    PutDone,
    Release,
    Reserve,
    Reserved,
    Settled,
    ShardCommit,
    ShardRelease,
    ShardWants,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.mover import Mover
    from ostraca_dpu_agent.mover.request import Worker
    from ostraca_dpu_agent.mover.routes import Routes, ShardPart
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.ids import AgentId, DriveId, ShardId
    from ostraca_fabric.ports.drive import Run
    from ostraca_fabric.wire.messages import Put, ShardReservations


@dataclass(frozen=True, slots=True)
class Target:
    """A shard that takes some of a put's blocks."""

    owner: AgentId
    shard: ShardId
    drive: DriveId
    base: int
    """The shard's first byte on the drive."""

    owner_epoch: int


class PutRun:
    """One put. ``run`` answers it; waves go on to flash after that."""

    def __init__(self, mover: Mover, worker: Worker, volume: ServedVolume, request: Put) -> None:
        """Take the request apart; raises MalformedError when its columns don't fit."""
        self._mover = mover
        self._worker = worker
        self._volume = volume
        self._request = request
        self._blocks = Blocks.of(volume, request.spans, request.lengths)
        count = len(self._blocks)
        self._tags = columns.rows16(request.tags, count)
        self._slots = columns.u64(request.slots, count).astype(np.int64)
        self._slot_bytes = rounded_up(int(self._blocks.lengths.max(initial=1)))
        self._states = np.full(count, PutState.LATE, np.uint8)
        self._reasons = np.full(count, Reason.DEADLINE, np.uint8)
        self._is_moving = np.zeros(count, np.bool_)
        self._targets: list[Target] = []
        self._target = np.full(count, -1, np.intp)
        self._reservations = np.zeros(count, np.uint64)
        self._offsets = np.zeros(count, np.uint64)
        self._reserved_until_s = 0.0
        self._moving: set[Lease] = set()
        self._waves_ahead = asyncio.Semaphore(mover.settings.waves_ahead)
        self._clocked = mover.clocked(request.deadline_s, worker.stopped(request.request))

    async def run(self) -> PutDone:
        """Take the blocks, and answer at the state the caller asked for or at the deadline.

        Whatever raises here, ``Settled`` follows.
        """
        mover = self._mover
        waves: list[asyncio.Task[None]] = []
        staged: list[asyncio.Future[None]] = []
        must_settle = True
        try:
            for positions in cut(await self._reserve(), mover.blocks_per_wave(self._slot_bytes)):
                staged.append(asyncio.get_running_loop().create_future())
                waves.append(mover.tasks.spawn(self._wave(positions, staged[-1])))
            await self._clocked.wait(staged if self._request.ack == Ack.STAGED else waves)
            unsettled = np.flatnonzero(self._is_moving)
            must_settle = len(unsettled) > 0
            for lease in self._moving:
                mover.staging.quarantine(lease)
        finally:
            mover.tasks.spawn(self._finish(waves, must_settle=must_settle))
        if self._clocked.stopped.is_set():
            self._reasons[self._states == PutState.LATE] = Reason.CANCELLED
        return PutDone(
            self._request.request,
            self._answered().tobytes(),
            self._reasons.tobytes(),
            unsettled.astype(columns.U32).tobytes(),
        )

    def _answered(self) -> NDArray[np.uint8]:
        """Freeze what is said now: blocks past the check are STAGED, if that was asked for, else LATE."""
        answered = self._states.copy()
        if self._request.ack == Ack.STAGED:
            return answered
        answered[answered == PutState.STAGED] = PutState.LATE
        return answered

    async def _reserve(self) -> NDArray[np.intp]:
        """Ask owners for space; returns the positions that got some, others are answered for."""
        mover, within_s = self._mover, self._clocked.left_s
        if within_s <= 0:
            return np.zeros(0, np.intp)
        self._reserved_until_s = mover.clock() + mover.hold_s
        routes = mover.routes()
        parts, unowned = routes.by_owner(self._volume.placement_secret, self._blocks.spans)
        self._end(unowned, PutState.DECLINED, Reason.NO_OWNER)
        asked = [self._ask(routes, owner, shards, within_s) for owner, shards in parts.items()]
        await asyncio.gather(*asked)
        answered = np.flatnonzero(self._target < 0)
        mover.counters.count_put(self._states[answered], self._blocks.lengths[answered])
        return np.flatnonzero(self._target >= 0)

    async def _ask(self, routes: Routes, owner: AgentId, parts: list[ShardPart], within_s: float) -> None:
        keys, lengths = self._blocks.keys, self._blocks.lengths
        wants = tuple(
            ShardWants(part.shard, keys[part.positions].tobytes(), lengths[part.positions].tobytes())
            for part in parts
        )
        try:
            answer = await self._mover.owners.ask(owner, Reserve(0, within_s, self._mover.hold_s, wants))
        except (TimeoutError, ConnectError):
            answer = None
        if not isinstance(answer, Reserved):
            for part in parts:
                self._end(part.positions, PutState.DECLINED, Reason.NO_OWNER)
            return
        for part, given in zip(parts, answer.shards, strict=True):
            if given.is_owner:
                self._take(routes, owner, part, given)
            else:
                self._end(part.positions, PutState.DECLINED, Reason.NO_OWNER)

    def _take(self, routes: Routes, owner: AgentId, part: ShardPart, given: ShardReservations) -> None:
        drive, base = routes.place(part.shard)
        self._targets.append(Target(owner, part.shard, drive, base, given.owner_epoch))
        count = len(part.positions)
        states = columns.u8(given.states, count)
        self._reservations[part.positions] = columns.u64(given.reservations, count)
        self._offsets[part.positions] = columns.u64(given.offsets, count)
        is_reserved = states == PutState.STAGED
        self._target[part.positions[is_reserved]] = len(self._targets) - 1
        answered = ~is_reserved
        self._states[part.positions[answered]] = states[answered]
        self._reasons[part.positions[answered]] = columns.u8(given.reasons, count)[answered]

    async def _wave(self, positions: NDArray[np.intp], is_staged: asyncio.Future[None]) -> None:
        try:
            async with self._waves_ahead:
                lease = await self._lease(positions)
                if lease is not None:
                    await self._carry(positions, lease, is_staged)
        finally:
            if not is_staged.done():
                is_staged.set_result(None)

    async def _lease(self, positions: NDArray[np.intp]) -> Lease | None:
        lease: Lease | NoRoom = NoRoom.DEADLINE
        if not self._clocked.is_over():
            lease = await self._mover.staging.lease(
                len(positions), self._slot_bytes, Purpose.PUT, within_s=self._clocked.left_s
            )
        if isinstance(lease, Lease) and not self._clocked.is_over():
            return lease
        if isinstance(lease, Lease):
            self._mover.staging.release(lease)
        elif lease is not NoRoom.DEADLINE:
            self._end(positions, PutState.DECLINED, NO_ROOM_REASONS[lease])
        self._release(positions)
        return None

    async def _carry(
        self, positions: NDArray[np.intp], lease: Lease, is_staged: asyncio.Future[None]
    ) -> None:
        """Take one wave from the arena to the summary."""
        mover = self._mover
        kept = np.zeros(len(positions), np.bool_)
        keep = keeper(self._blocks, self._tags, positions, lease, kept)
        try:
            good = await self._fetch(positions, lease)
            self._release(positions[~good])
            if not good.any():
                return
            if not is_staged.done():
                is_staged.set_result(None)
            rows = np.flatnonzero(good)
            if mover.clock() >= self._reserved_until_s:
                self._end(positions[rows], PutState.DECLINED, Reason.EXPIRED)
                return
            written = await self._write(positions, rows, lease)
            kept[rows] = await self._commit(positions[rows], written)
        finally:
            mover.staging.release(lease, keep=keep)

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
        end = await self._worker.peer.submit(Direction.FROM_WORKER, wave)
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

    def _checks(self, positions: NDArray[np.intp], lease: Lease) -> Callable[[], list[bool]]:
        """Make the check of a wave, to run off the loop; it also blanks what is left of each block's last
        page.
        """
        view = self._mover.staging.view
        offsets = lease.offsets.tolist()
        lengths = self._blocks.lengths[positions].tolist()
        seeds = self._blocks.seeds[positions].tolist()
        tags = self._tags[positions].tobytes()

        def check() -> list[bool]:
            good = []
            for row, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
                good.append(matches(view(offset, length), seeds[row], tags[row * 16 : row * 16 + 16]))
                rest = rounded_up(length) - length
                if rest:
                    view(offset + length, rest)[:] = bytes(rest)
            return good

        return check

    async def _write(
        self, positions: NDArray[np.intp], rows: NDArray[np.intp], lease: Lease
    ) -> NDArray[np.bool_]:
        """Write the given rows of a wave, adjacent extents in one I/O; says which are on flash."""
        written = np.zeros(len(rows), np.bool_)
        writes, members = [], []
        for target in np.unique(self._target[positions[rows]]).tolist():
            drive = self._mover.drives.get(self._targets[target].drive)
            if drive is None:
                continue
            chosen = np.flatnonzero(self._target[positions[rows]] == target)
            order = chosen[np.argsort(self._offsets[positions[rows[chosen]]])]
            runs, covered = self._runs(positions, rows, order.tolist(), lease)
            writes.append(drive.submit_write(runs))
            members.append(covered)
        for ends, covered in zip(await asyncio.gather(*writes), members, strict=True):
            for is_ok, at in zip(ends, covered, strict=True):
                written[at] = is_ok
        return written

    def _runs(
        self, positions: NDArray[np.intp], rows: NDArray[np.intp], order: Sequence[int], lease: Lease
    ) -> tuple[list[Run], list[list[int]]]:
        extents = []
        for at in order:
            row = int(rows[at])
            position = positions[row]
            length = rounded_up(int(self._blocks.lengths[position]))
            offset = self._targets[int(self._target[position])].base + int(self._offsets[position])
            extents.append((offset, self._mover.staging.view(int(lease.offsets[row]), length), at))
        return joined(extents)

    async def _commit(self, positions: NDArray[np.intp], written: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Commit what was written; says which blocks are committed."""
        failed = positions[~written]
        self._end(failed, PutState.DECLINED, Reason.DRIVE_ERROR)
        self._release(failed)
        chosen = positions[written]
        by_owner: dict[AgentId, list[tuple[Target, NDArray[np.intp]]]] = {}
        for number in np.unique(self._target[chosen]).tolist():
            target = self._targets[number]
            by_owner.setdefault(target.owner, []).append((target, chosen[self._target[chosen] == number]))
        if self._mover.clock() >= self._reserved_until_s:
            self._end(chosen, PutState.DECLINED, Reason.EXPIRED)
        else:
            await asyncio.gather(*(self._tell(owner, parts) for owner, parts in by_owner.items()))
        self._mover.counters.count_put(self._states[positions], self._blocks.lengths[positions])
        is_committed: NDArray[np.bool_] = self._states[positions] == PutState.COMMITTED
        return is_committed

    async def _tell(self, owner: AgentId, parts: list[tuple[Target, NDArray[np.intp]]]) -> None:
        commits = tuple(
            ShardCommit(
                target.shard,
                target.owner_epoch,
                self._reservations[positions].tobytes(),
                self._tags[positions].tobytes(),
            )
            for target, positions in parts
        )
        left_s = self._reserved_until_s - self._mover.clock()
        try:
            answer = await self._mover.owners.ask(owner, Commit(0, left_s, commits))
        except (TimeoutError, ConnectError):
            answer = None
        for number, (_, positions) in enumerate(parts):
            if isinstance(answer, Committed):
                part = answer.shards[number]
                self._states[positions] = columns.u8(part.states, len(positions))
                self._reasons[positions] = columns.u8(part.reasons, len(positions))
            else:
                self._end(positions, PutState.DECLINED, Reason.NO_OWNER)

    def _release(self, positions: NDArray[np.intp]) -> None:
        """Give reservations back under which no write was begun, or every write has ended."""
        for number in np.unique(self._target[positions]).tolist():
            target = self._targets[number]
            numbers = self._reservations[positions[self._target[positions] == number]].tobytes()
            self._mover.owners.tell(target.owner, Release((ShardRelease(target.shard, (), numbers),)))

    async def _finish(self, waves: list[asyncio.Task[None]], *, must_settle: bool) -> None:
        """Once no wave touches the arena any more, say so."""
        await asyncio.gather(*waves, return_exceptions=True)
        if must_settle:
            self._worker.send(Settled(self._request.request))

    def _end(self, positions: NDArray[np.intp], state: PutState, reasons: Reason | NDArray[np.uint8]) -> None:
        self._states[positions] = state
        self._reasons[positions] = reasons
