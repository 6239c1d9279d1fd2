"""Connections of workers, other agents and operators, and dispatch of their requests.

A worker's connection belongs to a single tenant. Volume handles are per connection, so no request can name
another tenant's volume.

An operator's request for a tenant is handled like another agent's. Requests for workers of other agents
have the limits of this agent's own requests. All such requests of a tenant together hold no more staging
than one worker may.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.adapters.transports.worker_memory import WorkerMemories, WorkerMemoryReader
from ostraca_dpu_agent.datapath.data_path import DataPath
from ostraca_dpu_agent.datapath.requests.worker import ReadsEnded
from ostraca_dpu_agent.paths.flash_work import FlashWorker
from ostraca_dpu_agent.settings import RequestSettings
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_dpu_agent.volumes import ServedVolume, Volumes
from ostraca_fabric.connection import ServerConnection
from ostraca_fabric.errors import ConnectError, RefusedError, TransportError, UnknownVolumeError, UsageError
from ostraca_fabric.model.ids import DriveId, FabricId, TenantId
from ostraca_fabric.ports.transport import BlockStream, RemoteArena, Transport, WaveNews, WaveStream
from ostraca_fabric.runtime.tasks import begun
from ostraca_fabric.tables.slots import Wave
from ostraca_fabric.telemetry.requests import label_of, labelled, worker_name
from ostraca_fabric.telemetry.status import AgentStatus, for_worker
from ostraca_fabric.wire.handshake import REGIONS
from ostraca_fabric.wire.messages import (
    REGION_OFFERS_MAX,
    AgentAnswer,
    AgentRequest,
    AnswerToAgent,
    AnswerToOperator,
    Cancel,
    Commit,
    DirectDrives,
    EndSession,
    Explain,
    Explained,
    ExtentsRead,
    FlashWork,
    FlashWorkResult,
    Get,
    GetExtents,
    GetProgress,
    Hello,
    Inspect,
    Lookup,
    NamesQuery,
    OpenVolume,
    OperatorRequest,
    OwnerNotice,
    PastSettled,
    PlacementAnswer,
    PlacementQuery,
    Prefetch,
    PrefetchDone,
    PrefetchFor,
    Put,
    RegionsOffer,
    Reserve,
    Resolve,
    RingProgressQuery,
    Settled,
    SettlePast,
    StatusDone,
    StatusRequest,
    VolumeOpened,
    WorkerNotice,
    WorkerRequest,
)

Request = WorkerRequest | AgentRequest | OperatorRequest
Answer = AgentAnswer | AnswerToAgent | AnswerToOperator
BlockRequest = Lookup | Get | Put | Prefetch


log = logging.getLogger(__name__)


class TrackedArena:
    """An arena with a record of transfers: implements ``RemoteArena``."""

    def __init__(self, arena: RemoteArena) -> None:
        """Begin with no transfers."""
        self._arena = arena
        self.polls = arena.polls
        self._under_way: set[asyncio.Future[Any]] = set()

    @property
    def under_way(self) -> frozenset[asyncio.Future[Any]]:
        """Transfers and streams not known to have ended; none begins after ``close``."""
        return frozenset(self._under_way)

    def stream(
        self,
        blocks: Wave,
        states: NDArray[np.uint8] | None,
        *,
        per_wave: int,
        clock: Callable[[], float],
        report: Callable[[Sequence[WaveNews]], None],
        tell: Callable[[Sequence[WaveNews]], bool],
    ) -> WaveStream:
        """Start moving blocks as specified by the port."""
        stream = self._arena.stream(blocks, states, per_wave=per_wave, clock=clock, report=report, tell=tell)
        self._track(stream.ended)
        return stream

    def fetch(self, blocks: Wave, *, per_wave: int, arrived: Callable[[int, int], None]) -> BlockStream:
        """Start moving blocks from the worker as specified by the port."""
        stream = self._arena.fetch(blocks, per_wave=per_wave, arrived=arrived)
        self._track(stream.ended)
        return stream

    def offer_regions(self, metadata: bytes) -> None:
        """Let later blocks lie in regions, as specified by the port."""
        self._arena.offer_regions(metadata)

    def close(self) -> None:
        """Close as specified by the port."""
        self._arena.close()

    def _track(self, end: asyncio.Future[Any]) -> None:
        if not end.done():
            self._under_way.add(end)
            end.add_done_callback(self._under_way.discard)


class WorkerSession:
    """Connection of a worker."""

    def __init__(
        self,
        connection: ServerConnection,
        hello: Hello,
        arena: RemoteArena | None,
        memory: WorkerMemoryReader | None,
    ) -> None:
        """Begin without open volumes; *arena* is None without one."""
        self._connection = connection
        self._arena = None if arena is None else TrackedArena(arena)
        self._volumes: list[ServedVolume] = []
        self.tenant = TenantId(hello.tenant)
        self.worker = worker_name(hello.client)
        """Name in logs."""
        self.client = hello.client
        self.memory = memory
        """Reader of the worker's memory; None where this agent does not read it."""

        self._region_offers = 0
        self.has_regions = False
        """Whether the worker has offered regions to the arena's transport."""

        self._direct_drives: Mapping[DriveId, int] = {}
        self.reads_memory = False
        """Whether the worker copies blocks out of the agent's memory itself."""

        self._reads: dict[int, tuple[ReadsEnded, asyncio.TimerHandle]] = {}
        """Blocks under direct reads, by request."""

    @property
    def arena(self) -> RemoteArena:
        """The worker's arena. Raises RefusedError without an arena."""
        if self._arena is None:
            raise RefusedError(
                "no_arena", "this connection has no arena: connect with an arena to move blocks"
            )
        return self._arena

    def stopped(self, request: int) -> asyncio.Future[None]:
        """Return the future that is done when the request is cancelled."""
        return self._connection.cancelled(request)

    def read_directly(self, announced: DirectDrives, fabric: FabricId) -> None:
        """Note the drives of *fabric* that the worker reads itself, in place of earlier ones, and memory."""
        self._direct_drives = {
            DriveId(each.drive): number
            for number, each in enumerate(announced.drives)
            if each.drive and each.fabric == fabric
        }
        self.reads_memory = announced.reads_memory and self._connection.welcome.memory is not None

    @property
    def direct_drives(self) -> Mapping[DriveId, int]:
        """Numbers of the drives that the worker reads itself; none at its limit of requests."""
        is_full = len(self._reads) >= self._connection.welcome.limits.inflight_max
        return {} if is_full else self._direct_drives

    def offer_regions(self, metadata: bytes) -> None:
        """Let blocks of later requests lie in regions of the worker."""
        if self._arena is None or REGIONS not in self._connection.welcome.features:
            return
        self._region_offers += 1
        if self._region_offers > REGION_OFFERS_MAX:
            self._connection.break_off("too many offers of regions on a connection", code="regions")
            return
        self._arena.offer_regions(metadata)
        self.has_regions = True

    def expect_reads(self, request: int, *, within_s: float, ended: ReadsEnded) -> None:
        """Call *ended* as soon as the worker's report on ``GetExtents`` ends the reads of a request.

        The end of the time, of the connection or of the caller's wait ends them without a report.
        """
        self.end_reads(request)
        timer = asyncio.get_running_loop().call_later(within_s, self.end_reads, request)
        self._reads[request] = ended, timer

    def end_reads(self, request: int, report: ExtentsRead | None = None) -> None:
        """End the reads of a request, if any. Raises MalformedError for a senseless report."""
        if request in self._reads:
            ended, timer = self._reads.pop(request)
            timer.cancel()
            ended(report)

    def send(self, message: GetProgress | GetExtents | Settled) -> None:
        """Send a message; a lost connection loses the message."""
        with suppress(ConnectError):
            self._connection.send(message)

    def send_here(self, message: GetProgress) -> bool:
        """Send a message at once, from any thread; return whether it was sent."""
        return self._connection.send_here(message)

    def add(self, volume: ServedVolume, volumes_max: int) -> int:
        """Keep a volume open; return its handle."""
        if volume in self._volumes:
            return self._volumes.index(volume)
        if len(self._volumes) >= volumes_max:
            raise RefusedError(
                "limit", f"{volumes_max} volumes are open on this connection: use another connection for more"
            )
        self._volumes.append(volume)
        return len(self._volumes) - 1

    def volume(self, handle: int, volumes: Volumes) -> ServedVolume:
        """Return an open volume in its current incarnation."""
        if not 0 <= handle < len(self._volumes):
            raise RefusedError(
                "unknown_volume", f"no volume with handle {handle} is open on this connection: open it first"
            )
        volume = self._volumes[handle] = volumes.newest(self._volumes[handle])
        return volume

    @property
    def transfers(self) -> frozenset[asyncio.Future[Any]]:
        """Transfers to and from the arena, not known to have ended."""
        return frozenset() if self._arena is None else self._arena.under_way

    def close(self) -> None:
        """Start no more transfers to this worker, and expect no reports."""
        if self._arena is not None:
            self._arena.close()
        if self.memory is not None:
            self.memory.close()
        for request in list(self._reads):
            self.end_reads(request)

    def abort(self) -> None:
        """End the connection, if still open: the worker has a newer connection."""
        self.close()
        self._connection.abort()


