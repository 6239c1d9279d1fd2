"""A session: one connection to one agent, from its handshake to its loss, and the requests on it.

It hands each message to the mailbox of the request it answers, and the ledger learns from it first: slots
come free even when nobody waits for the answer any more. Its books are under the arena's lock.

An agent that ends in order says so, and goes on serving for a while. Then whoever made the session finds
another one and retires this one, which ends when nobody uses it any more::

    live --Leaving--> live, told --retire--> retired --nobody uses it, or lost--> ended

Who begins a batch on it says ``take_up`` before and ``put_down`` at its end.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ostraca.core.events import Disconnected, Event
from ostraca.core.operations import NOT_STARTED_CODES
from ostraca.core.silence import Silence
from ostraca.pump import Pump
from ostraca.waiting import Waiting
from ostraca_fabric.adapters.inline_arena import InlineArenaEnd
from ostraca_fabric.errors import ProtocolError, TransportError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.labels import label_of
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.codec import TO_WORKER
from ostraca_fabric.wire.frames import encode
from ostraca_fabric.wire.messages import (
    Cancel,
    Failed,
    Fetch,
    Get,
    GetDone,
    GetProgress,
    Leaving,
    PastSettled,
    Ping,
    Pong,
    PutDone,
    Refused,
    Settled,
    SettlePast,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from ostraca.arena import Arena
    from ostraca.dial import Dialled
    from ostraca.settings import ClientSettings
    from ostraca.waiting import Mail
    from ostraca_fabric.ports.transport import ArenaEnd
    from ostraca_fabric.wire.messages import Message, OpenVolume


_UNSENT_BYTES_MIN = 64 << 20
"""Requests and cancels that may wait for an agent that has stopped reading for a while."""

_FETCHED_BLOCK_BYTES = 64
"""What a block takes that waits to be sent, beside its bytes: its share of a bulk frame, or one of its own.
No more blocks are to be fetched at once than slots fit the arena."""

_NONE_UNSETTLED = np.empty(0, np.uint32)


class Mailbox(Protocol):
    """Where a caller waits."""

    def put(self, item: tuple[int, Event], /) -> None:
        """Take what happened to a request, from the pump's thread; never blocks."""


