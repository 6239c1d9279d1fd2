"""Workers' connections: what each may do, and what it has open.

A connection belongs to one tenant. Handles of volumes are its own, so no request can name a volume of
another tenant.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ostraca_dpu_agent.mover.request import check_spans
from ostraca_dpu_agent.transfers import CountedPeer
from ostraca_fabric.errors import ConnectError, RefusedError, TransportError, UsageError
from ostraca_fabric.ids import TenantId
from ostraca_fabric.labels import label_of, labelled, worker_name
from ostraca_fabric.wire.messages import (
    Commit,
    EndSession,
    Explain,
    Explained,
    FlashWork,
    FlashWorked,
    Get,
    Inspect,
    Lookup,
    OpenVolume,
    PassedOver,
    PastSettled,
    Place,
    Prefetch,
    PrefetchFor,
    Put,
    Reserve,
    Resolve,
    SettlePast,
    Status,
    StatusDone,
    VolumeOpened,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from ostraca_dpu_agent.gate import Gate
    from ostraca_dpu_agent.mover.mover import Mover
    from ostraca_dpu_agent.neighbours import Neighbours
    from ostraca_dpu_agent.paths.flash_work import FlashWorker
    from ostraca_dpu_agent.settings import RequestSettings
    from ostraca_dpu_agent.volumes import ServedVolume, Volumes
    from ostraca_fabric.connection import ServerConnection
    from ostraca_fabric.ports.transport import Peer, TransferEnd, Transport
    from ostraca_fabric.status import AgentStatus
    from ostraca_fabric.wire.messages import (
        AgentAnswer,
        AgentRequest,
        AnswerToAgent,
        AnswerToOperator,
        GetProgress,
        Hello,
        OperatorRequest,
        OwnerNotice,
        Placed,
        PrefetchDone,
        Settled,
        WorkerNotice,
        WorkerRequest,
    )

    Request = WorkerRequest | AgentRequest | OperatorRequest
    Answer = AgentAnswer | AnswerToAgent | AnswerToOperator
    BlockRequest = Lookup | Get | Put | Prefetch

log = logging.getLogger(__name__)


class Session:
    """One worker's connection."""

    def __init__(self, connection: ServerConnection, hello: Hello, peer: Peer | None) -> None:
        """Begin with no volume open; *peer* is the worker's arena, None when it offered none."""
        self._connection = connection
        self._peer = None if peer is None else CountedPeer(peer)
        self._volumes: list[ServedVolume] = []
        self.tenant = TenantId(hello.tenant)
        self.worker = worker_name(hello.client)
        """What it is called in logs."""
        self.client = hello.client

    @property
    def peer(self) -> Peer:
        """The worker's arena. Raises RefusedError when it has none."""
        if self._peer is None:
            message = "this connection offered no arena, so it moves no blocks: connect with one"
            raise RefusedError("no_arena", message)
        return self._peer

    def stopped(self, request: int) -> asyncio.Future[None]:
        """Return the future that is done when nobody waits for this request any more."""
        return self._connection.cancelled(request)

    def send(self, message: GetProgress | Settled) -> None:
        """Send a message, lost when the connection is."""
        with suppress(ConnectError):
            self._connection.send(message)

    def add(self, volume: ServedVolume, volumes_max: int) -> int:
        """Keep a volume open; returns its handle."""
        if volume in self._volumes:
            return self._volumes.index(volume)
        if len(self._volumes) >= volumes_max:
            message = f"{volumes_max} volumes are open on this connection: use another connection for more"
            raise RefusedError("limit", message)
        self._volumes.append(volume)
        return len(self._volumes) - 1

    def volume(self, handle: int, volumes: Volumes) -> ServedVolume:
        """Return an open volume, of the incarnation that is served now."""
        if not 0 <= handle < len(self._volumes):
            message = f"no volume with handle {handle} is open on this connection: open it first"
            raise RefusedError("unknown_volume", message)
        volume = self._volumes[handle] = volumes.newest(self._volumes[handle])
        return volume

    def is_of(self, other: Session) -> bool:
        """Whether both are connections of one client."""
        return (self.tenant, self.client) == (other.tenant, other.client)

    @property
    def transfers(self) -> frozenset[asyncio.Future[TransferEnd]]:
        """Transfers to and from the arena that are not known to have ended."""
        return frozenset() if self._peer is None else self._peer.under_way

    def close(self) -> None:
        """Start no more transfers to this worker."""
        if self._peer is not None:
            self._peer.close()

    def cut(self) -> None:
        """End the connection, if it is still there: its worker has made another one."""
        self.close()
        self._connection.abort()


