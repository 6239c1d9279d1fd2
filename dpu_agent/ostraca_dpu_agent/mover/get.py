"""A get: blocks from the DRAM cache or from flash into the worker's arena.

Each wave goes through its stages by itself: lease staging, read and verify, move, report. A few waves of one
request are on their way at once, so that flash and network overlap. At the deadline the request is answered
with what has landed; slots whose transfer has not settled are named, and ``Settled`` follows when it has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.mover.admission import Admission
from ostraca_dpu_agent.mover.drive_io import WaveIO
from ostraca_dpu_agent.mover.located import Located
from ostraca_dpu_agent.mover.request import Blocks, all_ended, check_sizes, cut, in_turns, keeper, of_one_size
from ostraca_dpu_agent.mover.staging import NO_ROOM_REASONS, Lease, NoRoom, Purpose
from ostraca_fabric.extent import rounded_up
from ostraca_fabric.outcome import BlockState, Reason
from ostraca_fabric.ports.transport import Direction, TransferEnd, Wave
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import GetDone, GetProgress, Settled

if TYPE_CHECKING:
    import asyncio

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.mover import Mover
    from ostraca_dpu_agent.mover.request import Queue, Worker
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.ids import DriveId
    from ostraca_fabric.wire.messages import Get


_REFUSED = {NoRoom.DEADLINE: BlockState.LATE, NoRoom.GIVEN_UP: BlockState.MISS}
"""What becomes of blocks that got no lease; others are DECLINED."""

NOTHING = Located.nothing(0)
"""What is located of a request that asks no owner."""


@dataclass(frozen=True, slots=True)
class CachedWave:
    """Blocks that the DRAM cache had in slots of one size when it was asked."""

    positions: NDArray[np.intp]
    rows: NDArray[np.int64]
    """Of the cache."""

    slot_bytes: int
    as_of: int
    """What the cache's ``left`` was then."""


