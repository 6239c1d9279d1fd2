"""The driver: a thread of the client for operations, blocking or submitted.

Brief ones end in their caller's thread (``ostraca._connection.caller_connections``).

Requests and events arrive in an inbox. The driver lets each job go on, and delivers results. Checks of tags
and copies run in the driver and the copy pool, longer ones without the interpreter lock. The driver reads the
connection while it waits. Blocking steps (dialling, opening a volume) run in a second thread; a job in such
a step still ends by the deadline.

Callers' threads post to the inbox, and wait on private locks. So exceptions of signal handlers, raised in the
main thread between any two bytecodes, harm no shared state.

States of a job::

    submit --> connecting --connected--> running --> delivered
                   |                        |
                   +-- deadline, cancel, close: delivered as late, cancelled or disconnected

Errors of a job are delivered to the submitter, and the driver goes on with other jobs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from queue import Empty, SimpleQueue
from threading import get_ident
from typing import Any, Generic, TypeVar

from ostraca._connection.session import AgentSession
from ostraca._memory.views import SlotHolds
from ostraca._operations.completions import Completion, Ticket
from ostraca._operations.job import Job, Runtime
from ostraca._protocol.operations import Event
from ostraca_fabric.errors import ClosedError, ConnectError
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.runtime.events import set_event
from ostraca_fabric.runtime.threads import BackgroundTask, show_name

OpenedVolume = tuple[AgentSession, int]

log = logging.getLogger("ostraca")

_Entry = TypeVar("_Entry")

_ROOM_RECHECK_S = 0.05
"""Longest sleep of a job without slots, in case a wake-up gets lost."""

_IDLE_S = 1.0
"""Longest sleep on a connection: a dropped hold does not wake the driver (``SlotHolds.new``)."""

_LATER_MAX = 256
"""Most actions that wait for the driver's next look."""

_NO_THREADS = "the process can start no more threads"
_CLOSED = "the client is closed: connect again"

End = Callable[..., None]
"""Ends a caller's call: takes the result or the error, as ``ostraca._operations.runner.Call.end``."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Something to do in the driver's thread."""

    act: Callable[[], Job[Any, Any] | None]
    """Never raises. Returns the job that may go on, if any."""

    refuse: Callable[[], object] = _nothing
    """Called instead at the driver's end and after."""

    frees_room: bool = False
    """Whether slots or requests may come free: done at the driver's end as well."""


class Inbox(Generic[_Entry]):
    """Queue for a single reader, with a descriptor to wake the reader in ``select``.

    ``put`` may be called at any moment: in a signal handler, in a finalizer, and between any two bytecodes of
    another ``put``. The queue is C code, without a lock for a thread to leave taken.
    """

    descriptor = -1  # as long as none was made, which may fail

    def __init__(self, no_op: _Entry) -> None:
        """Begin empty; *no_op* is an item without a meaning, only to wake the reader."""
        self._no_op = no_op
        self.items: SimpleQueue[_Entry] = SimpleQueue()
        """The items. Direct ``put`` calls here do not wake a reader in ``select``."""

        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable after a ``put`` while there is a ``watcher``. The reader clears the descriptor."""

        self.watcher = 0
        """The identifier of the reader's thread while in ``select``, else 0: set before a look for items."""

        self.empty = self.items.empty
        self.get = self.items.get

    def put(self, item: _Entry) -> None:
        """Add an item. Never blocks. Finalizers call it too, in the reader's thread before a ``select``."""
        try:
            self.items.put(item)
        finally:  # an exception of a signal handler may come in between
            if self.watcher:
                set_event(self.descriptor)

    def put_news(self, item: _Entry) -> None:
        """Add an item as ``put``: from another thread, or in the reader's own turn, before its next look."""
        self.items.put(item)
        if self.watcher not in (0, get_ident()):
            set_event(self.descriptor)

    def wake(self) -> None:
        """Wake the reader."""
        self.put(self._no_op)

    def __del__(self) -> None:
        """Close the descriptor. Closed earlier, a late ``put`` could write to a reused number."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class _JobMailbox:
    """Mailbox of a job: forwards events to the driver's inbox."""

    process: Callable[[int, Event], Job[Any, Any]]
    reader: Inbox[Item] = field(repr=False)

    def put(self, item: tuple[int, Event], /) -> None:
        """Take an event of a request; from any thread."""
        self.reader.put_news(Item(partial(self.process, *item), frees_room=True))


