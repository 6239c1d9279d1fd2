"""A prefetch: blocks from flash into the DRAM cache, here or at another agent.

A router that has chosen a host has the blocks loaded there before the request arrives. The other agent's
answer is passed on. An unreachable or late agent gives an outcome for every block, not an error. A worker
that cancels is answered at once; the other agent continues until the deadline.
"""

from __future__ import annotations

import logging
from collections import deque

import numpy as np

from ostraca_dpu_agent.datapath.drive_io import ReadPlan
from ostraca_dpu_agent.datapath.requests.blocks import RequestBlocks
from ostraca_dpu_agent.datapath.requests.context import Deadline, RequestContext
from ostraca_dpu_agent.datapath.requests.worker import Holder
from ostraca_dpu_agent.datapath.staging.leases import STATES_WITHOUT_LEASE, Purpose
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.errors import ConnectError, MalformedError
from ostraca_fabric.model.extent import rounded_up
from ostraca_fabric.model.ids import AgentId, DriveId
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.ports.owners import Owners
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import Failure, Prefetch, PrefetchDone, PrefetchFor

log = logging.getLogger(__name__)

_REASONS = {
    "overloaded": Reason.OVERLOADED,
    "usage": Reason.OVERLOADED,
    "unknown_volume": Reason.UNKNOWN_VOLUME,
    "membership": Reason.UNKNOWN_VOLUME,
}
"""Outcome of each block for a ``Failure`` with these codes. ``usage`` means a limit of the other agent: this
agent accepted the request.
"""


class PrefetchRun:
    """A prefetch. Parts of a drive are read in sequence, so that gets take precedence."""

    def __init__(
        self,
        context: RequestContext,
        volume: ServedVolume,
        request: Prefetch | PrefetchFor,
        *,
        holder: Holder,
        deadline: Deadline,
    ) -> None:
        """Parse the request; charge staging to *holder*."""
        self._context = context
        self._volume = volume
        self._request = request
        self._blocks = RequestBlocks(volume, request.spans, np.zeros(0, np.uint32))
        """Lengths are known once the blocks are located."""

        self._outcomes = Outcomes.filled(len(self._blocks), BlockState.LATE, Reason.DEADLINE)
        self._loaded_bytes = 0
        self._holder = holder
        self._deadline = deadline

    async def run(self) -> PrefetchDone:
        """Load blocks until the deadline."""
        context = self._context
        if context.staging.cache.limit_bytes == 0:
            self._outcomes.set(slice(None), BlockState.DECLINED, Reason.NO_SPACE)
        elif self._deadline.left_s > 0:
            await self._deadline.wait(context.tasks.spawn(self._load()))
            # Later waves or other requests may have evicted the first blocks.
            evicted = np.flatnonzero(
                (self._outcomes.states == BlockState.HIT) & ~context.staging.cache.contains(self._blocks.keys)
            )
            self._outcomes.set(evicted, BlockState.DECLINED, Reason.NO_SPACE)
        context.record("prefetch", self._blocks.keys, self._outcomes, self._loaded_bytes)
        return PrefetchDone(self._request.request, *self._outcomes.encode())

    async def _load(self) -> None:
        context = self._context
        is_cached = context.staging.cache.contains(self._blocks.keys)
        self._outcomes.set(is_cached, BlockState.HIT, Reason.NONE)
        left_s = self._deadline.left_s
        locations = await context.locator.locate(
            context.routes(),
            self._volume,
            self._request.spans,
            self._blocks.keys,
            wanted=~is_cached,
            within_s=left_s,
            pin_s=left_s,
        )
        missing = ~is_cached & ~locations.is_found
        self._outcomes.set(missing, BlockState.MISS, locations.reasons[missing])
        self._blocks.lengths = locations.lengths
        slot_bytes = rounded_up(self._blocks.longest_bytes)
        try:
            plan = ReadPlan.of(
                locations,
                self._blocks.seeds,
                np.flatnonzero(locations.is_found),
                per_part=context.blocks_per_part(slot_bytes),
            )
            await context.tasks.run_all([self._lane(plan, *queue, slot_bytes) for queue in plan.queues])
        finally:
            context.locator.release(locations.pins)

    async def _lane(
        self,
        plan: ReadPlan,
        drive: DriveId,
        parts: deque[slice],
        slot_bytes: int,
    ) -> None:
        for part in parts:
            await self._part(plan, drive, part, slot_bytes)

    async def _part(
        self,
        plan: ReadPlan,
        drive_id: DriveId,
        part: slice,
        slot_bytes: int,
    ) -> None:
        context, positions = self._context, plan.positions[part]
        lease = await context.lease(
            Purpose.GET,
            drive_id,
            len(positions),
            slot_bytes,
            holder=self._holder,
            deadline=self._deadline,
        )
        if isinstance(lease, Reason):
            if not self._deadline.is_over():
                self._outcomes.set(positions, STATES_WITHOUT_LEASE.get(lease, BlockState.DECLINED), lease)
            return
        reasons, read = codec.filled(len(positions), Reason.DRIVE_ERROR), None
        try:
            read = context.begin_read(plan, drive_id, part, lease)
            await read.wait()
            reasons = read.reasons()
            damaged = positions[reasons == Reason.DAMAGED]
            context.report_damage(plan.locations, self._blocks.keys, self._blocks.seeds, damaged)
        finally:
            keep = self._blocks.cache_offer(positions, plan.tags[part], reasons == Reason.NONE, uses=0)
            context.release(lease, read, keep=keep)
        if not self._deadline.is_over():
            is_good = reasons == Reason.NONE
            self._loaded_bytes += int(self._blocks.lengths[positions[is_good]].sum())
            self._outcomes.set(positions[is_good], BlockState.HIT, Reason.NONE)
            self._outcomes.set(positions[~is_good], BlockState.MISS, reasons[~is_good])


async def prefetch_at_peer(
    context: RequestContext, volume: ServedVolume, request: Prefetch, deadline: Deadline
) -> PrefetchDone:
    """Load blocks into the DRAM cache of another agent; answer by the deadline."""
    outcomes = Outcomes.filled(sum(map(len, request.spans)), BlockState.LATE, Reason.DEADLINE)
    if deadline.left_s > 0:
        asking = context.tasks.spawn(_ask_peer(context.owners, volume, request, deadline.left_s))
        try:
            await deadline.wait(asking)
            if asking.done():
                outcomes = asking.result()
        finally:
            asking.cancel()
    context.counters.count("prefetch", outcomes)
    return PrefetchDone(request.request, *outcomes.encode())


async def _ask_peer(owners: Owners, volume: ServedVolume, request: Prefetch, within_s: float) -> Outcomes:
    blocks, record, reason = sum(map(len, request.spans)), volume.record, Reason.NO_AGENT
    query = PrefetchFor(0, within_s, record.tenant, record.name, record.incarnation, request.spans)
    try:
        answer = await owners.ask(AgentId(request.at), query)
        if isinstance(answer, PrefetchDone):
            return Outcomes.read(answer.states, answer.reasons, blocks)
        if isinstance(answer, Failure):
            reason = _REASONS.get(answer.code, reason)
    except TimeoutError:
        return Outcomes.filled(blocks, BlockState.LATE, Reason.DEADLINE)
    except (ConnectError, MalformedError):
        log.debug("No answer of %s to a prefetch", request.at, exc_info=True)
    return Outcomes.filled(blocks, BlockState.DECLINED, reason)
