"""Session: a connection to one agent, from handshake to loss, and its requests.

Each message goes to the mailbox of its request, after an update of the ledger: slots come free even if no
caller waits for the answer any more. The arena's lock guards the session's bookkeeping.

An agent announces an orderly end and continues to serve for a while. The owner of the session then finds
another agent and retires this session, which ends when unused::

    live --Leaving--> live, told --retire--> retired --unused, or lost--> ended

Each job holds one ``acquire`` from its begin to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca._connection.dial import ControlChannel
from ostraca._connection.io_loop import IoLoop, Reader, Waiters
from ostraca._memory.arena import Arena
from ostraca._memory.inline_arena import InlineArenaEnd, RequestRows
from ostraca._memory.regions import RegionMemory
from ostraca._protocol.operations import NOT_STARTED_CODES, Disconnected, Event
from ostraca._protocol.silence import SilenceDetector
from ostraca._protocol.specs import VolumeKey, VolumeSpec
from ostraca.settings import ClientSettings
from ostraca_fabric.errors import ProtocolError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.ports.transport import ArenaEnd
from ostraca_fabric.telemetry.requests import label_of
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.address import UnixAddress
from ostraca_fabric.wire.codec import TO_WORKER
from ostraca_fabric.wire.frames import encode
from ostraca_fabric.wire.handshake import DIRECT, MEMORY, REGIONS
from ostraca_fabric.wire.messages import (
    DRIVES_MAX,
    REGIONS_BYTES_MAX,
    AnnouncedDrive,
    DirectDrives,
    Failure,
    Fetch,
    Get,
    GetDone,
    GetExtents,
    GetProgress,
    Leaving,
    Message,
    PastSettled,
    Ping,
    Pong,
    PutDone,
    Refused,
    RegionsOffer,
    Settled,
    SettlePast,
)

_UNSENT_BYTES_MIN = 64 << 20
"""Requests and cancels in memory for an agent that has stopped reading for a while."""

_FETCHED_BLOCK_BYTES = 64
"""Memory per block waiting to be sent, beside the block's bytes: a share of a bulk frame, or a frame of its
own. The number of fetched blocks is limited by the slots of the arena.
"""

_Item = TypeVar("_Item")

_NONE_UNSETTLED = np.empty(0, np.uint32)


if TYPE_CHECKING:
    from ostraca._direct.agent_memory import AgentMemoryReader
    from ostraca._direct.direct_reader import DirectReader


class Mailbox(Protocol):
    """Destination of the events of requests."""

    @property
    def reader(self) -> object:
        """The queue of the waiting thread."""

    def put(self, item: tuple[int, Event], /) -> None:
        """Take an event of a request, from the I/O loop's thread; never block."""