def _taken(queue: SimpleQueue[_Entry]) -> Iterator[_Entry]:
    """Take the items in a queue. Several threads may do so at once."""
    with contextlib.suppress(Empty):
        while True:
            yield queue.get_nowait()


class Driver:
    """Runs jobs. ``start`` it once, and ``end`` it."""

    def __init__(self, runtime: Runtime, *, submitted_max: int) -> None:
        """Begin without jobs; decline more than *submitted_max* submitted and not taken."""
        self._runtime = runtime
        self._connections = runtime.connections
        self._submitted_max = submitted_max
        self._inbox: Inbox[Item] = Inbox(Item(_nothing, frees_room=True))
        runtime.holds = SlotHolds(partial(Item, frees_room=True), self._inbox.put, self._inbox.items)
        self._to_connect: SimpleQueue[Job[Any, Any]] = SimpleQueue()
        self._opening = BackgroundTask(
            "dial",
            self._open_next,
            is_needed=lambda: not self._to_connect.empty(),
            pauses_s=lambda: repeat(0.0),
        )
        self._active: dict[Ticket, Job[Any, Any]] = {}
        self._submitted = 0
        self._due_s = math.inf
        """No deadline of a job is earlier."""

        self._starved: dict[Ticket, Job[Any, Any]] = {}
        self._closing: list[End] = []
        self._is_over = False
        self._waited_on: AgentSession | None = None
        """Session last waited on."""

        self._thread = threading.Thread(target=self._run, name="ostraca-driver", daemon=True)
        runtime.arena.ledger.listeners.append(self._retry_starved)

    def start(self) -> None:
        """Begin. Raises ConnectError where the process may have no more threads."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise ConnectError(f"{_NO_THREADS}: {error}") from error

    # For callers, at any moment: between two bytecodes of another call, and in finalizers.

    def begin(self, job: Job[Any, Any]) -> None:
        """Take over a job, which is always delivered."""
        self._post(Item(partial(self._begin, job), partial(self._refuse, job)))

    def cancel(self, ticket: Ticket, end: End = _nothing) -> None:
        """Cancel a job, which is still delivered, soon; for an unknown ticket, call *end*."""
        self._post(Item(partial(self._cancel, ticket, end), end, frees_room=True))

    def run(self, act: Callable[[], None], end: End, *, is_urgent: bool = True) -> None:
        """Run a short action, which never raises, or call *end* with the error of a refusal.

        Others than urgent ones wait until the driver looks again: within ``_IDLE_S``.
        """
        self._post(Item(act, partial(end, error=ClosedError(_CLOSED))), is_urgent=is_urgent)

    def end(self, end: End) -> None:
        """End all jobs as disconnected, then runtime and thread, and call *end*.

        A driver never started ends in this thread.
        """
        if self._thread.ident is None:
            self._finish()
        self._post(Item(partial(self._closing.append, end), end, frees_room=True))

    def _post(self, item: Item, *, is_urgent: bool = True) -> None:
        """Take over an item. Never blocks. After the driver's end, the item is refused in this thread."""
        items = self._inbox.items
        put = self._inbox.put if is_urgent or items.qsize() >= _LATER_MAX else items.put
        put(item)
        if self._is_over:
            self._refuse_all()

    @property
    def is_this_thread(self) -> bool:
        """Whether the calling thread is the driver's."""
        return self._thread.ident == get_ident()

    def _refuse_all(self) -> None:
        """Refuse all items in the inbox after the end."""
        for item in _taken(self._inbox.items):
            item.refuse()

    def _refuse(self, job: Job[Any, Any]) -> None:
        job.close()
        self._hand_over(job, None, ClosedError(_CLOSED))

    def _retry_starved(self) -> None:
        """Note that slots or requests may have become free. From any thread, under the arena's lock."""
        if self._starved:
            self._inbox.wake()

    def _hand_over(self, job: Job[Any, Any], result: object, error: BaseException | None) -> None:
        # Held views keep their job alive, and *deliver* may know the result: the two would keep each other.
        deliver, job.deliver = job.deliver, None
        if deliver is None:
            self._runtime.completions.put(Completion(job.ticket, result, error))  # type: ignore[arg-type]
        else:
            deliver(result, error)

    # In the thread beside the driver's.

    def _open_next(self) -> None:
        try:
            job = self._to_connect.get_nowait()
        except Empty:
            return  # the driver has ended
        if time.monotonic() >= job.until_s:
            return  # ended by the driver already
        try:
            opened = self._connections.find_volume(job.spec.volume, job.until_s)
        except Exception as error:  # noqa: BLE001 (handed to the submitter of the job)
            self._post(Item(partial(self._begin_opened, job, error=error)))
        else:
            refuse = _nothing if opened is None else opened[0].release
            self._post(Item(partial(self._begin_opened, job, opened), refuse))

    def _forget_unopened(self) -> None:
        """Forget jobs that no thread connects any more: the queue would keep callers' memory."""
        for _ in _taken(self._to_connect):
            """Take the next."""

    # In the driver's thread.

    def _run(self) -> None:
        show_name("driver")
        try:
            self._drive()
        except Exception:
            log.critical("the client's driver failed: every operation ends now, connect again", exc_info=True)
        finally:
            self._finish()

    def _drive(self) -> None:
        while not self._closing:
            item = self._next()
            job = None if item is None else item.act()
            if job is not None and job.ticket in self._active:
                self._go_on(job)
            if self._starved and (item is None or item.frees_room):
                self._feed()
            self._end_late()
            item = job = None  # keep no caller's memory during the next wait

    def _finish(self) -> None:
        """End session, jobs and runtime; refuse all later items."""
        try:
            self._connections.close()
            self._end_jobs()
            self._opening.close()
            self._runtime.close()
        except Exception:
            log.critical("the client could not be closed whole", exc_info=True)
        finally:
            self._is_over = True
            self._forget_unopened()
            for job in list(self._active.values()):
                self._deliver(job, None, ClosedError("the client's driver failed: connect again"))
            self._refuse_all()
            for end in self._closing:
                end()

    def _end_jobs(self) -> None:
        """Let jobs notice the lost session, and end jobs that never began."""
        for item in _taken(self._inbox.items):
            (item.act if item.frees_room else item.refuse)()
        for job in list(self._active.values()):
            self._go_on(job)
        for job in list(self._active.values()):
            job.decline(Reason.DISCONNECTED, "closed here")
            self._end(job)

    def _next(self) -> Item | None:
        """Wait for an item until a deadline is due; return None then."""
        now_s = time.monotonic()
        until_s = self._due_s
        if self._starved:
            until_s = min(until_s, now_s + _ROOM_RECHECK_S)
        session = self._connections.session
        item: Item | None = None
        if self._waited_on is not None and self._waited_on is not session:
            self._waited_on.resume_reading()
        self._waited_on = session
        if session is not None and session.is_alive:
            self._inbox.watcher = threading.get_ident()
            item = session.wait(self._inbox, until_s=min(until_s, now_s + _IDLE_S))
            self._inbox.watcher = 0
        else:
            with contextlib.suppress(Empty):
                item = self._inbox.get(timeout=None if until_s == math.inf else max(0.0, until_s - now_s))
        return item

    def _begin(self, job: Job[Any, Any]) -> Job[Any, Any]:
        is_submitted = job.deliver is None
        is_full = is_submitted and self._submitted + len(self._runtime.completions) >= self._submitted_max
        self._active[job.ticket] = job
        self._submitted += is_submitted
        if not self._try(job, job.accept):
            return job
        if is_full:
            job.decline(Reason.OVERLOADED, "too many tickets are submitted and not taken")
        job.tick()
        if job.is_over:
            return job
        self._due_s = min(self._due_s, job.until_s)
        session = self._connections.session
        handle = None if session is None else session.acquire_volume(job.spec.volume)
        if session is not None and handle is not None:
            self._begin_at((session, handle), job)
        else:
            self._to_connect.put(job)
            if not self._opening.start():
                self._forget_unopened()
                job.decline(Reason.OVERLOADED, _NO_THREADS)
        return job

    def _begin_at(self, opened: OpenedVolume, job: Job[Any, Any]) -> None:
        if opened[0] is not self._connections.session:
            opened[0].resume_reading()  # the dial's thread has led the connection meanwhile
        is_begun = self._try(
            job, partial(job.begin, *opened, _JobMailbox(partial(self._process, job), self._inbox))
        )
        if not is_begun and not job.has_begun:
            opened[0].release()

    def _begin_opened(
        self, job: Job[Any, Any], opened: OpenedVolume | None = None, error: Exception | None = None
    ) -> Job[Any, Any]:
        if job.ticket not in self._active:
            if opened is not None:
                opened[0].release()
        elif error is not None:
            self._end(job, error)
        elif opened is None:
            job.decline(Reason.DISCONNECTED, self._connections.unreachable_because)
        else:
            self._begin_at(opened, job)
        return job

    def _process(self, job: Job[Any, Any], request: int, event: Event) -> Job[Any, Any]:
        if job.ticket in self._active:
            self._try(job, partial(job.on, request, event))
        return job

    def _cancel(self, ticket: Ticket, end: End) -> Job[Any, Any] | None:
        job = self._active.get(ticket)
        if job is not None:
            self._try(job, job.cancel)
        else:
            end()  # its job was interrupted on the way here
        return job

    def _try(self, job: Job[Any, Any], act: Callable[[], None]) -> bool:
        """Do a step of a job; after an error, deliver the error and return False."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 (handed to the submitter of the job)
            self._end(job, error)
            return False
        return True

    def _go_on(self, job: Job[Any, Any]) -> None:
        """Let a job start what there is room for, and deliver the job when over."""
        if job.has_begun and not self._try(job, job.advance):
            return
        if job.is_over:
            self._end(job)
        elif job.has_begun and job.is_starved:
            self._starved[job.ticket] = job

    def _feed(self) -> None:
        """Let jobs that wait for room try again, in the order of their submission."""
        starved, self._starved = self._starved, {}
        for ticket, job in starved.items():
            if ticket in self._active:
                self._go_on(job)

    def _end_late(self) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        for job in [each for each in self._active.values() if each.until_s <= now_s]:
            if self._try(job, job.tick):
                self._go_on(job)
        self._due_s = min((job.until_s for job in self._active.values()), default=math.inf)

    def _end(self, job: Job[Any, Any], error: Exception | None = None) -> None:
        """Release the resources of a job, count the job, and deliver its result or the error."""
        result = None
        try:
            job.close()
            job.count()
            if error is None:
                self._runtime.meter.count(job, time.monotonic() - job.begun_s)
                result = job.result()
        except Exception as another:  # noqa: BLE001 (delivered, and tells of the first)
            error = another
        self._deliver(job, result, error)

    def _deliver(self, job: Job[Any, Any], result: object, error: Exception | None) -> None:
        del self._active[job.ticket]
        self._submitted -= job.deliver is None
        self._hand_over(job, result, error)
