"""A prefetch: blocks from flash into the DRAM cache, as far as there is room and time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.mover.drive_io import WaveIO
from ostraca_dpu_agent.mover.request import Blocks, all_ended, cut, keeper
from ostraca_dpu_agent.mover.staging import NO_ROOM_REASONS, NoRoom, Purpose
from ostraca_fabric.extent import rounded_up
from ostraca_fabric.keys import derive_keys
from ostraca_fabric.outcome import BlockState, Reason
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import PrefetchDone

if TYPE_CHECKING:
    import asyncio

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.located import Located
    from ostraca_dpu_agent.mover.mover import Mover
    from ostraca_dpu_agent.mover.request import Holder
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.ids import DriveId
    from ostraca_fabric.wire.messages import Prefetch, PrefetchFor


class PrefetchRun:
    """One prefetch: from each drive one wave after the other, so that gets go before it."""

    def __init__(
        self,
        mover: Mover,
        volume: ServedVolume,
        request: Prefetch | PrefetchFor,
        *,
        holder: Holder,
        stopped: asyncio.Future[None],
    ) -> None:
        """Take the request apart; its staging counts for *holder*."""
        self._mover = mover
        self._volume = volume
        self._request = request
        self._keys = derive_keys(volume.secret, request.spans)
        self._states = columns.filled(len(self._keys), BlockState.LATE)
        self._reasons = columns.filled(len(self._keys), Reason.DEADLINE)
        self._brought_bytes = 0
        self._holder = holder
        self._clocked = mover.clocked(request.deadline_s, stopped)

    async def run(self) -> PrefetchDone:
        """Bring what can be brought by the deadline."""
        mover = self._mover
        if mover.staging.cache.limit_bytes == 0:
            self._end(np.arange(len(self._keys)), BlockState.DECLINED, Reason.NO_SPACE)
        elif self._clocked.left_s > 0:
            await self._clocked.wait([mover.tasks.spawn(self._bring())])
            # Later waves, or others, may have taken the place of what came first.
            gone = np.flatnonzero(
                (self._states == BlockState.HIT) & ~mover.staging.cache.contains(self._keys)
            )
            self._end(gone, BlockState.DECLINED, Reason.NO_SPACE)
        mover.ended("prefetch", self._keys, self._states, self._reasons, self._brought_bytes)
        return PrefetchDone(self._request.request, self._states.tobytes(), self._reasons.tobytes())

    async def _bring(self) -> None:
        mover = self._mover
        is_cached = mover.staging.cache.contains(self._keys)
        self._end(np.flatnonzero(is_cached), BlockState.HIT, Reason.NONE)
        left_s = self._clocked.left_s
        located = await mover.locator.locate(
            mover.routes(),
            self._volume,
            self._request.spans,
            self._keys,
            wanted=~is_cached,
            within_s=left_s,
            pin_s=left_s,
        )
        missing = np.flatnonzero(~is_cached & ~located.is_found)
        self._end(missing, BlockState.MISS, located.reasons[missing])
        lengths = located.lengths
        blocks = Blocks(self._volume, self._request.spans, lengths)
        try:
            slot_bytes = rounded_up(int(lengths.max(initial=1)))
            queues = located.by_drive(np.flatnonzero(located.is_found))
            lanes = (self._lane(located, blocks, *queue, slot_bytes) for queue in queues)
            await all_ended([mover.tasks.spawn(lane) for lane in lanes])
        finally:
            mover.locator.release(located)

    async def _lane(
        self, located: Located, blocks: Blocks, drive: DriveId, its: NDArray[np.intp], slot_bytes: int
    ) -> None:
        for positions in cut(its, self._mover.blocks_per_wave(slot_bytes)):
            await self._wave(located, blocks, drive, positions, slot_bytes)

    async def _wave(
        self,
        located: Located,
        blocks: Blocks,
        drive_id: DriveId,
        positions: NDArray[np.intp],
        slot_bytes: int,
    ) -> None:
        mover = self._mover
        if self._clocked.is_over():
            return
        drive = mover.drives.get(drive_id)
        lease = await mover.staging.lease(
            len(positions),
            slot_bytes,
            Purpose.GET,
            holder=self._holder,
            tenant=self._holder.tenant,
            within_s=self._clocked.left_s,
            drive=drive_id,
            given_up=None if drive is None else drive.reads_given_up,
        )
        if isinstance(lease, NoRoom):
            if lease is not NoRoom.DEADLINE and not self._clocked.is_over():
                state = BlockState.MISS if lease is NoRoom.GIVEN_UP else BlockState.DECLINED
                self._end(positions, state, NO_ROOM_REASONS[lease])
            return
        is_good, reads = np.zeros(len(positions), np.bool_), WaveIO()
        keep = keeper(blocks, located.tags, positions, is_good, uses=0)
        try:
            reasons, reads = await mover.load(located, blocks, positions, lease)
            is_good[:] = reasons == Reason.NONE
        finally:
            mover.release(lease, reads, keep=keep)
        if not self._clocked.is_over():
            self._brought_bytes += int(blocks.lengths[positions[is_good]].sum())
            self._end(positions[is_good], BlockState.HIT, Reason.NONE)
            self._end(positions[~is_good], BlockState.MISS, reasons[~is_good])

    def _end(
        self, positions: NDArray[np.intp], state: BlockState, reasons: Reason | NDArray[np.uint8]
    ) -> None:
        self._states[positions] = state
        self._reasons[positions] = reasons
