"""What is tried out: requests for volumes whose switch says ``shadow``.

Whoever asks is declined at once, so that trying out costs no worker any time. What would have become of the
request is found out behind that: blocks are looked up, read and verified as for anybody, under the request's
own deadline, and dropped at the very end, where they would have been moved. Everything else is as it would
be: what is worth loading, what the DRAM cache keeps, which memory is held, and for whom.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ostraca_dpu_agent.mover.get import GetRun
from ostraca_dpu_agent.mover.lookup import LookupRun
from ostraca_fabric.outcome import BlockState, Reason
from ostraca_fabric.wire import columns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import numpy as np
    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.mover import Mover
    from ostraca_dpu_agent.mover.request import Worker
    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.wire.messages import Get, Lookup


class Shadows:
    """The requests of one mover that are tried out."""

    def __init__(self, mover: Mover) -> None:
        """Begin with none."""
        self._mover = mover
        self._under_way = 0
        self._stopped: asyncio.Future[None] | None = None

    def get(self, worker: Worker, volume: ServedVolume, request: Get) -> None:
        """Try out a get. Raises as ``GetRun``."""
        run = ShadowRun(self._mover, worker, volume, request, self._stop())
        self._begin("shadow_get", sum(map(len, request.spans)), run.end)

    def lookup(self, volume: ServedVolume, request: Lookup) -> None:
        """Try out a look-up."""
        run = LookupRun(self._mover, volume, request, self._stop(), counted_as="shadow_lookup")
        self._begin("shadow_lookup", sum(map(len, request.spans)), run.run)

    def close(self) -> None:
        """End what is under way: nobody waits for it."""
        stop = self._stop()
        if not stop.done():
            stop.set_result(None)

    def _stop(self) -> asyncio.Future[None]:
        if self._stopped is None:
            self._stopped = asyncio.get_running_loop().create_future()
        return self._stopped

    def _begin(self, operation: str, blocks: int, run: Callable[[], Awaitable[object]]) -> None:
        """Find out what becomes of it, unless as many as may be are under way: then that is what becomes."""
        mover = self._mover
        if self._under_way >= mover.requests_max:
            declined = columns.filled(blocks, BlockState.DECLINED)
            mover.counters.count(operation, declined, columns.filled(blocks, Reason.OVERLOADED))
            return
        self._under_way += 1
        mover.tasks.spawn(self._timed(operation, run))

    async def _timed(self, operation: str, run: Callable[[], Awaitable[object]]) -> None:
        begun_s = self._mover.clock()
        try:
            await run()
        finally:
            self._under_way -= 1
            self._mover.counters.tallies[operation].timed(self._mover.clock() - begun_s)


class ShadowRun(GetRun):
    """A get that moves nothing and tells its worker nothing."""

    def __init__(
        self,
        mover: Mover,
        worker: Worker,
        volume: ServedVolume,
        request: Get,
        stopped: asyncio.Future[None],
    ) -> None:
        """Take the request apart; it ends early when *stopped* is done."""
        super().__init__(mover, worker, volume, request)
        self._clocked = mover.clocked(request.deadline_s, stopped)

    async def end(self) -> None:
        """Bring what can be brought by the deadline, and count what would have become of it."""
        mover = self._mover
        try:
            await self._clocked.wait([mover.tasks.spawn(self._bring())])
            for lease in self._leases:
                mover.staging.quarantine(lease)
        finally:
            self._admission.over()
        if self._clocked.stopped.done():
            self._reasons[self._states == BlockState.LATE] = Reason.CANCELLED
        hit_bytes = int(self._blocks.lengths[self._states == BlockState.HIT].sum())
        mover.ended("shadow_get", self._blocks.keys, self._states, self._reasons, hit_bytes)

    async def _deliver(
        self,
        positions: NDArray[np.intp],
        offsets: NDArray[np.int64],  # noqa: ARG002 (nothing is moved from there)
        slot_bytes: int,  # noqa: ARG002
        tags: bytes,  # noqa: ARG002
    ) -> bool:
        """Drop what would be moved now. It is counted as a hit here, and nowhere else."""
        self._admission.drops(positions)
        if not self._clocked.is_over():
            self._end(positions, BlockState.HIT, Reason.NONE)
        return False