class AgentSession:
    """Requests under way with one agent. Thread-safe."""

    def __init__(
        self,
        channel: ControlChannel,
        ends: Mapping[str, ArenaEnd],
        arena: Arena,
        settings: ClientSettings,
        request_ids: Iterator[int],
        worker: str,
        on_leaving: Callable[[AgentSession], None],
    ) -> None:
        """Begin a session over *ends*, the ends offered in the handshake.

        *on_leaving* is called by the reading thread when the agent announces its end, and must not block.
        """
        self.agent = channel.welcome.agent
        self.address = channel.address
        self.limits = channel.welcome.limits
        self.transport = channel.welcome.transport
        self.lost_because = ""
        """Reason for the end of the connection; empty while alive."""

        self.is_silent = False
        """Whether the connection was given up because of a silent agent."""

        self.handles: dict[VolumeKey, int] = {}
        """Handles of the volumes opened on this connection."""

        self.volumes: dict[VolumeKey, VolumeSpec] = {}
        """The same volumes."""

        self.start_id = channel.welcome.start_id
        self._worker = worker
        self._arena = arena
        self._settings = settings
        self._request_ids = request_ids
        self._ends = ends
        self._end = ends[self.transport]
        self._on_leaving = on_leaving
        self._users = 0
        self._is_retired = False
        self._is_over = False
        self._inline = self._end if isinstance(self._end, InlineArenaEnd) else None
        self._mailboxes: dict[int, Mailbox] = {}
        self._inflight: set[int] = set()
        self.memory = self._memory_of(channel)
        """Reader of the agent's memory, where this worker may read it."""

        self.reads_worker = channel.welcome.reads_worker
        """Whether the agent reads the blocks of puts out of this process's memory."""

        self._takes_reads = bool({DIRECT, MEMORY} & set(channel.welcome.features))
        self._takes_regions = REGIONS in channel.welcome.features
        self._told_regions: set[bytes] = set()
        """Metadata of regions told to the agent."""

        self._announced = (-1, False)
        """Version of the drives told to the agent, and whether this worker reads its memory."""

        self._silence = SilenceDetector(
            misses_max=settings.silent_misses_max,
            deadline_min_s=settings.silent_deadline_min_s,
            patience_s=settings.silent_ping_s,
        )
        self._loop = IoLoop(
            channel.stream,
            channel.reader,
            self._end,
            on_message=self._on_message,
            on_loss=self._on_loss,
            pace_s=self._pace_s,
            silent_at_s=self._silent_at_s,
            unsent_bytes_max=_UNSENT_BYTES_MIN + _FETCHED_BLOCK_BYTES * (arena.size_bytes // PAGE_BYTES),
        )
        self._waiters = Waiters(self._loop, self._has_others)
        with arena.lock:
            self._past = arena.ledger.meet_agent(self.agent, self.start_id)
            arena.ledger.tell_changed()
        self._loop.start()
        if self._past:
            request = self.next_request()
            self._inflight.add(request)
            self._loop.send([encode(SettlePast(request))])

    def _memory_of(self, channel: ControlChannel) -> AgentMemoryReader | None:
        memory = channel.welcome.memory
        if memory is None or not isinstance(channel.address, UnixAddress):
            return None
        from ostraca._direct.agent_memory import AgentMemoryReader  # noqa: PLC0415 (few clients use it)

        return AgentMemoryReader.of(memory, channel.stream)

    @property
    def takes_rows(self) -> bool:
        """Whether ``submit`` takes rows: this process itself moves all bytes of this connection."""
        return self._inline is not None

    @property
    def is_alive(self) -> bool:
        """Whether requests can be sent. The value may change at any moment."""
        return not self.lost_because

    def acquire(self) -> bool:
        """Keep an unused session from ending until ``release``.

        Returns False if the session has ended.
        """
        with self._arena.lock:
            if self.lost_because:
                return False
            self._users += 1
            return True

    def acquire_volume(self, volume: VolumeSpec) -> int | None:
        """Acquire the session, and return the volume's handle; None if the volume is not open here."""
        handle = self.handles.get(volume.key)
        return handle if handle is not None and self.acquire() else None

    def release(self) -> None:
        """Undo one ``acquire``."""
        with self._arena.lock:
            self._users -= 1
            if self._is_retired:
                self._arena.ledger.tell_changed()

    def retire(self) -> None:
        """Retire the session in favour of another session with its own ends.

        After the loss of this session, its ends are cut off before its slots count as stranded.
        ``end_unused`` must follow.
        """
        with self._arena.lock:
            self._is_retired = True
            is_over = self._is_over
        self._loop.wake()  # whose thread drives the transport from now on
        if is_over:
            self._cut_off()

    def end_unused(self) -> None:
        """Wait until the session is unused or lost, and end it.

        A session is unused without users and requests, and after the agent's last report on slots.
        ``acquire`` fails from then on.
        """
        with self._arena.changed:
            self._arena.changed.wait_for(lambda: bool(self.lost_because) or self._is_unused)
            self.lost_because = self.lost_because or "another agent has taken over"
        self.close()

    @property
    def _is_unused(self) -> bool:
        """Whether no caller or slot waits for the agent. The lock is held."""
        return not (self._users or self._inflight or self._arena.ledger.is_due(self))

    def label(self, request: int) -> str:
        """Return the name of a request in logs, here and at the agent."""
        return label_of(self._worker, request)

    def next_request(self) -> int:
        """Return an id never used by any request of this client."""
        return next(self._request_ids)

    @property
    def has_room(self) -> bool:
        """Whether the agent takes another request now. Listeners of the ledger hear of later room."""
        return len(self._inflight) < self.limits.inflight_max

    def submit(
        self,
        request: int,
        message: Message,
        mailbox: Mailbox,
        slots: NDArray[np.int64] | None = None,
        rows: RequestRows | None = None,
    ) -> None:
        """Send a request; its events go to *mailbox*.

        ``leave`` must be called once for the request, in any case. If the message can't be encoded, this
        method raises, nothing has changed, and ``leave`` must not be called.

        The taken *slots* belong to the request from here on; ``leave`` gives them back when free. The blocks
        lie in *rows*, if any, which require ``takes_rows``. They are in use until the return of ``leave`` or
        ``forget``.
        """
        frame = encode(message)
        is_first = False
        with self._arena.lock:
            if slots is not None:
                is_first = not self._arena.ledger.is_due(self)
                self._arena.ledger.add(
                    request, slots, agent=self.agent, start_id=self.start_id, connection=self
                )
            if self.lost_because:
                # Never sent, so there is nothing to wait for.
                self._arena.ledger.answer(request, _NONE_UNSETTLED)
                mailbox.put((request, Disconnected()))
                return
            if slots is not None and self._inline is not None:
                if rows is not None:
                    self._inline.bind(request, slots, rows)
                if isinstance(message, Get):
                    self._inline.open(slots, message.slot_bytes)
            self._mailboxes[request] = mailbox
            self._inflight.add(request)
        self._loop.send([frame])
        if self._end.needs_progress and (self._is_retired or (is_first and self._loop.is_led)):
            self._loop.wake()  # the thread that reads sleeps without progress while no slots are in use

    def wait(self, reader: Reader[_Item], *, until_s: float) -> _Item | None:
        """Return the next item of *reader*, as ``Waiters.wait``."""
        return self._waiters.wait(reader, until_s=until_s)

    def resume_reading(self) -> None:
        """Let the I/O thread read at once, while the driver is busy elsewhere."""
        self._loop.resume()

    def _has_others(self, reader: object) -> bool:
        with self._arena.lock:
            return any(mailbox.reader is not reader for mailbox in self._mailboxes.values())

    def report_late(self, sent_s: float) -> None:
        """Note that a request sent at *sent_s*, on the monotonic clock, is late.

        After several late requests without any message, the agent gets a Ping. Without an answer the
        connection is given up as lost.
        """
        with self._arena.lock:
            must_ping = self._silence.report_late(
                sent_s=sent_s, received_s=self._loop.received_s, now_s=time.monotonic()
            )
        if must_ping:
            self._loop.send([encode(Ping(self.next_request()))])
            self._loop.wake()

    def send(self, message: Message) -> None:
        """Send a message without an answer; lost with the connection."""
        self._loop.send([encode(message)])

    def announce_reads(self, direct: DirectReader | None) -> None:
        """Tell the agent what this worker reads itself, where this is news. In the driver's thread."""
        if direct is None and self.memory is None:
            return
        version = 0 if direct is None else direct.version
        reads_memory = self.memory is not None and self.memory.is_usable
        if not self._takes_reads or (version, reads_memory) == self._announced:
            return
        self._announced = version, reads_memory
        drives = () if direct is None else direct.announced()[:DRIVES_MAX]
        self.send(DirectDrives(tuple(AnnouncedDrive(*each) for each in drives), reads_memory))

    def offers(self, region: RegionMemory) -> bool:
        """Return whether requests may name addresses in a region, and tell the agent. In the driver's thread.

        The first call for a region begins its registration, if the caller consents to withheld rows.
        """
        takes_regions = self._takes_regions and self._arena.offers_regions
        if not takes_regions or not region.may_withhold or region.is_ended:
            return False
        metadata = self._end.offer_region(region)
        if metadata is None or len(metadata) > REGIONS_BYTES_MAX:
            return False
        if metadata not in self._told_regions:
            self._told_regions.add(metadata)
            self.send(RegionsOffer(metadata))
        return True

    def leave(self, request: int) -> None:
        """End the caller's interest in a request and its slots. Nothing uses its rows afterwards."""
        self.forget(request)
        with self._arena.lock:
            if not self._arena.ledger.has(request):
                return  # it had no slots
            self._arena.ledger.leave(request)
            is_due = self._arena.ledger.is_due(self)
            self._arena.ledger.tell_changed()
        if is_due and self._end.needs_progress:
            self._loop.wake()

    def forget(self, request: int) -> None:
        """End the caller's wait for a request; its slots stay in use until ``leave``.

        The connection does not use the request's rows afterwards.
        """
        with self._arena.lock:
            self._mailboxes.pop(request, None)
            rows = self._shut_all(request)
        if rows is not None:
            self._loop.detach(rows.memory)

    def break_off(self, cause: str) -> None:
        """End the connection after a protocol error; requests get Disconnected."""
        with self._arena.lock:
            self.lost_because = self.lost_because or cause
        self._loop.break_off(cause)

    def close(self) -> None:
        """End the connection, and wait until nothing arrives any more."""
        self._loop.stop()

    # The rest runs in the thread that does the turns of the I/O loop.

    def _pace_s(self) -> float | None:
        if not self._end.needs_progress:
            return None
        with self._arena.lock:
            if not self._arena.ledger.is_due(self):
                return None
            return self._settings.progress_s if self._mailboxes else self._settings.progress_idle_s

    def _silent_at_s(self) -> float | None:
        if self._silence.pinged_s is None:
            return None
        with self._arena.lock:
            return self._silence.until_s(received_s=self._loop.received_s, accepted_s=self._loop.accepted_s)

    def _on_message(self, payload: bytes) -> None:
        message = TO_WORKER.decode(payload)
        match message:
            case GetProgress() | GetExtents():
                self._on_landed(message)
            case Settled(request=request):
                with self._arena.lock:
                    self._arena.ledger.settle(request)
                    self._arena.ledger.tell_changed()
            case Fetch():
                self._answer(message)
            case Refused():
                self._end_refused(message)
            case Pong():
                pass
            case Leaving():
                self._on_leaving(self)
            case GetDone() | PutDone():
                self._finish(message, message.unsettled)
            case Failure(code=code):
                self._finish(message, b"" if code in NOT_STARTED_CODES else None)
            case PastSettled():
                with self._arena.lock:
                    self._arena.ledger.settle_past(self._past)
                    self._inflight.discard(message.request)
                    self._arena.ledger.tell_changed()
            case _:
                # The answer to a request without slots; for a get or a put, the answer proves nothing.
                self._finish(message, None)

    def _end_refused(self, refused: Refused) -> NoReturn:
        if refused.code == "regions":
            self._arena.stop_offers(refused.message)
        raise ProtocolError(f"{refused.code}: {refused.message}")

    def _on_landed(self, message: GetProgress | GetExtents) -> None:
        """Take a report of landed blocks, or of blocks to read here: from here on their slots are shut."""
        with self._arena.lock:
            slots = self._arena.ledger.slots(message.request)
            if len(slots):
                self._shut(slots[codec.positions(message.positions, len(slots))])
        self._deliver(message.request, message)

    def _shut(self, slots: NDArray[np.int64]) -> None:
        """Stop inline bytes from landing in these slots. The lock is held."""
        if self._inline is not None and len(slots):
            self._inline.shut(slots)

    def _shut_all(self, request: int) -> RequestRows | None:
        """Shut the slots of a request, and return its rows, to be detached. The lock is held."""
        self._shut(self._arena.ledger.slots(request))
        return None if self._inline is None else self._inline.unbind(request)

    def _answer(self, fetch: Fetch) -> None:
        """Send the blocks of an inline agent's Fetch."""
        if self._inline is None:
            raise ProtocolError(f"a Fetch, and blocks cross by {self.transport}")
        self._loop.send_bulk(self._inline.answer(fetch))

    def _finish(self, message: Event, unsettled: bytes | None) -> None:
        """Take the final message of a request; *unsettled* None means every slot."""
        request = message.request  # type: ignore[union-attr]  # only answers arrive here
        with self._arena.lock:
            slots = self._arena.ledger.slots(request)
            positions = (
                np.arange(len(slots), dtype=np.uint32)
                if unsettled is None
                else codec.positions(unsettled, len(slots))
            )
            self._shut(slots)
            self._arena.ledger.answer(request, positions)
            self._inflight.discard(request)
            self._arena.ledger.tell_changed()
        self._deliver(request, message)

    def _deliver(self, request: int, event: Event) -> None:
        with self._arena.lock:
            mailbox = self._mailboxes.get(request)
        if mailbox is not None:
            mailbox.put((request, event))

    def _cut_off(self) -> None:
        """Cut off the ends offered with this session."""
        for end in self._ends.values():
            end.cut_off()

    def _on_loss(self, cause: str) -> None:
        with self._arena.lock:
            self.is_silent = self._loop.is_silent
            self.lost_because = self.lost_because or cause
            self._is_over = True
            is_retired = self._is_retired
        if is_retired:
            self._cut_off()
        with self._arena.lock:
            # Inline bytes came through this connection alone, and its reader is closed.
            if self._inline is not None:
                self._inline.shut_all()
            self._arena.ledger.lose_connection(is_drained=self._inline is not None, connection=self)
            waiting = list(self._mailboxes.items())
            self._inflight.clear()
            self._arena.ledger.tell_changed()
        for request, mailbox in waiting:
            mailbox.put((request, Disconnected()))
