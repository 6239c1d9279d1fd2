"""Services for requests, and their deadlines.

A request is *over* once answered. Its waves may continue, since neither an I/O nor a transfer can be
cancelled. A wave checks ``is_over`` before any new step, and frees its memory after the end of its last
step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.admission import LatencyEstimator
from ostraca_dpu_agent.datapath.commits import Commits
from ostraca_dpu_agent.datapath.drive_io import DriveIO, PartRead, ReadPlan, WriteQueue
from ostraca_dpu_agent.datapath.location.locator import Locator
from ostraca_dpu_agent.datapath.location.routing import BlockLocations, Routes
from ostraca_dpu_agent.datapath.requests.counters import DataPathCounters
from ostraca_dpu_agent.datapath.requests.worker import Holder
from ostraca_dpu_agent.datapath.staging.cache import CacheOffer
from ostraca_dpu_agent.datapath.staging.leases import Purpose, StagingLease
from ostraca_dpu_agent.datapath.staging.memory_waves import MemoryWave, find_in_memory
from ostraca_dpu_agent.datapath.staging.staged import StagedBlocks
from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_fabric.model.direct_reads import DirectReadPermission
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.ids import AgentId, DriveId, TenantId
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.ports.owners import LocalShards, Owners
from ostraca_fabric.runtime.tasks import Tasks, completed, until_done
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.tables.digests import TagCheck
from ostraca_fabric.telemetry.explain import EventKind
from ostraca_fabric.telemetry.requests import EventRing
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import Damage, GetProgress

_CHECK_THREADS = 2

_PROGRESSES = 4
"""Times that the progress of a read is told: each costs the event loop a turn."""

_KINDS = {
    "lookup": EventKind.LOOKED_UP,
    "get": EventKind.GOT,
    "put": EventKind.PUT,
    "prefetch": EventKind.PREFETCHED,
    "shadow_lookup": EventKind.SHADOWED,
    "shadow_get": EventKind.SHADOWED,
}


class Deadline:
    """Deadline and end of a request."""

    def __init__(self, clock: Callable[[], float], *, until_s: float, stopped: asyncio.Future[None]) -> None:
        """Run until *until_s* on *clock*, or until *stopped* is done.

        After *stopped*, no caller wants the answer.
        """
        self._clock = clock
        self._until_s = until_s
        self.stopped = stopped
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the request has been answered, or is about to be."""

    def is_over(self) -> bool:
        """Whether ``over`` is done."""
        return self.over.done()

    @property
    def left_s(self) -> float:
        """Remaining time; never negative."""
        return max(0.0, self._until_s - self._clock())

    async def wait(self, task: asyncio.Future[Any]) -> None:
        """Wait for a task, the deadline or ``stopped``; then be over. Raises the exception of the task."""
        loop = asyncio.get_running_loop()
        late: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(self.left_s, late.set_result, None)
        try:
            if task.done():  # else a caller that asks again at once keeps the loop to itself
                await asyncio.sleep(0)
            await until_done(task, self.stopped, late)
            if task.done():
                task.result()
        finally:
            self.over.set_result(None)
            timer.cancel()


