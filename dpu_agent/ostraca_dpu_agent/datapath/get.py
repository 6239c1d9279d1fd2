"""A get: blocks from staging, the DRAM cache or flash into a worker's memory.

A worker with permission reads memory or drives itself: it is told the places. All else goes as follows.

Blocks on flash are planned once, in columns. Each part of the plan, up to 64 MiB of a drive, leases staging
and is read as a whole. A stream moves verified blocks to the worker while the read advances. The stream's
thread tells the worker of delivered blocks, and the event loop decides them at the end. So the loop has a
few turns per part, however many waves and blocks. At the deadline the request is answered with the delivered
blocks. The answer names slots with unsettled transfers; ``Settled`` follows once all have settled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.admission import GetAdmission
from ostraca_dpu_agent.datapath.delivery import Delivery, GetAnswer
from ostraca_dpu_agent.datapath.drive_io import PartRead, ReadPlan, interleave_drives
from ostraca_dpu_agent.datapath.location.extents import OfferedBlocks
from ostraca_dpu_agent.datapath.location.routing import NO_POSITIONS, BlockLocations, Pins
from ostraca_dpu_agent.datapath.requests.blocks import TransferRun
from ostraca_dpu_agent.datapath.requests.context import Deadline, RequestContext
from ostraca_dpu_agent.datapath.requests.worker import WorkerConnection
from ostraca_dpu_agent.datapath.staging.leases import STATES_WITHOUT_LEASE, Purpose, StagingLease
from ostraca_dpu_agent.datapath.staging.memory_waves import MemoryWave
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.ports.transport import WaveStream
from ostraca_fabric.runtime.tasks import until_done
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import ExtentsRead, Get, GetDone, GetProgress

_HIT = int(BlockState.HIT)

_Part = TypeVar("_Part")

NO_LOCATIONS = BlockLocations.empty(0)
"""Location result of a request that asks no shard owner."""


class GetRun(TransferRun[Get]):
    """A get. ``run`` answers; later waves finish by themselves.

    Parts of blocks in memory and on flash run in a few sequential *lanes*. A part that no lane has started by
    the end of the request never starts. Each part has its own lease, so a stalled worker holds few blocks.
    """

    _operation = "get"

    def __init__(
        self,
        context: RequestContext,
        worker: WorkerConnection,
        volume: ServedVolume,
        request: Get,
        deadline: Deadline,
    ) -> None:
        """Parse the request. Raises as ``TransferRun``, and RefusedError for a worker without an arena."""
        self._arena = worker.arena
        super().__init__(context, worker, volume, request, deadline, late=BlockState.LATE)
        self._check_regions()
        self._is_gone = np.zeros(len(self._blocks), np.bool_)
        """Blocks that left staging or the cache before their wave's turn."""
        self._streams: dict[WaveStream, Delivery] = {}
        """Streams that have not ended."""
        self._locations = NO_LOCATIONS
        self._is_left: NDArray[np.bool_] | None = None
        """Blocks on drives left to the worker to read, recorded by its report; None before any."""

        self._admission = GetAdmission(
            context.estimator,
            context.clock,
            worker,
            len(self._blocks),
            self._blocks.total_bytes,
            request.recompute_s,
        )
        self._answer = GetAnswer(
            request.request,
            worker,
            deadline,
            self._admission,
            self._outcomes,
            context.counters.hits_on,
            len(self._blocks),
        )

    async def run(self) -> GetDone:
        """Deliver blocks until the deadline. After any exception, ``Settled`` follows."""
        found, is_here = self._find_in_memory()
        is_all_here = np.count_nonzero(is_here) == len(is_here)
        if not self._deadline.left_s or (not found and is_all_here):  # nothing is left to do
            self._admission.close()
            self._record()
            return self._answer.message(NO_POSITIONS)
        delivery = self._context.tasks.begin(self._deliver_all(found, is_here))
        unsettled = NO_POSITIONS
        try:
            if not delivery.done() or delivery.exception() is not None:
                unsettled = await self._end(delivery, delivery, self._stop_streams)
        finally:
            self._admission.close()
        if self._deadline.stopped.done():
            self._worker.end_reads(self._request.request)
        if self._is_left is None:
            self._record()
        elif np.count_nonzero(self._is_left) < len(self._blocks):
            self._record(~self._is_left)
        return self._answer.message(unsettled)

    def _record(self, wanted: NDArray[np.bool_] | None = None) -> None:
        """Count and record the outcomes of *wanted* blocks, all by default, once answered."""
        keys, outcomes = self._blocks.keys, self._outcomes
        if self._deadline.stopped.done():
            outcomes.reasons[outcomes.states == BlockState.LATE] = Reason.CANCELLED
        is_hit = outcomes.states == _HIT
        if wanted is not None and np.count_nonzero(wanted) < len(wanted):
            is_hit &= wanted
            keys, outcomes = keys[wanted], Outcomes(outcomes.states[wanted], outcomes.reasons[wanted])
        hit_bytes = self._blocks.total_bytes(is_hit.nonzero()[0])
        self._context.record(self._operation, keys, outcomes, hit_bytes)

    def _find_in_memory(self) -> tuple[list[MemoryWave], NDArray[np.bool_]]:
        """Find and admit staged and cached blocks; return those to deliver, and which blocks are in memory.

        A worker that reads memory is told their places instead.
        """
        context = self._context
        found, is_here = context.find_in_memory(self._blocks.keys, self._blocks.lengths)
        if not found:
            return found, is_here
        if self._worker.reads_memory and self._may_leave_reads():
            self._leave_in_memory(found, is_all=bool(is_here.all()))
            found = []
        elif not self._admission.admit_in_memory(
            is_here,
            waves=sum(-(-len(part.rows) // context.blocks_per_wave(part.slot_bytes)) for part in found),
        ):
            self._answer.decide(np.flatnonzero(is_here), BlockState.DECLINED, Reason.TOO_SLOW)
            found = []
        return found, is_here

    def _leave_in_memory(self, found: Sequence[MemoryWave], *, is_all: bool) -> None:
        """Tell the worker where blocks lie in memory: by the answer, if these are all blocks.

        Nothing is held for the worker. Its copies take no time of this agent, so they need no admission.
        """
        for wave in found:
            self._answer.decide(wave.positions, BlockState.HIT, Reason.NONE)
            progress = self._places(wave)
            if is_all:
                self._answer.last_waves.append(progress)
            else:
                self._worker.send(progress)

    def _places(self, wave: MemoryWave) -> GetProgress:
        """Return where staged or cached blocks lie in the agent's memory, and count them as hits."""
        return self._context.places(self._request.request, wave)

    async def _deliver_all(self, found: list[MemoryWave], is_here: NDArray[np.bool_]) -> None:
        """Run all waves, until none uses flash or the arena any more.

        *is_here* tells the blocks in memory, and *found* has those to deliver.
        """
        context, waiting = self._context, deque(found)
        lanes = context.parts_at_once(context.settings.waves_ahead, context.settings.get_part_bytes)
        moving = [self._lane(waiting, self._memory_part) for _ in range(min(lanes, len(found)))]
        await context.tasks.run_all([*moving, self._load_from_flash(~is_here)])
        await self._load_from_flash(self._is_gone)

    def _stop_streams(self) -> NDArray[np.intp]:
        """Begin no further wave; return the blocks of unsettled waves. Delivered blocks count."""
        moving = [NO_POSITIONS, *(part.positions[stream.stop()] for stream, part in self._streams.items())]
        for stream, part in self._streams.items():
            part.decide(stream.take_news(), is_last=True)
        return np.sort(np.concatenate(moving))

    async def _load_from_flash(self, wanted: NDArray[np.bool_]) -> None:
        """Deliver the blocks that no wave of memory delivers."""
        if not np.count_nonzero(wanted):
            return
        context, locations = self._context, NO_LOCATIONS
        try:
            locations = self._locations = await self._locate(wanted)
            is_alone = not context.staging.holds(self._worker)
            per_part = context.blocks_per_part(self._slot_bytes, is_alone=is_alone)
            found = self._admit(locations, per_part)
            if drives := self._direct_drives():
                found = self._leave_drives(locations, found, drives)
            if len(found):
                plan = ReadPlan.of(
                    locations,
                    self._blocks.seeds,
                    found,
                    per_part=per_part,
                    per_first=context.blocks_per_wave(self._slot_bytes),
                )
                lanes = context.parts_at_once(context.settings.reads_ahead, per_part * self._slot_bytes)
                queues = interleave_drives(plan.queues, lanes=lanes)
                await context.tasks.run_all(
                    [self._lane(parts, partial(self._part, plan, drive)) for drive, parts in queues]
                )
        finally:
            context.locator.release(locations.pins)
        self._admission.end_loads()

    async def _lane(self, waiting: deque[_Part], move: Callable[[_Part], Awaitable[None]]) -> None:
        while waiting and not self._deadline.is_over():
            await move(waiting.popleft())

    async def _memory_part(self, wave: MemoryWave) -> None:
        """Deliver the blocks of a wave that are still in memory; the others come last, from flash."""
        staging = self._context.staging
        lease = await self._lease(Purpose.CACHED, None, len(wave.rows), wave.slot_bytes)
        if isinstance(lease, Reason):
            self._refuse(wave.positions, lease)
            return
        try:
            left = wave.left(self._blocks.keys, self._blocks.lengths)
            if len(left.rows) < len(wave.rows):
                self._is_gone[np.setdiff1d(wave.positions, left.positions)] = True
            left.hold(staging, lease)
            self._leases.add(lease)
            await self._deliver(Delivery(self._answer, left.positions, left.tags, left.source), lease)
        finally:
            self._leases.discard(lease)
            staging.release(lease)

    async def _locate(self, wanted: NDArray[np.bool_]) -> BlockLocations:
        within_s = self._deadline.left_s
        if within_s <= 0:
            return NO_LOCATIONS
        locations = await self._context.locator.locate(
            self._context.routes(),
            self._volume,
            self._blocks.spans,
            self._blocks.keys,
            wanted=wanted,
            within_s=within_s,
            pin_s=within_s,
        )
        fits = locations.is_found & (locations.lengths == self._blocks.lengths)
        if np.count_nonzero(fits) < np.count_nonzero(wanted):
            missing = np.flatnonzero(wanted & ~locations.is_found)
            self._answer.decide(missing, BlockState.MISS, locations.reasons[missing])
            self._answer.decide(
                np.flatnonzero(locations.is_found & ~fits), BlockState.MISS, Reason.WRONG_LENGTH
            )
        locations.is_found = fits
        return locations

    def _admit(self, locations: BlockLocations, per_part: int) -> NDArray[np.intp]:
        """Return the located blocks, without blocks that are faster to recompute."""
        found = locations.is_found.nonzero()[0]
        admitted = self._admission.admit(locations, found, at_once=per_part)
        if len(admitted) < len(found):
            self._answer.decide(np.setdiff1d(found, admitted), BlockState.DECLINED, Reason.TOO_SLOW)
        return admitted

    def _direct_drives(self) -> Mapping[DriveId, int]:
        """Return the drives that the worker may read itself: once per get, right before ``_leave_drives``."""
        drives, tenant, context = self._worker.direct_drives, self._worker.tenant, self._context
        if not drives or self._is_left is not None or not self._may_leave_reads():
            return {}
        return drives if context.has_room_for(tenant) and context.may_read_directly(tenant) else {}

    def _may_leave_reads(self) -> bool:
        """Return whether the worker may read blocks itself: not after the get's end."""
        return not (self._request.is_again or self._deadline.is_over())

    def _leave_drives(
        self, locations: BlockLocations, found: NDArray[np.intp], drives: Mapping[DriveId, int]
    ) -> NDArray[np.intp]:
        """Leave located blocks on *drives* to the worker; return the others.

        Pins outlast the answer. The reads count as a request.
        """
        offered = OfferedBlocks.of(locations, found, drives)
        if not len(offered.positions):
            return found
        self._admission.leave_to_worker(locations, offered.positions)
        request, tenants = self._request.request, self._context.staging.tenants
        self._is_left = offered.is_offered
        self._answer.decide(offered.positions, BlockState.HIT, Reason.NONE)
        tenants.add(tenants.requests, self._worker.tenant)
        pins = locations.take_pins(offered.by_drive)
        ended = partial(copy_context().run, partial(self._end_reads, offered, pins))
        self._worker.expect_reads(request, within_s=self._deadline.left_s, ended=ended)
        self._worker.send(offered.message(request))
        return found[~offered.is_offered[found]]

    def _end_reads(self, offer: OfferedBlocks, pins: Pins, report: ExtentsRead | None) -> None:
        """Release the pins, and record the outcomes of the worker's reads."""
        context, tenants = self._context, self._context.staging.tenants
        tenants.remove(tenants.requests, self._worker.tenant)
        context.locator.release(pins)
        if report is None:
            reason = Reason.CANCELLED if self._deadline.left_s else Reason.DEADLINE
            self._outcomes.set(offer.positions, BlockState.LATE, reason)
            self._record(offer.is_offered)
            return
        is_verified, is_lost = offer.divide(report)
        context.counters.hits_on.update(offer.hits_on(is_verified))
        context.counters.get_hits_direct += int(np.count_nonzero(is_verified))
        self._outcomes.set(is_lost, BlockState.MISS, Reason.DRIVE_SUSPECT)
        self._record(is_verified | is_lost)

    async def _part(self, plan: ReadPlan, drive_id: DriveId, part: slice) -> None:
        """Read a part, and deliver its blocks while the read advances."""
        context, positions = self._context, plan.positions[part]
        lease = await self._lease(Purpose.GET, drive_id, len(positions), self._slot_bytes)
        if isinstance(lease, Reason):
            self._refuse(positions, lease)
            return
        self._leases.add(lease)
        self._admission.start_read(drive_id, plan.lengths[part])
        read: PartRead | None = None
        try:
            read = context.begin_read(plan, drive_id, part, lease, tells_progress=not self._arena.polls)
            await self._deliver(Delivery(self._answer, positions, plan.tags[part], drive_id), lease, read)
        finally:
            self._leases.discard(lease)
            keep = None
            if read is not None and context.staging.cache.limit_bytes:
                keep = self._blocks.cache_offer(positions, plan.tags[part], read.reasons() == Reason.NONE)
            context.release(lease, read, keep=keep)

    def _note_lost(self, positions: NDArray[np.intp], read: PartRead) -> None:
        """Note blocks that a read that is over has not delivered."""
        if read.is_good:
            return
        reasons = read.reasons()
        damaged = positions[reasons == Reason.DAMAGED]
        self._context.report_damage(self._locations, self._blocks.keys, self._blocks.seeds, damaged)
        if not self._deadline.is_over():
            lost = reasons != Reason.NONE
            self._answer.decide(positions[lost], BlockState.MISS, reasons[lost])

    async def _deliver(self, part: Delivery, lease: StagingLease, read: PartRead | None = None) -> None:
        """Deliver blocks in memory, or those of a read, each wave as soon as its blocks are there."""
        stream: WaveStream | None = None
        try:
            stream = self._stream(part, lease, None if read is None else read.states)
            if read is not None:
                read.check.listeners.append(stream.look)
                await read.wait()
                if not read.is_abandoned:
                    self._context.staging.end_drive_io(lease)
                read.states = stream.freeze()
                self._note_lost(part.positions, read)
            await until_done(stream.ended)
        except BaseException:  # on any error, the lease must outlive all started work
            if stream is not None:
                stream.stop()
                await until_done(stream.ended)
            if read is not None:
                await until_done(read.ends)
            raise

    def _stream(self, part: Delivery, lease: StagingLease, states: NDArray[np.uint8] | None) -> WaveStream:
        """Begin to move the slots of a lease to the worker; with *states*, as blocks become GOOD."""
        stream = self._arena.stream(
            self._wave(part.positions, lease),
            states,
            per_wave=self._context.blocks_per_wave(lease.slot_bytes),
            clock=self._context.clock,
            report=part.note,
            tell=part.tell,
        )
        self._streams[stream] = part
        stream.ended.add_done_callback(partial(self._end_stream, stream))
        return stream

    def _end_stream(self, stream: WaveStream, _: asyncio.Future[None]) -> None:
        part = self._streams.pop(stream)
        if part.told and not self._deadline.is_over():
            part.decide(())

    def _refuse(self, positions: NDArray[np.intp], why: Reason) -> None:
        if not self._deadline.is_over():
            self._answer.decide(positions, STATES_WITHOUT_LEASE.get(why, BlockState.DECLINED), why)