class GetRun:
    """One get. ``run`` answers it; waves that outlive it end by themselves.

    A few *lanes* carry the waves, one after the other each, those from the cache beside those from flash; a
    wave that no lane has begun when the request is over never begins. Blocks are leased wave by wave also
    where the cache has them, so a worker that takes none holds few.
    """

    def __init__(self, mover: Mover, worker: Worker, volume: ServedVolume, request: Get) -> None:
        """Take the request apart.

        Raises MalformedError when its columns don't fit, UsageError when its sizes can't be, and RefusedError
        when the worker has no arena.
        """
        self._mover = mover
        self._worker = worker
        self._peer = worker.peer
        self._volume = volume
        self._request = request
        self._blocks = Blocks.of(volume, request.spans, request.lengths)
        check_sizes(volume, self._blocks.lengths, request.slot_bytes)
        count = len(self._blocks)
        self._slots = columns.u64(request.slots, count).astype(np.int64)
        self._slot_bytes = rounded_up(int(self._blocks.lengths.max(initial=1)))
        self._states = columns.filled(count, BlockState.LATE)
        self._reasons = columns.filled(count, Reason.DEADLINE)
        self._is_moving = np.zeros(count, np.bool_)
        self._leases: set[Lease] = set()
        self._cached: deque[CachedWave] = deque()
        """Waves that the DRAM cache is to bring and no lane has begun."""
        self._is_gone = np.zeros(count, np.bool_)
        """Which blocks left the cache before their wave's turn came."""
        self._waves_left = 0
        """Waves that have not ended, and one more while blocks are being located or that is to come."""
        self._landed_last = (b"", b"")
        """Positions and tags of the last wave, which are said in the answer itself."""
        self._clocked = mover.clocked(request.deadline_s, worker.stopped(request.request))
        self._admission = Admission(
            mover.pace, mover.clock, worker, self._blocks.lengths, request.recompute_s
        )

    async def run(self) -> GetDone:
        """Bring what can be brought by the deadline. Whatever raises here, ``Settled`` follows."""
        mover = self._mover
        bringing = mover.tasks.spawn(self._bring())
        must_settle = True
        try:
            await self._clocked.wait([bringing])
            for lease in self._leases:
                mover.staging.quarantine(lease)
            unsettled = np.flatnonzero(self._is_moving)
            must_settle = len(unsettled) > 0
        finally:
            self._admission.over()
            if must_settle:
                bringing.add_done_callback(self._say_settled)
        if self._clocked.stopped.done():
            self._reasons[self._states == BlockState.LATE] = Reason.CANCELLED
        hit_bytes = int(self._blocks.lengths[self._states == BlockState.HIT].sum())
        mover.ended("get", self._blocks.keys, self._states, self._reasons, hit_bytes)
        return GetDone(
            self._request.request,
            self._states.tobytes(),
            self._reasons.tobytes(),
            unsettled.astype(columns.U32).tobytes(),
            *self._landed_last,
        )

    async def _bring(self) -> None:
        """Carry every wave; ends when none touches flash or the arena any more."""
        mover, is_cached = self._mover, np.zeros(len(self._blocks), np.bool_)
        found = self._find_cached()
        for wave in found:
            is_cached[wave.positions] = True
        if not found or self._admission.admits_cached(is_cached, waves=len(found)):
            self._cached.extend(found)
        else:
            self._end(np.flatnonzero(is_cached), BlockState.DECLINED, Reason.TOO_SLOW)
        self._waves_left = len(self._cached) + 1
        lanes = min(mover.settings.waves_ahead, len(self._cached))
        cached = [mover.tasks.spawn(self._cached_lane()) for _ in range(lanes)]
        try:
            await self._bring_from_flash(~is_cached)
        finally:
            await all_ended(cached)
        if self._is_gone.any():
            await self._bring_from_flash(self._is_gone)

    async def _bring_from_flash(self, wanted: NDArray[np.bool_]) -> None:
        """Carry what no wave from the cache brings. One of the waves left stands for this."""
        mover = self._mover
        located = NOTHING
        waves: list[asyncio.Task[None]] = []
        try:
            located = await self._locate(wanted)
            queues = self._to_load(located)
            self._waves_left += sum(len(waiting) for _, waiting in queues) - 1
            for drive, waiting in in_turns(queues, lanes=mover.settings.reads_ahead):
                waves.append(mover.tasks.spawn(self._lane(located, drive, waiting)))
        finally:
            try:
                await all_ended(waves)
            finally:
                mover.locator.release(located)
        self._admission.loaded()

    def _say_settled(self, _bringing: asyncio.Task[None]) -> None:
        self._worker.send(Settled(self._request.request))

    def _find_cached(self) -> list[CachedWave]:
        """Find what the DRAM cache has now, in waves of one slot size."""
        cache = self._mover.staging.cache
        if not len(cache):
            return []
        positions, rows = cache.find(self._blocks.keys, self._blocks.lengths)
        if not len(rows):
            return []
        sizes = cache.slot_bytes[rows]
        waves = of_one_size(sizes, self._mover.blocks_per_wave)
        return [CachedWave(positions[at], rows[at], int(sizes[at[0]]), cache.left) for at in waves]

    async def _cached_lane(self) -> None:
        while self._cached and not self._clocked.is_over():
            try:
                await self._cached_wave(self._cached.popleft())
            finally:
                self._waves_left -= 1

    async def _cached_wave(self, wave: CachedWave) -> None:
        staging = self._mover.staging
        lease = await staging.lease(
            len(wave.rows),
            wave.slot_bytes,
            Purpose.CACHED,
            holder=self._worker,
            tenant=self._worker.tenant,
            within_s=self._clocked.left_s,
        )
        if isinstance(lease, NoRoom):
            self._refuse(wave.positions, lease)
            return
        try:
            if self._clocked.is_over():
                return
            if staging.cache.left != wave.as_of:
                wave = self._still_cached(wave)
            staging.hold(lease, wave.rows)
            self._leases.add(lease)
            tags = staging.cache.tags(wave.rows)
            if len(wave.rows) and await self._deliver(wave.positions, lease.offsets, lease.slot_bytes, tags):
                self._mover.counters.get_hits_from_cache += len(wave.rows)
        finally:
            self._leases.discard(lease)
            staging.release(lease)

    def _still_cached(self, wave: CachedWave) -> CachedWave:
        """Return what of a wave the cache still has. What left it before the wave's turn is brought last."""
        cache, blocks = self._mover.staging.cache, self._blocks
        found, rows = cache.find(blocks.keys[wave.positions], blocks.lengths[wave.positions])
        is_of_size = cache.slot_bytes[rows] == wave.slot_bytes
        found, rows = found[is_of_size], rows[is_of_size]
        if len(found) < len(wave.positions):
            self._waves_left += not self._is_gone.any()
            self._is_gone[np.delete(wave.positions, found)] = True
        return CachedWave(wave.positions[found], rows, wave.slot_bytes, cache.left)

    async def _locate(self, wanted: NDArray[np.bool_]) -> Located:
        within_s = self._clocked.left_s
        if within_s <= 0 or not wanted.any():
            return NOTHING
        located = await self._mover.locator.locate(
            self._mover.routes(),
            self._volume,
            self._blocks.spans,
            self._blocks.keys,
            wanted=wanted,
            within_s=within_s,
            pin_s=within_s,
        )
        fits = located.is_found & (located.lengths == self._blocks.lengths)
        missing = np.flatnonzero(wanted & ~located.is_found)
        self._end(missing, BlockState.MISS, located.reasons[missing])
        self._end(np.flatnonzero(located.is_found & ~fits), BlockState.MISS, Reason.WRONG_LENGTH)
        located.is_found = fits
        return located

    def _to_load(self, located: Located) -> list[Queue]:
        """Cut what was found into waves of one drive each; what recomputing is faster than is left out."""
        found = np.flatnonzero(located.is_found)
        if not len(found):
            return []
        per_wave = self._mover.blocks_per_wave(self._slot_bytes)
        admitted = self._admission.admits(located, found, per_wave=per_wave)
        if len(admitted) < len(found):
            self._end(np.setdiff1d(found, admitted), BlockState.DECLINED, Reason.TOO_SLOW)
        return [(drive, deque(cut(its, per_wave))) for drive, its in located.by_drive(admitted)]

    async def _lane(self, located: Located, drive: DriveId, waiting: deque[NDArray[np.intp]]) -> None:
        while waiting and not self._clocked.is_over():
            try:
                await self._flash_wave(located, drive, waiting.popleft())
            finally:
                self._waves_left -= 1

    async def _flash_wave(self, located: Located, drive_id: DriveId, positions: NDArray[np.intp]) -> None:
        mover = self._mover
        drive = mover.drives.get(drive_id)
        if drive is not None and drive.refuses_reads:
            self._refuse(positions, NoRoom.GIVEN_UP)
            return
        lease = await mover.staging.lease(
            len(positions),
            self._slot_bytes,
            Purpose.GET,
            holder=self._worker,
            tenant=self._worker.tenant,
            within_s=self._clocked.left_s,
            drive=drive_id,
            given_up=None if drive is None else drive.reads_given_up,
        )
        if isinstance(lease, NoRoom):
            self._refuse(positions, lease)
            return
        if self._clocked.is_over():
            mover.staging.release(lease)
            return
        self._leases.add(lease)
        is_good, reads = np.zeros(len(positions), np.bool_), WaveIO()
        keep = keeper(self._blocks, located.tags, positions, is_good)
        try:
            self._admission.reads(located, positions)
            reasons, reads = await mover.load(located, self._blocks, positions, lease)
            is_good[:] = reasons == Reason.NONE
            if self._clocked.is_over():
                return
            self._end(positions[~is_good], BlockState.MISS, reasons[~is_good])
            if is_good.any():
                arrived = positions[is_good]
                tags = located.tags[arrived].tobytes()
                if await self._deliver(arrived, lease.offsets[is_good], lease.slot_bytes, tags):
                    mover.counters.hits_on[drive_id] += len(arrived)
        finally:
            self._leases.discard(lease)
            mover.release(lease, reads, keep=keep)

    async def _deliver(
        self, positions: NDArray[np.intp], offsets: NDArray[np.int64], slot_bytes: int, tags: bytes
    ) -> bool:
        """Move blocks into the arena and say so; returns whether they count as hits."""
        wave = Wave(
            staging=offsets,
            arena=self._slots[positions],
            lengths=self._blocks.lengths[positions],
            staging_slot_bytes=slot_bytes,
            arena_slot_bytes=self._request.slot_bytes,
        )
        self._is_moving[positions] = True
        moving_bytes = self._admission.moves(positions)
        end = await self._peer.submit(Direction.TO_WORKER, wave)
        self._admission.moved(moving_bytes)
        self._is_moving[positions] = False
        if self._clocked.is_over():
            return False
        if end is not TransferEnd.DONE:
            self._end(positions, BlockState.MISS, Reason.TRANSFER_FAILED)
            return False
        self._end(positions, BlockState.HIT, Reason.NONE)
        named = positions.astype(columns.U32).tobytes()
        if self._waves_left == 1:
            self._landed_last = (named, tags)
        else:
            self._worker.send(GetProgress(self._request.request, named, tags))
        return True

    def _refuse(self, positions: NDArray[np.intp], why: NoRoom) -> None:
        if not self._clocked.is_over():
            self._end(positions, _REFUSED.get(why, BlockState.DECLINED), NO_ROOM_REASONS[why])

    def _end(
        self, positions: NDArray[np.intp], state: BlockState, reasons: Reason | NDArray[np.uint8]
    ) -> None:
        self._states[positions] = state
        self._reasons[positions] = reasons