class Sessions:
    """Serves the connections of one agent: implements ``connection.Handler``."""

    def __init__(
        self,
        settings: RequestSettings,
        *,
        mover: Mover,
        neighbours: Neighbours,
        volumes: Volumes,
        gate: Gate,
        transports: Mapping[str, Transport],
        status: Callable[[], AgentStatus],
        flash: FlashWorker | None,
    ) -> None:
        """Serve workers through *mover*, as far as *gate* lets them, agents through *neighbours*, operators
        through *flash*; None where this host has no paths of its own.
        """
        self._settings = settings
        self._mover = mover
        self._neighbours = neighbours
        self._volumes = volumes
        self._gate = gate
        self._transports = transports
        self._status = status
        self._flash = flash
        self._sessions: dict[ServerConnection, Session] = {}
        self._gone: list[Session] = []
        """Those whose connection is gone and whose transfers, when it went, were not."""

    @property
    def workers(self) -> int:
        """How many connections offer an arena."""
        return sum(1 for connection in self._sessions if connection.welcome.transport)

    async def on_open(self, connection: ServerConnection, hello: Hello, peer_uid: int | None) -> None:  # noqa: ARG002
        """Attach the worker's arena by the transport chosen, or by the next one offered that works."""
        # The first offer of each transport counts: attaching takes time, and nobody has two arenas.
        first = {offer.transport: offer for offer in reversed(hello.arenas)}
        offers = [
            first.pop(offer.transport)
            for offer in hello.arenas
            if offer.transport in self._transports and offer.transport in first
        ]
        peer = None
        for number, offer in enumerate(offers):
            try:
                peer = await self._transports[offer.transport].attach(
                    offer, self._mover.staging.memory.view, connection
                )
            except TransportError as error:
                if number == len(offers) - 1:
                    raise
                log.warning("%s can't be reached by %s: %s", connection.peer, offer.transport, error)
            else:
                connection.welcome = msgspec.structs.replace(connection.welcome, transport=offer.transport)
                break
        session = self._sessions[connection] = Session(connection, hello, peer)
        if session.tenant:  # a worker's
            self._mover.tenants.opened(session.tenant)

    def handle(self, connection: ServerConnection, request: Request) -> Answer | Awaitable[Answer]:
        """Serve one request."""
        match request:
            case Resolve() | Reserve() | Commit() | Inspect() | PassedOver():
                return self._neighbours.answer(request)
            case PrefetchFor() | Place():
                return self._for_a_tenant(connection, request)
            case Status():
                return StatusDone(request.request, msgspec.msgpack.encode(self._status()))
            case FlashWork():
                return self._flash_worked(request)
            case OpenVolume() | Lookup() | Get() | Put() | Prefetch() | Explain():
                return self._of_worker(self._sessions[connection], request)
            case SettlePast():
                return self._settle_past(self._sessions[connection], request)
            case _:
                message = f"{type(request).__name__} is not answered here"
                raise UsageError(message)

    def on_notice(self, connection: ServerConnection, notice: WorkerNotice | OwnerNotice) -> None:
        """Take a worker's hint, or an owner's notice from another agent."""
        if isinstance(notice, EndSession):
            self._end_session(self._sessions[connection], notice)
        else:
            self._neighbours.notice(notice)

    def on_close(self, connection: ServerConnection) -> None:
        """Forget a connection; its requests under way end as if cancelled."""
        session = self._sessions.pop(connection)
        session.close()
        if session.tenant:
            self._mover.tenants.closed(session.tenant)
        self._gone = [each for each in (*self._gone, session) if each.transfers]

    def _for_a_tenant(
        self, connection: ServerConnection, request: PrefetchFor | Place
    ) -> Awaitable[PrefetchDone | Placed]:
        if isinstance(request, Place):
            return self._neighbours.place(request)
        return self._neighbours.prefetch(request, connection.cancelled(request.request))

    def _end_session(self, session: Session, notice: EndSession) -> None:
        """Hand a hint on. One that can't be meant is of no use, and nobody waits to be told."""
        try:
            volume = session.volume(notice.handle, self._volumes)
            check_spans(volume, notice.spans, blocks_max=self._settings.blocks_max)
        except (RefusedError, UsageError) as error:
            log.debug("%s said that a session ended: %s", session.worker, error)
        else:
            self._mover.end_session(volume, notice.spans)

    async def _settle_past(self, session: Session, request: SettlePast) -> PastSettled:
        """Wait for the transfers of the client's earlier connections, or until it no longer waits itself."""
        if not session.client:
            message = "the Hello named no client, so nobody knows which connections were its own"
            raise UsageError(message)
        known = [*self._gone, *self._sessions.values()]  # in the order in which they were opened
        past = [each for each in known[: known.index(session)] if each.is_of(session)]
        for each in past:
            each.cut()
        stopped = session.stopped(request.request)
        while moving := [end for each in past for end in each.transfers]:
            if stopped.done():
                message = f"{len(moving)} transfers of earlier connections are still under way"
                raise RefusedError("unsettled", message)
            waiting: list[asyncio.Future[Any]] = [*moving, stopped]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return PastSettled(request.request)

    async def _flash_worked(self, request: FlashWork) -> FlashWorked:
        if self._flash is None:
            raise RefusedError("no_paths", "this agent keeps no paths: its drives are those of `ostraca up`")
        answer = await self._flash.answer(request.body, request.deadline_s)
        return FlashWorked(request.request, msgspec.msgpack.encode(answer))

    async def _of_worker(self, session: Session, request: OpenVolume | Explain | BlockRequest) -> AgentAnswer:
        with labelled(label_of(session.worker, request.request)):
            match request:
                case Explain():
                    return await self._explained(session, request)
                case OpenVolume():
                    return await self._opened(session, request)
                case _:
                    return await self._blocks(session, request)

    async def _opened(self, session: Session, request: OpenVolume) -> VolumeOpened:
        volume = await self._volumes.open(session.tenant, request)
        handle = session.add(volume, self._settings.volumes_max)
        log.debug("volume %s/%s opened", session.tenant, volume.record.name)
        return VolumeOpened(request.request, handle, volume.record.incarnation)

    async def _explained(self, session: Session, request: Explain) -> Explained:
        volume = await self._volumes.named(session.tenant, request.volume)
        check_spans(volume, request.spans, blocks_max=self._settings.blocks_max)
        blocks = sum(map(len, request.spans))
        if blocks != 1:
            raise UsageError(f"{blocks} blocks to explain: name one")
        return await self._mover.explain(volume, request)

    async def _blocks(self, session: Session, request: BlockRequest) -> AgentAnswer:
        volume = session.volume(request.handle, self._volumes)
        # Columns and sizes are checked where they are read.
        check_spans(volume, request.spans, blocks_max=self._settings.blocks_max)
        match request:
            case Get():
                return await self._gate.passed(volume, request, partial(self._mover.get, session))
            case Put():
                return await self._gate.passed(volume, request, partial(self._mover.put, session))
            case Lookup():
                return await self._gate.passed(volume, request, partial(self._mover.lookup, session))
            case Prefetch():
                return await self._gate.passed(volume, request, partial(self._mover.prefetch, session))
