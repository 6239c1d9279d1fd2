"""Shadow mode: requests for volumes with the switch ``shadow``.

The caller is declined at once, so that shadow mode costs workers no time. The request then runs in the
background. Blocks are looked up, read and verified under the request's deadline, and dropped instead of
moved. All else is as usual: admission, use of the DRAM cache, and memory held for the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.delivery import Delivery
from ostraca_dpu_agent.datapath.get import GetRun
from ostraca_dpu_agent.datapath.location.routing import NO_POSITIONS
from ostraca_dpu_agent.datapath.queries import look_up
from ostraca_dpu_agent.datapath.requests.context import Deadline, RequestContext
from ostraca_dpu_agent.datapath.requests.worker import WorkerConnection
from ostraca_dpu_agent.datapath.staging.leases import StagingLease
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.ports.transport import WaveNews, WaveStream
from ostraca_fabric.tables.digests import GOOD
from ostraca_fabric.wire.messages import Get, Lookup


class Shadows:
    """Shadow requests of a data path."""

    def __init__(self, context: RequestContext) -> None:
        """Begin without requests."""
        self._context = context
        self._active = 0

    @cached_property
    def _stopped(self) -> asyncio.Future[None]:
        """Future that ends the requests under way."""
        return asyncio.get_running_loop().create_future()

    def get(self, worker: WorkerConnection, volume: ServedVolume, request: Get) -> None:
        """Run a get in shadow mode. Raises as ``GetRun``."""
        self._start(
            "shadow_get",
            request,
            lambda deadline: ShadowRun(self._context, worker, volume, request, deadline).run(),
        )

    def lookup(self, volume: ServedVolume, request: Lookup) -> None:
        """Run a lookup in shadow mode."""
        run = partial(look_up, self._context, volume, request, counted_as="shadow_lookup")
        self._start("shadow_lookup", request, run)

    def close(self) -> None:
        """End the requests under way; no caller waits for them."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _start(
        self, operation: str, request: Get | Lookup, run: Callable[[Deadline], Awaitable[object]]
    ) -> None:
        """Run a request in the background, or count a decline if at the limit."""
        context = self._context
        if self._active >= context.requests_max:
            context.counters.decline(operation, sum(map(len, request.spans)), Reason.OVERLOADED)
            return
        running = run(context.start_deadline(request.deadline_s, self._stopped))
        self._active += 1
        context.tasks.spawn(self._run_timed(operation, running))

    async def _run_timed(self, operation: str, running: Awaitable[object]) -> None:
        started_s = self._context.clock()
        try:
            await running
        finally:
            self._active -= 1
            self._context.counters.tallies[operation].timed(self._context.clock() - started_s)


class ShadowRun(GetRun):
    """A get without transfers to the worker. It hears of a crash alone, by ``Settled``."""

    _operation = "shadow_get"

    def _may_leave_reads(self) -> bool:
        """Leave no reads to the worker."""
        return False

    def _stream(
        self,
        part: Delivery,
        lease: StagingLease,  # noqa: ARG002 (no block is moved)
        states: NDArray[np.uint8] | None,
    ) -> WaveStream:
        """Drop blocks instead of moving them."""

        def drop(rows: NDArray[np.intp]) -> None:
            self._admission.cancel_move(part.positions[rows])
            if not self._deadline.is_over():
                self._answer.decide(part.positions[rows], BlockState.HIT, Reason.NONE)

        return DroppedStream(np.full(len(part.positions), GOOD, np.uint8) if states is None else states, drop)


class DroppedStream:
    """Stream that moves nothing: implements ``WaveStream``."""

    def __init__(self, states: NDArray[np.uint8], drop: Callable[[NDArray[np.intp]], None]) -> None:
        """Call *drop* with the rows of all good blocks."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._states = states
        self._drop = drop
        if (states == GOOD).all():
            self.freeze()

    def look(self) -> None:
        """Do nothing before ``freeze``."""

    def freeze(self) -> NDArray[np.uint8]:
        """Drop the blocks that are good by now."""
        states = self._states.copy()
        if not self.ended.done():
            self._drop(np.flatnonzero(states == GOOD))
            self.ended.set_result(None)
        return states

    def stop(self) -> NDArray[np.intp]:
        """Drop no more blocks."""
        if not self.ended.done():
            self.ended.set_result(None)
        return NO_POSITIONS

    def take_news(self) -> tuple[WaveNews, ...]:
        """Return nothing: no wave moves."""
        return ()