class RequestContext:
    """Services for requests. Use on the event loop's thread only."""

    def __init__(  # noqa: PLR0913 (the services of a data path)
        self,
        agent: AgentId,
        settings: AgentSettings,
        *,
        staging: Staging,
        drives: Mapping[DriveId, Drive],
        owners: Owners,
        here: LocalShards,
        routes: Callable[[], Routes],
        clock: Callable[[], float],
        events: EventRing,
        membership: Membership,
    ) -> None:
        """Work with the newest *routes*, the shards *here*, and the live settings of *membership*.

        The controller keeps *drives* current.
        """
        self.settings = settings.flow
        self.hold_s = settings.owner.hold_s
        self.staging = staging
        self.drives = drives
        self.owners = owners
        self.routes = routes
        self.clock = clock
        self.events = events
        self._membership = membership
        self._direct_reads = DirectReadPermission()
        self.staged = StagedBlocks()
        self.locator = Locator(agent, owners, drives, here)
        self.estimator = LatencyEstimator(settings.flow.wave_bytes, threading.Lock())
        self.writes = WriteQueue(
            wait_s=self.settings.write_behind_s,
            wait_bytes_max=min(self.settings.put_group_bytes, staging.put_bytes_max // 4),
        )
        staging.on_wait = self.writes.flush
        self.counters = DataPathCounters(
            staging.cache.prefetched, self.estimator.estimates, lambda: self.locator.found_earlier
        )
        self.tasks = Tasks("the data path")
        self.commits = Commits(owners, self.tasks, clock)
        self.checkers = ThreadPoolExecutor(
            _CHECK_THREADS, thread_name_prefix="ostraca-check", initializer=show_name, initargs=("check",)
        )
        """Threads for checks of many bytes."""

    async def close(self, *, within_s: float) -> bool:
        """Wait for the end of all work; return whether all has ended."""
        self.writes.flush()
        ended = await self.tasks.finish(within_s=within_s)
        self.checkers.shutdown(wait=False)
        return ended

    @property
    def requests_max(self) -> int:
        """Largest number of requests under way."""
        return self._membership.overrides.live.requests_max or self.settings.requests_max

    @property
    def deadline_max_s(self) -> float:
        """Upper bound of deadlines."""
        return self._membership.overrides.live.deadline_max_s or self.settings.deadline_max_s

    def has_room_for(self, tenant: TenantId) -> bool:
        """Return whether the tenant may have one more request under way."""
        tenants = self.staging.tenants
        return tenants.may_add(tenants.requests, tenant, self.requests_max)

    def may_read_directly(self, tenant: TenantId) -> bool:
        """Return whether workers of this tenant may read extents from drives now.

        False while the agent may lack news of the store, such as a second tenant.
        """
        membership = self._membership
        is_allowed = self._direct_reads.allows(membership.overrides, membership.volumes, tenant)
        return is_allowed and not membership.trouble

    def start_deadline(self, deadline_s: float, stopped: asyncio.Future[None]) -> Deadline:
        """Start the clock of a request."""
        allowed_s = min(deadline_s, self.deadline_max_s) - self.settings.answer_margin_s
        return Deadline(self.clock, until_s=self.clock() + allowed_s, stopped=stopped)

    def record(
        self, operation: str, keys: NDArray[np.uint8], outcomes: Outcomes, good_bytes: int = 0
    ) -> None:
        """Count and record final outcomes of blocks, and bytes moved or stored.

        Rechecks are no events: their number would overwrite all others.
        """
        self.counters.count(operation, outcomes, good_bytes)
        if operation in _KINDS:
            self.events.record(_KINDS[operation], keys, outcomes.states, outcomes.reasons)

    def find_in_memory(
        self, keys: NDArray[np.uint8], lengths: NDArray[np.uint32]
    ) -> tuple[list[MemoryWave], NDArray[np.bool_]]:
        """Find staged and cached blocks; return them, and which blocks are in memory."""
        cache = self.staging.cache
        return find_in_memory(self.staged, cache, keys, lengths, self.blocks_per_part)

    def places(self, request: int, wave: MemoryWave) -> GetProgress:
        """Return where blocks of a get lie in this agent's memory, and count them as hits of a worker."""
        counters, blocks = self.counters, len(wave.rows)
        counters.hits_on[wave.source] += blocks
        counters.get_hits_direct += blocks
        return GetProgress(
            request,
            wave.positions.astype(codec.U32).tobytes(),
            wave.tags.tobytes(),
            wave.use().astype(codec.U64).tobytes(),
        )

    def blocks_per_wave(self, slot_bytes: int) -> int:
        """Return the number of slots of this size in a wave."""
        return max(1, self.settings.wave_bytes // slot_bytes)

    def blocks_per_put(self, slot_bytes: int) -> int:
        """Return the number of slots of this size in a group of a put.

        A group never exceeds the most that staging lends to puts.
        """
        return max(1, min(self.settings.put_group_bytes, self.staging.put_bytes_max) // slot_bytes)

    def blocks_per_part(self, slot_bytes: int, *, is_alone: bool = True) -> int:
        """Return the number of slots of this size in a part of a get.

        Parts are half as large unless the get *is_alone*: later parts wait for the staging of earlier ones.
        """
        part_bytes = min(self.settings.get_part_bytes, self.staging.limit_bytes // 8)
        wanted_bytes = part_bytes if is_alone else part_bytes // 2
        return max(self.blocks_per_wave(slot_bytes), wanted_bytes // slot_bytes)

    def parts_at_once(self, waves: int, part_bytes: int) -> int:
        """Return the number of parts of as many bytes as *waves*, one at least."""
        return max(1, waves * self.settings.wave_bytes // part_bytes)

    async def lease(
        self,
        purpose: Purpose,
        drive_id: DriveId | None,
        count: int,
        slot_bytes: int,
        *,
        holder: Holder,
        deadline: Deadline,
        within_s: float | None = None,
    ) -> StagingLease | Reason:
        """Lease staging, for blocks of a drive if given, as ``Staging.lease``, while the request lasts."""
        drive, given_up = None if drive_id is None else self.drives.get(drive_id), None
        if drive is not None:
            is_put = purpose is Purpose.PUT
            if drive.refuses_writes if is_put else drive.refuses_reads:
                return Reason.DRIVE_SUSPECT
            given_up = drive.writes_given_up if is_put else drive.reads_given_up
        if deadline.is_over():
            return Reason.DEADLINE
        lease = await self.staging.lease(
            count,
            slot_bytes,
            purpose,
            holder=holder,
            tenant=holder.tenant,
            within_s=deadline.left_s if within_s is None else within_s,
            drive=drive_id,
            given_up=given_up,
        )
        if isinstance(lease, StagingLease) and deadline.is_over():
            self.staging.release(lease)
            return Reason.DEADLINE
        return lease

    def begin_read(
        self,
        plan: ReadPlan,
        drive_id: DriveId,
        part: slice,
        lease: StagingLease,
        *,
        tells_progress: bool = False,
    ) -> PartRead:
        """Begin to read a part of a plan into the lease's slots, in order.

        If the drive reads nothing now, the read is over without a block. With *tells_progress*, listeners of
        the read's check are told about progress. The duration is measured, unless the read is abandoned.
        """
        drive, lengths = self.drives.get(drive_id), plan.lengths[part]
        pieces = Pieces(self.staging.array, lease.offsets, plan.drive_offsets[part], plan.page_lengths[part])
        part_bytes = int(lengths.sum())
        progress_bytes = part_bytes // _PROGRESSES if tells_progress else 0
        check = TagCheck(pieces, lengths, plan.seeds[part], plan.tags[part], progress_bytes)
        if drive is None or drive.refuses_reads:
            why = Reason.DRIVE_ERROR if drive is None else Reason.DRIVE_SUSPECT
            return PartRead(completed(np.zeros(len(pieces), np.bool_)), None, check=check, why=why)
        queue = self.estimator.drives[drive_id]
        read = PartRead(drive.submit_read(pieces, check), drive.reads_given_up, check=check)

        def ended(_: asyncio.Future[NDArray[np.bool_]]) -> None:
            if read.is_abandoned:
                queue.abandon(part_bytes)
            else:
                queue.end(self.clock(), part_bytes)

        queue.begin(self.clock(), part_bytes)
        read.ends.add_done_callback(ended)
        return read

    def release(self, lease: StagingLease, io: DriveIO | None, *, keep: CacheOffer | None) -> None:
        """Release a lease, as ``Staging.release``.

        The release waits for the end of an I/O abandoned because of a silent drive.
        """
        if io is not None and io.is_abandoned:
            self.staging.abandon_to_drive(lease)
            self.tasks.spawn(self._release_late(lease, io))
        else:
            self.staging.release(lease, keep=keep)

    async def _release_late(self, lease: StagingLease, io: DriveIO) -> None:
        await until_done(io.ends)
        self.staging.release(lease)

    def report_damage(
        self,
        locations: BlockLocations,
        keys: NDArray[np.uint8],
        seeds: NDArray[np.uint64],
        positions: NDArray[np.intp],
    ) -> None:
        """Count damaged blocks, and tell their owners."""
        self.counters.damaged += len(positions)
        for position in positions.tolist():
            source = locations.sources[int(locations.source[position])]
            damage = Damage(
                shard=source.shard,
                key=keys[position].tobytes(),
                offset=int(locations.offsets[position]),
                length=int(locations.lengths[position]),
                generation=int(locations.generations[position]),
                tag=locations.tags[position].tobytes(),
                seed=int(seeds[position]),
            )
            self.owners.tell(source.owner, damage)