@dataclass(frozen=True, slots=True)
class RemoteWorkers:
    """Holder of staging for all workers of one tenant at other agents."""

    tenant: TenantId


class RequestDispatcher:
    """Requests to an agent: implements ``connection.Handler`` and ``AnswersAgents``."""

    def __init__(
        self,
        settings: RequestSettings,
        *,
        data_path: DataPath,
        owner: OwnerService,
        volumes: Volumes,
        transports: Mapping[str, Transport],
        worker_memories: WorkerMemories,
        status: Callable[[], AgentStatus],
        flash: FlashWorker | None,
    ) -> None:
        """Serve workers, other agents and operators.

        *data_path* serves workers, *owner* serves shards, and *flash* operators.
        *flash* is None if this host has no paths of its own.
        """
        self._settings = settings
        self._data_path = data_path
        self._tenants = data_path.context.staging.tenants
        self._owner = owner
        self._volumes = volumes
        self._transports = transports
        self._worker_memories = worker_memories
        self._status = status
        self._flash = flash
        self._sessions: dict[ServerConnection, WorkerSession] = {}
        self._closing: list[WorkerSession] = []
        """Closed sessions with unfinished transfers."""
        self._stops: set[asyncio.Future[None]] = set()
        """Ends prefetches of agents of this process."""
        self._is_closed = False

    @property
    def workers(self) -> int:
        """Number of connections with an arena."""
        return sum(1 for connection in self._sessions if connection.welcome.transport)

    def answer(self, request: AgentRequest) -> AnswerToAgent | Awaitable[AnswerToAgent]:
        """Answer an agent of this process. Raises as ``OwnerService.answer``."""
        if isinstance(request, PrefetchFor):
            return self._prefetch_until_closed(request)
        if isinstance(request, NamesQuery):
            return self._data_path.names.answer(request)
        return self._owner.answer(request)

    def notice(self, notice: OwnerNotice) -> None:
        """Process a notice of an agent of this process."""
        self._owner.notice(notice)

    def close(self) -> None:
        """Refuse new prefetches of other agents, and end those not bound to a connection."""
        self._is_closed = True
        for stop in self._stops:
            stop.set_result(None)
        self._stops.clear()

    async def on_open(self, connection: ServerConnection, hello: Hello, peer_uid: int | None) -> None:  # noqa: ARG002
        """Attach the worker's arena by the first working transport offered."""
        # Only the first offer of each transport is tried: attaching takes time, and no worker has two arenas.
        first = {offer.transport: offer for offer in reversed(hello.arenas)}
        offers = [
            first.pop(offer.transport)
            for offer in hello.arenas
            if offer.transport in self._transports and offer.transport in first
        ]
        arena = None
        for number, offer in enumerate(offers):
            try:
                arena = await self._transports[offer.transport].attach(
                    offer, self._data_path.context.staging.memory.view, connection
                )
            except TransportError as error:
                if number == len(offers) - 1:
                    raise
                log.warning("%s can't be reached by %s: %s", connection.peer, offer.transport, error)
            else:
                connection.welcome = msgspec.structs.replace(connection.welcome, transport=offer.transport)
                break
        memory = None
        if connection.welcome.reads_worker and hello.memory is not None:
            memory = await self._worker_memories.reader(connection.peer_process, hello.memory)
        connection.welcome = msgspec.structs.replace(connection.welcome, reads_worker=memory is not None)
        session = self._sessions[connection] = WorkerSession(connection, hello, arena, memory)
        if session.tenant:  # a worker's connection
            self._tenants.add(self._tenants.connections, session.tenant)

    def handle(self, connection: ServerConnection, request: Request) -> Answer | Awaitable[Answer]:
        """Serve a request."""
        match request:
            case Resolve() | Reserve() | Commit() | Inspect() | RingProgressQuery() | NamesQuery():
                return self.answer(request)
            case PrefetchFor():
                return self._prefetch_for(request, connection.cancelled(request.request))
            case PlacementQuery():
                return self._place(request)
            case StatusRequest():
                status, tenant = self._status(), self._sessions[connection].tenant
                seen = for_worker(status, tenant) if tenant else status
                return StatusDone(request.request, msgspec.msgpack.encode(seen))
            case FlashWork():
                return self._work_on_flash(request)
            case OpenVolume() | Lookup() | Get() | Put() | Prefetch() | Explain() | SettlePast():
                serving = self._serve_worker(self._sessions[connection], request)
                return begun(serving) if isinstance(request, Lookup | Get | Put) else serving
            case _:
                raise UsageError(f"{type(request).__name__} is not served by this agent")

    def on_notice(self, connection: ServerConnection, notice: WorkerNotice | OwnerNotice) -> None:
        """Process a worker's hint, or another agent's notice to a shard owner."""
        match notice:
            case EndSession():
                self._end_session(self._sessions[connection], notice)
            case DirectDrives():
                fabric = self._data_path.context.routes().map.fabric
                self._sessions[connection].read_directly(notice, fabric)
            case RegionsOffer(metadata=metadata):
                self._sessions[connection].offer_regions(metadata)
            case ExtentsRead() as report:
                self._sessions[connection].end_reads(report.request, report)
            case Cancel(request=request):
                self._sessions[connection].end_reads(request)
            case _:
                self._owner.notice(notice)

    def on_close(self, connection: ServerConnection) -> None:
        """Forget a connection; its requests end as if cancelled."""
        session = self._sessions.pop(connection)
        session.close()
        if session.tenant:
            self._tenants.remove(self._tenants.connections, session.tenant)
        self._closing = [each for each in (*self._closing, session) if each.transfers]

    def _end_session(self, session: WorkerSession, notice: EndSession) -> None:
        """Pass a hint on; ignore an invalid hint, since no answer is expected."""
        try:
            volume = session.volume(notice.handle, self._volumes)
            volume.check_spans(notice.spans, blocks_max=self._settings.blocks_max)
        except (RefusedError, UsageError) as error:
            log.debug("Ignored a session-end hint of %s: %s", session.worker, error)
        else:
            self._data_path.end_session(volume, notice.spans)

    async def _settle_past(self, session: WorkerSession, request: SettlePast) -> PastSettled:
        """Wait for transfers of the client's earlier connections.

        Raises RefusedError if the request is cancelled before their end.
        """
        if not session.client:
            raise UsageError("the Hello has no client name: earlier connections can't be identified")
        known = [*self._closing, *self._sessions.values()]  # in order of opening
        past = [
            each
            for each in known[: known.index(session)]
            if (each.tenant, each.client) == (session.tenant, session.client)
        ]
        for each in past:
            each.abort()
        stopped = session.stopped(request.request)
        while moving := [end for each in past for end in each.transfers]:
            if stopped.done():
                raise RefusedError(
                    "unsettled", f"{len(moving)} transfers of earlier connections are still under way"
                )
            waiting: list[asyncio.Future[Any]] = [*moving, stopped]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return PastSettled(request.request)

    async def _prefetch_for(self, request: PrefetchFor, stopped: asyncio.Future[None]) -> PrefetchDone:
        """Load blocks into the DRAM cache, until *stopped* is done.

        Raises UnknownVolumeError, UsageError for a request that is also invalid from a worker, and
        RefusedError.
        """
        tenant = TenantId(request.tenant)
        with labelled(request.label):
            volume = await self._volumes.find(tenant, request.volume)
            if volume.record.incarnation != request.incarnation:
                raise UnknownVolumeError(
                    "unknown_volume",
                    f"volume {request.volume!r} is known as incarnation {volume.record.incarnation}, not "
                    f"{request.incarnation}: retry later",
                )
            volume.check_spans(request.spans, blocks_max=self._settings.blocks_max)
            return await self._data_path.prefetch_here(
                volume, request, holder=RemoteWorkers(tenant), stopped=stopped
            )

    async def _prefetch_until_closed(self, request: PrefetchFor) -> PrefetchDone:
        if self._is_closed:
            raise RefusedError("overloaded", "this agent is stopping: use another agent")
        stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stops.add(stop)
        try:
            return await self._prefetch_for(request, stop)
        finally:
            self._stops.discard(stop)

    async def _place(self, request: PlacementQuery) -> PlacementAnswer:
        """Return the placement of a block, without asking its shard owner.

        The answer therefore does not reveal whether the block exists. Raises UnknownVolumeError,
        UsageError and RefusedError.
        """
        volume = await self._volumes.find(TenantId(request.tenant), request.volume)
        volume.check_single_block(request.spans)
        return PlacementAnswer(
            request.request, msgspec.msgpack.encode(self._data_path.places(volume, request.spans))
        )

    async def _work_on_flash(self, request: FlashWork) -> FlashWorkResult:
        if self._flash is None:
            raise RefusedError(
                "no_paths", "this agent has no paths of its own: `ostraca up` opened its drives"
            )
        answer = await self._flash.answer(request.body, request.deadline_s)
        return FlashWorkResult(request.request, msgspec.msgpack.encode(answer))

    async def _serve_worker(
        self, session: WorkerSession, request: OpenVolume | Explain | SettlePast | BlockRequest
    ) -> AgentAnswer:
        with labelled(label_of(session.worker, request.request)):
            match request:
                case Explain():
                    return await self._explain(session, request)
                case OpenVolume():
                    return await self._open_volume(session, request)
                case SettlePast():
                    return await self._settle_past(session, request)
                case _:
                    return await self._serve_blocks(session, request)

    async def _open_volume(self, session: WorkerSession, request: OpenVolume) -> VolumeOpened:
        volume = await self._volumes.open(session.tenant, request)
        handle = session.add(volume, self._settings.volumes_max)
        log.debug("volume %s/%s opened", session.tenant, volume.record.name)
        return VolumeOpened(request.request, handle, volume.record.incarnation)

    async def _explain(self, session: WorkerSession, request: Explain) -> Explained:
        volume = await self._volumes.find(session.tenant, request.volume)
        volume.check_single_block(request.spans)
        return await self._data_path.explain(volume, request)

    async def _serve_blocks(self, session: WorkerSession, request: BlockRequest) -> AgentAnswer:
        volume = session.volume(request.handle, self._volumes)
        # Columns and sizes are checked by their readers.
        volume.check_spans(request.spans, blocks_max=self._settings.blocks_max)
        match request:
            case Get():
                return await self._data_path.get(session, volume, request)
            case Put():
                return await self._data_path.put(session, volume, request)
            case Lookup():
                return await self._data_path.lookup(session, volume, request)
            case Prefetch():
                return await self._data_path.prefetch(session, volume, request)
