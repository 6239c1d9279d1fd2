"""Shared parts of requests: blocks, deadline, counters and services.

A request is *over* once answered. Its waves may continue, since neither an I/O nor a transfer can be
cancelled. A wave checks ``is_over`` before any new step, and frees its memory after the end of its last
step.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.admission import LatencyEstimator
from ostraca_dpu_agent.datapath.commits import Commits
from ostraca_dpu_agent.datapath.flash_io import DriveIO, PartReader, WriteQueue
from ostraca_dpu_agent.datapath.location.locator import Locator
from ostraca_dpu_agent.datapath.location.routing import BlockLocations, Routes
from ostraca_dpu_agent.datapath.staging.cache import CacheOffer
from ostraca_dpu_agent.datapath.staging.leases import StagingLease
from ostraca_dpu_agent.datapath.staging.staged import StagedBlocks
from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.direct_reads import DirectReadPermission
from ostraca_fabric.model.extent import rounded_up
from ostraca_fabric.model.ids import AgentId, DriveId, TenantId
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.ports.owners import LocalShards, Owners
from ostraca_fabric.ports.transport import BlockStream, RemoteArena
from ostraca_fabric.runtime.tasks import Tasks, until_done
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.tables.digests import TagCheck, derive_keys, tag_seeds
from ostraca_fabric.telemetry.explain import EventKind
from ostraca_fabric.telemetry.requests import OTHER_STATES, STATES, EventRing, OperationTally, Tally
from ostraca_fabric.telemetry.status import AgentCounters, EstimateCounters, PrefetchCounters
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import Damage, ExtentsRead, Get, GetExtents, GetProgress, Put, Settled

_TransferRequest = TypeVar("_TransferRequest", bound="Get | Put")

_CHECK_THREADS = 2

_KINDS = {
    "lookup": EventKind.LOOKED_UP,
    "get": EventKind.GOT,
    "put": EventKind.PUT,
    "prefetch": EventKind.PREFETCHED,
    "shadow_lookup": EventKind.SHADOWED,
    "shadow_get": EventKind.SHADOWED,
}


ReadsEnded = Callable[["ExtentsRead | None"], None]
"""Takes the worker's report on direct reads; None without a report. Raises MalformedError."""


class Holder(Protocol):
    """Holder of a request's staging: a worker, or all workers of a tenant at other agents."""

    def __hash__(self) -> int:
        """Distinguish holders."""

    @property
    def tenant(self) -> TenantId:
        """Tenant whose share is used."""


class ReadableMemory(Protocol):
    """Memory of a worker on this host, for puts."""

    def fetch(self, check: TagCheck, addresses: NDArray[np.uint64]) -> BlockStream:
        """Start copying the blocks of *check* from *addresses*, and checking each: shape (n,)."""


class WorkerConnection(Holder, Protocol):
    """Origin of a request, and holder of its staging."""

    @property
    def arena(self) -> RemoteArena:
        """The worker's arena. Raises RefusedError without an arena."""

    @property
    def memory(self) -> ReadableMemory | None:
        """The worker's memory, where this agent reads it."""

    @property
    def has_regions(self) -> bool:
        """Whether requests may name addresses in regions of the worker, for the transport of the arena."""

    def stopped(self, request: int) -> asyncio.Future[None]:
        """Return the future that is done when the worker cancels this request."""

    @property
    def direct_drives(self) -> Mapping[DriveId, int]:
        """Numbers of the drives that the worker reads itself; none at its limit of requests."""

    @property
    def reads_memory(self) -> bool:
        """Whether the worker copies blocks out of the agent's memory itself."""

    def expect_reads(self, request: int, *, within_s: float, ended: ReadsEnded) -> None:
        """Call *ended* as soon as the worker's report on ``GetExtents`` ends the reads of a request.

        The end of the time, of the connection or of the caller's wait ends them without a report.
        """

    def end_reads(self, request: int) -> None:
        """End the reads of a request without a report, if any are expected."""

    def send(self, message: GetProgress | GetExtents | Settled) -> None:
        """Send a message; a lost connection loses the message."""

    def send_here(self, message: GetProgress) -> bool:
        """Send a message at once, from any thread; return whether it was sent."""