class Session:
    """Requests under way with one agent. Thread-safe."""

    def __init__(
        self,
        dialled: Dialled,
        ends: Mapping[str, ArenaEnd],
        arena: Arena,
        settings: ClientSettings,
        request_ids: Iterator[int],
        worker: str,
        on_leaving: Callable[[Session], None],
    ) -> None:
        """Begin; *ends* were offered in the handshake.

        *on_leaving* is called when the agent says that it ends, by whoever reads, and must not block.
        """
        self.agent = dialled.welcome.agent
        self.address = dialled.address
        self.limits = dialled.welcome.limits
        self.transport = dialled.welcome.transport
        self.lost_because = ""
        """Why the connection ended; empty while it lives."""

        self.fell_silent = False
        """Whether it was given up because its agent says nothing."""

        self.handles: dict[tuple[str, bytes, int, int], int] = {}
        """Volumes opened on this connection: (name, layout digest, block bytes) to handle."""

        self.asked: dict[tuple[str, bytes, int, int], OpenVolume] = {}
        """What they were opened with."""

        self.start_id = dialled.welcome.start_id
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
        self._has_refused = False
        self._silence = Silence(
            misses_max=settings.silent_misses_max,
            deadline_least_s=settings.silent_deadline_least_s,
            patience_s=settings.silent_ping_s,
        )
        self._pump = Pump(
            dialled.line,
            dialled.reader,
            self._end,
            on_message=self._on_message,
            on_lost=self._on_lost,
            pace_s=self._pace_s,
            quiet_until_s=self._quiet_until_s,
            unsent_bytes_max=_UNSENT_BYTES_MIN + _FETCHED_BLOCK_BYTES * (arena.size_bytes // PAGE_BYTES),
        )
        self._waiting = Waiting(self._pump, self._has_others)
        with arena.changed:
            self._past = arena.ledger.met(self.agent, self.start_id)
            arena.tell_changed()
        self._pump.start()
        if self._past:
            request = self.reserve()
            assert request is not None, "an agent takes at least one request"
            self._pump.send([encode(SettlePast(request))])

    @property
    def is_alive(self) -> bool:
        """Whether requests can be sent. It may be False in the next moment."""
        return not self.lost_because

    def take_up(self) -> bool:
        """Keep the session from ending as unused until ``put_down``; False when it has ended."""
        with self._arena.changed:
            if self.lost_because:
                return False
            self._users += 1
            return True

    def put_down(self) -> None:
        """Undo one ``take_up``."""
        with self._arena.changed:
            self._users -= 1
            if self._is_retired:
                self._arena.tell_changed()

    def retire(self) -> None:
        """Another session has ends of its own: when this one is lost, those that it was offered with are cut
        off before its slots count as such that a later connection brings word of. ``end_unused`` comes next.
        """
        with self._arena.changed:
            self._is_retired = True
            is_over = self._is_over
        if is_over:
            self._cut_off()

    def end_unused(self) -> None:
        """Wait until nobody uses the session and its agent is done with every slot, or until it is lost, and
        end it. Nobody else may take it up from then on.
        """
        with self._arena.changed:
            self._arena.changed.wait_for(lambda: bool(self.lost_because) or self._is_unused)
            self.lost_because = self.lost_because or "another agent has taken over"
        self.close()

    @property
    def _is_unused(self) -> bool:
        """Whether nobody waits for anything here. The lock is held."""
        return not (self._users or self._inflight or self._arena.ledger.is_due(self))

    def label(self, request: int) -> str:
        """Return what a request is called in logs, here and at the agent."""
        return label_of(self._worker, request)

    def next_request(self) -> int:
        """Return an id that no request of this client ever had."""
        return next(self._request_ids)

    def reserve(self) -> int | None:
        """Return the id of a request that may be sent now; None when the agent has all it takes at one time.

        Submit it, or give it back with ``unreserve``.
        """
        with self._arena.changed:
            if len(self._inflight) >= self.limits.inflight_max:
                self._has_refused = True
                return None
            request = next(self._request_ids)
            self._inflight.add(request)
            return request

    def unreserve(self, request: int) -> None:
        """Give back a reserved request that was never submitted.

        It is news to those alone that got none meanwhile. Batches that wait for slots try now and then, and
        give back what they reserved; told of that, two of them would have each other try for ever.
        """
        with self._arena.changed:
            self._inflight.discard(request)
            if self._has_refused:
                self._has_refused = False
                self._arena.tell_changed()

    def submit(
        self, request: int, message: Message, mailbox: Mailbox, slots: NDArray[np.int64] | None = None
    ) -> None:
        """Send a request; what becomes of it comes to *mailbox*.

        ``leave`` must be called for it, once, whatever comes.

        With *slots*, these taken slots are the request's from here on; ``leave`` gives them back when they
        are free.
        """
        is_first = False
        with self._arena.changed:
            if slots is not None:
                is_first = not self._arena.ledger.is_due(self)
                self._arena.ledger.sent(
                    request, slots, agent=self.agent, start_id=self.start_id, connection=self
                )
            if self.lost_because:
                # Never sent, so there is nothing to wait for.
                self._arena.ledger.answered(request, _NONE_UNSETTLED)
                mailbox.put((request, Disconnected()))
                return
            if slots is not None and isinstance(message, Get) and self._inline is not None:
                self._inline.open(slots, message.slot_bytes)
            self._mailboxes[request] = mailbox
            self._inflight.add(request)
        self._pump.send([encode(message)])
        if is_first and self._end.needs_progress and self._pump.is_led:
            self._pump.wake()  # who reads now has slept for as long as no slots were in use

    @property
    def progress_s(self) -> float | None:
        """How often whoever waits for a request's first message must call ``progress``; None for never, which
        is so while no slots are in use.

        The pump sleeps until something comes from the agent, and takes part from then on: waking it for each
        request would cost more than a small request takes.
        """
        if not self._end.needs_progress:
            return None
        with self._arena.changed:
            return self._settings.progress_s if self._arena.ledger.is_due(self) else None

    def progress(self) -> None:
        """Let the transport make progress. Where it can't the connection ends, as it does in the pump."""
        try:
            self._end.progress()
        except TransportError as error:
            self.break_off(f"the data plane broke: {error}")

    def wait(self, mail: Mail, *, until_s: float) -> tuple[int, Event] | None:
        """As ``Waiting.wait``."""
        return self._waiting.wait(mail, until_s=until_s)

    def _has_others(self, mail: Mail) -> bool:
        with self._arena.changed:
            return any(other is not mail for other in self._mailboxes.values())

    def missed(self, sent_s: float) -> None:
        """A request that was sent then, on the monotonic clock, is late.

        After some of these, with nothing heard from the agent, it is sent a Ping; the connection of one that
        does not answer that is given up as if it had been lost.
        """
        with self._arena.changed:
            is_asked = self._silence.missed(sent_s=sent_s, heard_s=self._pump.heard_s, now_s=time.monotonic())
        if is_asked:
            self._pump.send([encode(Ping(self.next_request()))])
            self._pump.wake()

    def cancel(self, request: int) -> None:
        """Tell the agent that nobody waits for a request's answer."""
        self._pump.send([encode(Cancel(request))])

    def tell(self, message: Message) -> None:
        """Send what is not answered; lost when the connection is."""
        self._pump.send([encode(message)])

    def leave(self, request: int) -> None:
        """The caller waits for this request no longer, and no longer looks at its slots."""
        if not self._arena.is_ours:
            return
        with self._arena.changed:
            self._mailboxes.pop(request, None)
            self._shut(self._arena.ledger.slots(request))
            self._arena.ledger.left(request)
            is_due = self._arena.ledger.is_due(self)
            self._arena.tell_changed()
        if is_due and self._end.needs_progress:
            self._pump.wake()

    def forget(self, request: int) -> None:
        """The caller waits for this request no longer, but looks at its slots until ``leave``."""
        with self._arena.changed:
            self._mailboxes.pop(request, None)
            self._shut(self._arena.ledger.slots(request))

    def break_off(self, why: str) -> None:
        """End the connection because its agent can't be understood; its requests hear Disconnected."""
        with self._arena.changed:
            self.lost_because = self.lost_because or why
        self._pump.break_off(why)

    def close(self) -> None:
        """End the connection and wait until nothing comes from it any more."""
        self._pump.stop()

    # What follows runs in the pump's thread.

    def _pace_s(self) -> float | None:
        if not self._end.needs_progress:
            return None
        with self._arena.changed:
            if not self._arena.ledger.is_due(self):
                return None
            return self._settings.progress_s if self._mailboxes else self._settings.progress_idle_s

    def _quiet_until_s(self) -> float | None:
        if not self._silence.is_asked:
            return None
        with self._arena.changed:
            return self._silence.until_s(heard_s=self._pump.heard_s, taken_s=self._pump.taken_s)

    def _on_message(self, payload: bytes) -> None:
        message = TO_WORKER.decode(payload)
        match message:
            case GetProgress():
                self._on_landed(message)
            case Settled(request=request):
                with self._arena.changed:
                    self._arena.ledger.settled(request)
                    self._arena.tell_changed()
            case Fetch():
                self._answer(message)
            case Refused(code=code, message=words):
                raise ProtocolError(f"{code}: {words}")
            case Pong():
                pass
            case Leaving():
                self._on_leaving(self)
            case GetDone() | PutDone():
                self._finish(message, message.unsettled)
            case Failed(code=code):
                self._finish(message, b"" if code in NOT_STARTED_CODES else None)
            case PastSettled():
                with self._arena.changed:
                    self._arena.ledger.past_settled(self._past)
                    self._inflight.discard(message.request)
                    self._arena.tell_changed()
            case _:
                # An answer to something that has no slots: given to a get or a put, it proves nothing.
                self._finish(message, None)

    def _on_landed(self, message: GetProgress) -> None:
        """Take word of blocks that landed: from here on nothing else may."""
        with self._arena.changed:
            slots = self._arena.ledger.slots(message.request)
            if len(slots):
                self._shut(slots[columns.positions(message.positions, len(slots))])
        self._deliver(message.request, message)

    def _shut(self, slots: NDArray[np.int64]) -> None:
        """Let nothing land in these slots any more, where that is ours to decide. The lock is held."""
        if self._inline is not None and len(slots):
            self._inline.shut(slots)

    def _answer(self, fetch: Fetch) -> None:
        """Send what an inline agent asks for."""
        if self._inline is None:
            raise ProtocolError(f"a Fetch, and blocks cross by {self.transport}")
        self._pump.send_bulk(self._inline.answer(fetch))

    def _finish(self, message: Event, unsettled: bytes | None) -> None:
        """Take a request's final message; *unsettled* None stands for every slot of it."""
        request = message.request  # type: ignore[union-attr]  # only answers come here
        with self._arena.changed:
            slots = self._arena.ledger.slots(request)
            positions = (
                np.arange(len(slots), dtype=np.uint32)
                if unsettled is None
                else columns.positions(unsettled, len(slots))
            )
            self._shut(slots)
            self._arena.ledger.answered(request, positions)
            self._inflight.discard(request)
            self._arena.tell_changed()
        self._deliver(request, message)

    def _deliver(self, request: int, event: Event) -> None:
        with self._arena.changed:
            mailbox = self._mailboxes.get(request)
        if mailbox is not None:
            mailbox.put((request, event))

    def _cut_off(self) -> None:
        """Let nothing land any more that was offered with this session alone."""
        for end in self._ends.values():
            end.cut_off()

    def _on_lost(self, why: str) -> None:
        with self._arena.changed:
            self.fell_silent = self._pump.fell_silent
            self.lost_because = self.lost_because or why
            self._is_over = True
            is_retired = self._is_retired
        if is_retired:
            self._cut_off()
        with self._arena.changed:
            # Inline bytes came through this connection alone, and its reader is closed.
            if self._inline is not None:
                self._inline.shut_all()
            self._arena.ledger.lost(is_drained=self._inline is not None, connection=self)
            waiting = list(self._mailboxes.items())
            self._inflight.clear()
            self._arena.tell_changed()
        for request, mailbox in waiting:
            mailbox.put((request, Disconnected()))