class RequestBlocks:
    """Blocks of a request, as columns."""

    def __init__(
        self, volume: ServedVolume, spans: Sequence[Span], lengths: NDArray[np.uint32], equal_bytes: int = 0
    ) -> None:
        """Derive the keys; *lengths* has one value per block."""
        self.spans = spans
        self.lengths = lengths
        self.equal_bytes = equal_bytes
        """Length of every block, 0 if lengths differ or are unknown: the usual request needs no sums."""

        self.keys = derive_keys(volume.secret, spans)
        """Shape (n, 16)."""
        self.tenant = volume.record.tenant
        self._identity = volume.identity

    @classmethod
    def of(cls, volume: ServedVolume, spans: Sequence[Span], lengths: bytes) -> RequestBlocks:
        """Parse a request's columns. Raises MalformedError for a mismatch."""
        column = codec.u32(lengths, sum(map(len, spans)))
        first = lengths[: codec.U32.itemsize]
        equal_bytes = int(column[0]) if len(column) and lengths == first * len(column) else 0
        return cls(volume, spans, column, equal_bytes)

    def total_bytes(self, positions: NDArray[np.intp]) -> int:
        """Return the bytes of blocks."""
        return len(positions) * self.equal_bytes or int(self.lengths[positions].sum())

    @property
    def longest_bytes(self) -> int:
        """Largest length; 1 without blocks."""
        return self.equal_bytes or int(self.lengths.max(initial=1))

    @property
    def shortest_bytes(self) -> int:
        """Smallest length; 1 without blocks."""
        return self.equal_bytes or int(self.lengths.min(initial=self.longest_bytes))

    @cached_property
    def seeds(self) -> NDArray[np.uint64]:
        """Tag seeds of the blocks, made on first use: cached blocks need none here."""
        return tag_seeds(self._identity, self.spans, self.lengths)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.keys)


class Deadline:
    """Deadline and end of a request."""

    def __init__(self, clock: Callable[[], float], *, until_s: float, stopped: asyncio.Future[None]) -> None:
        """Run until *until_s* on *clock*, or until *stopped* is done.

        After *stopped*, no caller wants the answer.
        """
        self._clock = clock
        self._until_s = until_s
        self.stopped = stopped
        self._is_over = False

    def is_over(self) -> bool:
        """Whether the request has been answered, or is about to be."""
        return self._is_over

    @property
    def left_s(self) -> float:
        """Remaining time; never negative."""
        return max(0.0, self._until_s - self._clock())

    async def wait(self, tasks: Collection[asyncio.Future[Any]]) -> None:
        """Wait for all tasks, the deadline or ``stopped``; then be over.

        Raises the exception of any task.
        """
        waiting, loop = set(tasks), asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def be_over() -> None:
            if not over.done():
                over.set_result(None)

        def ended(task: asyncio.Future[Any]) -> None:
            waiting.discard(task)
            has_crashed = not task.cancelled() and task.exception() is not None
            if not waiting or has_crashed or task is self.stopped:
                be_over()

        for task in (*waiting, self.stopped):
            task.add_done_callback(ended)
        timer = loop.call_later(self.left_s, be_over)
        try:
            if waiting:
                await over
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            self._is_over = True
            timer.cancel()
            self.stopped.remove_done_callback(ended)


class DataPathCounters:
    """Counters since the start, updated by requests, for status and metrics."""

    def __init__(
        self,
        prefetched: PrefetchCounters,
        estimates: EstimateCounters,
        found_earlier: Callable[[], int],
    ) -> None:
        """Begin at zero.

        *prefetched*, *estimates* and *found_earlier* are counted by the DRAM cache, the latency estimator
        and the locator.
        """
        self._found_earlier = found_earlier
        self._prefetched = prefetched
        self._estimates = estimates
        self.tallies = {operation: Tally(operation) for operation in (*STATES, *OTHER_STATES)}
        self.get_hits_from_cache = 0
        self.get_hits_from_staging = 0
        self.get_hits_direct = 0
        """Blocks left to workers that read them themselves: those on drives once read."""

        self.hits_on: Counter[DriveId] = Counter()
        """Blocks found by gets, per drive."""

        self.damaged = 0
        """Blocks from flash with a wrong tag."""

    def count_cached(self, blocks: int) -> None:
        """Count hits of the DRAM cache."""
        self.get_hits_from_cache += blocks

    def count_staged(self, blocks: int) -> None:
        """Count hits of staged blocks."""
        self.get_hits_from_staging += blocks

    def count_direct(self, blocks: int) -> None:
        """Count hits that a worker reads, beside their source."""
        self.get_hits_direct += blocks

    def hits_counter(self, drive: DriveId) -> Callable[[int], None]:
        """Return the counter of hits on a drive."""

        def count(blocks: int) -> None:
            self.hits_on[drive] += blocks

        return count

    def count(self, operation: str, outcomes: Outcomes, good_bytes: int = 0) -> None:
        """Count final outcomes of blocks, and bytes moved or stored."""
        tally = self.tallies[operation]
        tally.count(outcomes.states, outcomes.reasons)
        tally.bytes += good_bytes

    def decline(self, operation: str, blocks: int, reason: Reason) -> Outcomes:
        """Count and return a decline of all blocks."""
        outcomes = Outcomes.filled(blocks, (STATES | OTHER_STATES)[operation]["DECLINED"], reason)
        self.count(operation, outcomes)
        return outcomes

    def snapshot(self) -> AgentCounters:
        """Return the most used counters."""
        get, put = self.tallies["get"], self.tallies["put"]
        return AgentCounters(
            get_hits=get.of(BlockState.HIT),
            get_hits_from_cache=self.get_hits_from_cache,
            get_misses=get.of(BlockState.MISS),
            get_late=get.of(BlockState.LATE),
            get_declined=get.of(BlockState.DECLINED),
            get_bytes=get.bytes,
            put_committed=put.of(PutState.COMMITTED),
            put_exists=put.of(PutState.EXISTS),
            put_declined=put.of(PutState.DECLINED),
            put_bytes=put.bytes,
            damaged=self.damaged,
            found_earlier=self._found_earlier(),
            prefetched=msgspec.structs.replace(self._prefetched),
            estimates=msgspec.structs.replace(self._estimates),
            get_hits_from_staging=self.get_hits_from_staging,
            get_hits_direct=self.get_hits_direct,
        )

    def operations(self) -> tuple[OperationTally, ...]:
        """Return all counters; those of shadow mode only if not zero."""
        counted = [tally.snapshot() for tally in self.tallies.values()]
        return tuple(each for each in counted if each.operation in STATES or each.blocks)


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
        self.reader = PartReader(staging, drives, self.estimator, clock)
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

    def release(self, lease: StagingLease, ios: Sequence[DriveIO], *, keep: CacheOffer | None) -> None:
        """Release a lease, as ``Staging.release``.

        The release waits for the end of I/Os abandoned because of a silent drive.
        """
        abandoned = [io for io in ios if io.is_abandoned]
        if abandoned:
            self.staging.abandon_to_drive(lease)
            self.tasks.spawn(self._release_late(lease, abandoned))
        else:
            self.staging.release(lease, keep=keep)

    async def _release_late(self, lease: StagingLease, ios: Sequence[DriveIO]) -> None:
        await asyncio.wait([io.ends for io in ios])
        self.staging.release(lease)

    def report_damage(self, locations: BlockLocations, blocks: RequestBlocks, position: int) -> None:
        """Count a damaged block, and tell its owner."""
        self.counters.damaged += 1
        source = locations.sources[int(locations.source[position])]
        self.owners.tell(
            source.owner,
            Damage(
                shard=source.shard,
                key=blocks.keys[position].tobytes(),
                offset=int(locations.offsets[position]),
                length=int(locations.lengths[position]),
                generation=int(locations.generations[position]),
                tag=locations.tags[position].tobytes(),
                seed=int(blocks.seeds[position]),
            ),
        )


class TransferRun(Generic[_TransferRequest]):
    """Common part of a get and a put: blocks, their places at the worker, transfers and outcomes."""

    def __init__(
        self,
        context: RequestContext,
        worker: WorkerConnection,
        volume: ServedVolume,
        request: _TransferRequest,
        deadline: Deadline,
        *,
        late: IntEnum,
        needs_arena: bool = True,
    ) -> None:
        """Parse the request; begin with *late* as the state of every block.

        Raises MalformedError for mismatched columns, UsageError for impossible sizes, and RefusedError for
        a worker without a needed arena.
        """
        self._context = context
        self._worker = worker
        if needs_arena:
            self._arena = worker.arena
        self._volume = volume
        self._request: _TransferRequest = request
        self._deadline = deadline
        self._blocks = RequestBlocks.of(volume, request.spans, request.lengths)
        count, longest_bytes = len(self._blocks), self._blocks.longest_bytes
        if count:
            volume.check_sizes(self._blocks.shortest_bytes, longest_bytes, request.slot_bytes)
        self._slots = codec.u64(request.addresses or request.slots, count).astype(np.int64)
        """Offsets in the worker's arena, or addresses in its memory."""

        self._slot_bytes = rounded_up(longest_bytes)
        self._outcomes = Outcomes.filled(count, late, Reason.DEADLINE)
        self._leases: set[StagingLease] = set()
        """Leases to quarantine if the request ends before their transfers."""

    def _is_in_regions(self) -> bool:
        """Return whether the blocks lie in regions. Raises UsageError without regions."""
        if self._request.addresses and not self._worker.has_regions:
            raise UsageError("addresses in memory that this agent does not reach: name slots alone")
        return bool(self._request.addresses)

    def _quarantine(self) -> None:
        """Quarantine the memory of unfinished transfers."""
        for lease in self._leases:
            self._context.staging.quarantine(lease)

    def _send_settled(self, _run: asyncio.Future[None]) -> None:
        self._worker.send(Settled(self._request.request))


async def run_all(tasks: Tasks, coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at once, the last in this task; then raise an exception of any of them."""
    if not coroutines:
        return
    others = [tasks.spawn(each) for each in coroutines[:-1]]
    try:
        await coroutines[-1]
    finally:
        if others:
            await wait_for_all(others)


async def wait_for_all(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait for the end of all tasks, then raise an exception of any task."""
    for task in tasks:
        await until_done(task)
    for task in tasks:
        task.result()


def cache_offer(
    blocks: RequestBlocks,
    positions: NDArray[np.intp],
    tags: NDArray[np.uint8],
    is_kept: NDArray[np.bool_],
    *,
    uses: int = 1,
) -> CacheOffer:
    """Offer the blocks of a wave to the DRAM cache, for ``Staging.release``.

    *positions* are the wave's blocks in the request, and *tags* (n, 16) those of the wave. *is_kept* has a
    value per block of the wave and is read only at the release.
    """
    return CacheOffer(blocks.keys[positions], tags, blocks.lengths[positions], is_kept, uses, blocks.tenant)
