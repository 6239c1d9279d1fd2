"""The driver: a thread of the client for all operations, blocking or submitted.

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
import heapq
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import get_ident
from typing import Any, Generic, TypeVar

from ostraca._connection.session import AgentSession
from ostraca._memory.views import HoldRelease, SlotHolds
from ostraca._operations.completions import Completion, Ticket
from ostraca._operations.job import Job, Runtime
from ostraca._protocol.operations import Event
from ostraca_fabric.errors import ClosedError, ConnectError
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.runtime.events import set_event
from ostraca_fabric.runtime.threads import show_name

OpenedVolume = tuple[AgentSession, int]

log = logging.getLogger("ostraca")

_Entry = TypeVar("_Entry")

_ROOM_RECHECK_S = 0.05
"""Longest sleep of a job without slots, in case a wake-up gets lost."""

_DEADLINES_SPARE = 64

_IDLE_S = 1.0
"""Longest sleep on a connection: a dropped hold does not wake the driver (``SlotHolds.new``)."""

_LATER_MAX = 256
"""Most actions that wait for the driver's next look."""

_NO_THREADS = "the process can start no more threads"

End = Callable[..., None]
"""Ends a caller's call: takes the result or the error, as ``ostraca._operations.runner.Call.end``."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """The job's volume is open on a session; or no session was found, or the dial raised."""

    job: Job[Any, Any]
    opened: OpenedVolume | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Process:
    """An event of a request of a job."""

    job: Job[Any, Any]
    request: int
    event: Event


@dataclass(frozen=True, slots=True)
class CancelJob:
    """A job is cancelled; *end* must have been called afterwards."""

    ticket: Ticket
    end: End | None = None


@dataclass(frozen=True, slots=True)
class RunAction:
    """A short action for the driver's thread, which never raises; *end* takes the error of a refusal."""

    run: Callable[[], None]
    end: End


@dataclass(frozen=True, slots=True)
class _Retry:
    """Slots or request places may be free; also sent only to wake the driver."""


@dataclass(frozen=True, slots=True)
class EndClient:
    """The client is being closed; *end* is called afterwards."""

    end: End | None = None


_Item = Job[Any, Any] | _Begin | _Process | CancelJob | RunAction | HoldRelease | _Retry | EndClient


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

    job: Job[Any, Any]
    reader: Inbox[_Item] = field(repr=False)

    def put(self, item: tuple[int, Event], /) -> None:
        """Take an event of a request; from any thread."""
        self.reader.put_news(_Process(self.job, *item))


class Driver:
    """Runs jobs. ``start`` it once, and post a ``EndClient``."""

    def __init__(self, runtime: Runtime, *, submitted_max: int) -> None:
        """Begin without jobs; decline more than *submitted_max* submitted and not taken."""
        self._runtime = runtime
        self._connections = runtime.connections
        self._submitted_max = submitted_max
        self._inbox: Inbox[_Item] = Inbox(_Retry())
        self.holds = SlotHolds(self._inbox.put, self._inbox.items)
        """Slots held by callers, for code in the driver's thread."""

        self._to_connect: SimpleQueue[Job[Any, Any] | None] = SimpleQueue()
        self._active: dict[Ticket, Job[Any, Any]] = {}
        self._submitted = 0
        self._deadlines: list[tuple[float, Ticket]] = []
        self._starved: dict[Ticket, Job[Any, Any]] = {}
        self._closing: list[End] = []
        self._is_over = False
        self._waited_on: AgentSession | None = None
        """Session last waited on."""

        self._connecting: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="ostraca-driver", daemon=True)
        runtime.arena.ledger.listeners.append(self._retry_starved)

    def start(self) -> None:
        """Begin. Raises ConnectError where the process may have no more threads."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise ConnectError(f"{_NO_THREADS}: {error}") from error

    # For callers, at any moment: between two bytecodes of another call, and in finalizers.

    def post(self, item: _Item) -> None:
        """Take over a caller's request: ``Job``, ``CancelJob``, ``RunAction`` or ``EndClient``. Never blocks.

        A cancelled job is still delivered, soon; unknown tickets are ignored. After the driver's end, the
        request is refused in this thread. ``EndClient`` ends all jobs as disconnected, then runtime and
        thread; a driver never started ends in this thread.
        """
        if isinstance(item, EndClient) and self._thread.ident is None:
            self._finish()
        self._inbox.put(item)
        if self._is_over:
            self._refuse_all()

    def post_later(self, action: RunAction) -> None:
        """Post an action that can wait until the driver looks again: within ``_IDLE_S``."""
        items = self._inbox.items
        put = self._inbox.put if items.qsize() >= _LATER_MAX else items.put
        put(action)
        if self._is_over:
            self._refuse_all()

    @property
    def is_this_thread(self) -> bool:
        """Whether the calling thread is the driver's."""
        return self._thread.ident == get_ident()

    def _queued_items(self) -> Iterator[_Item]:
        """Take the items in the inbox. Several threads may do so at once."""
        with contextlib.suppress(Empty):
            while True:
                yield self._inbox.items.get_nowait()

    def _refuse_all(self) -> None:
        """Refuse all items in the inbox after the end."""
        for item in self._queued_items():
            self._refuse(item)

    def _refuse(self, item: _Item) -> None:
        closed = ClosedError("the client is closed: connect again")
        match item:
            case Job() as job:
                job.close()
                self._hand_over(job, None, closed)
            case RunAction(end=end):
                end(error=closed)
            case CancelJob(end=end) | EndClient(end=end):
                if end is not None:
                    end()
            case _Begin(opened=(session, _)):
                session.release()
            case _Begin() | _Process() | HoldRelease() | _Retry():
                pass

    def _retry_starved(self) -> None:
        """Note that slots or requests may have become free. From any thread, under the arena's lock."""
        if self._starved:
            self._inbox.put(_Retry())

    def _hand_over(self, job: Job[Any, Any], result: object, error: BaseException | None) -> None:
        # Held views keep their job alive, and *deliver* may know the result: the two would keep each other.
        deliver, job.deliver = job.deliver, None
        if deliver is None:
            self._runtime.completions.put(Completion(job.ticket, result, error))  # type: ignore[arg-type]
        else:
            deliver(result, error)

    # In the thread beside the driver's.

    def _run_connecting(self) -> None:
        show_name("dial")
        while (job := self._to_connect.get()) is not None:
            if time.monotonic() >= job.until_s:
                continue  # ended by the driver already
            try:
                opened = self._connections.find_volume(job.spec.volume, job.until_s)
            except Exception as error:  # noqa: BLE001 (handed to the submitter of the job)
                self._inbox.put(_Begin(job, error=error))
            else:
                self._inbox.put(_Begin(job, opened))

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
        is_stopped = False
        while not is_stopped:
            item = self._next()
            job = None if item is None else self._take(item)
            if job is not None and job.ticket in self._active:
                self._go_on(job)
            if self._starved and (item is None or isinstance(item, _Retry | _Process)):
                self._feed()
            self._end_late()
            is_stopped = isinstance(item, EndClient)
            item = job = None  # keep no caller's memory during the next wait

    def _finish(self) -> None:
        """End session, jobs and runtime; refuse all later items."""
        try:
            self._connections.close()
            self._end_jobs()
            if self._connecting is not None:
                self._to_connect.put(None)
                self._connecting.join()
            self._runtime.close()
        except Exception:
            log.critical("the client could not be closed whole", exc_info=True)
        finally:
            self._is_over = True
            for job in list(self._active.values()):
                self._deliver(job, None, ClosedError("the client's driver failed: connect again"))
            self._refuse_all()
            for end in self._closing:
                end()

    def _end_jobs(self) -> None:
        """Let jobs notice the lost session, and end jobs that never began."""
        for item in self._queued_items():
            if isinstance(item, _Process | HoldRelease | CancelJob | EndClient):
                self._take(item)
            else:
                self._refuse(item)
        for job in list(self._active.values()):
            self._go_on(job)
        for job in list(self._active.values()):
            job.decline(Reason.DISCONNECTED, "closed here")
            self._end(job)

    def _next(self) -> _Item | None:
        """Wait for an item until a deadline is due; return None then."""
        now_s = time.monotonic()
        until_s = self._deadlines[0][0] if self._deadlines else math.inf
        # The reader of the live session's connection drives only that session's transport.
        retired = self._connections.retired if self._active else ()
        steps_s = [step_s for each in retired if (step_s := each.progress_s) is not None] if retired else ()
        if steps_s:
            until_s = min(until_s, now_s + min(steps_s))
        if self._starved:
            until_s = min(until_s, now_s + _ROOM_RECHECK_S)
        session = self._connections.session
        item: _Item | None = None
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
        if item is None and steps_s:
            for each in retired:
                each.progress()
        return item

    def _take(self, item: _Item) -> Job[Any, Any] | None:  # noqa: C901 (a case for each item)
        """Take an item; return the changed job."""
        match item:
            case Job() as job:
                return self._begin(job)
            case _Begin(job=job, opened=opened, error=error):
                return self._begin_opened(job, opened, error)
            case _Process(job=job, request=request, event=event):
                if job.ticket in self._active:
                    self._try(job, partial(job.on, request, event))
                return job
            case CancelJob(ticket=ticket, end=end):
                return self._cancel(self._active.get(ticket), end)
            case RunAction(run=run):
                run()
            case HoldRelease():
                self.holds.give_back(item)
            case EndClient(end=end):
                if end is not None:
                    self._closing.append(end)
            case _Retry():
                pass
        return None

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
        if len(self._deadlines) > 2 * len(self._active) + _DEADLINES_SPARE:  # most of these have ended
            self._deadlines = [(each.until_s, ticket) for ticket, each in self._active.items()]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (job.until_s, job.ticket))
        session = self._connections.session
        handle = None if session is None else session.acquire_volume(job.spec.volume)
        if session is not None and handle is not None:
            self._begin_at((session, handle), job)
        elif self._is_connecting():
            self._to_connect.put(job)
        else:
            job.decline(Reason.OVERLOADED, _NO_THREADS)
        return job

    def _is_connecting(self) -> bool:
        """Start the dialling thread if missing; False if the process can start no thread."""
        if self._connecting is None:
            thread = threading.Thread(target=self._run_connecting, name="ostraca-dial", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the next job tries again
                return False
            self._connecting = thread
        return True

    def _begin_at(self, opened: OpenedVolume, job: Job[Any, Any]) -> None:
        if opened[0] is not self._connections.session:
            opened[0].resume_reading()  # the dial's thread has led the connection meanwhile
        is_begun = self._try(job, partial(job.begin, *opened, _JobMailbox(job, self._inbox), self.holds))
        if not is_begun and not job.has_begun:
            opened[0].release()

    def _begin_opened(
        self, job: Job[Any, Any], opened: OpenedVolume | None, error: Exception | None
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

    def _cancel(self, job: Job[Any, Any] | None, end: End | None) -> Job[Any, Any] | None:
        if job is not None:
            self._try(job, job.cancel)
        elif end is not None:
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
        while self._deadlines and self._deadlines[0][0] <= now_s:
            job = self._active.get(heapq.heappop(self._deadlines)[1])
            if job is not None and self._try(job, job.tick):
                self._go_on(job)

    def _end(self, job: Job[Any, Any], error: Exception | None = None) -> None:
        """Release the resources of a job, count the job, and deliver its result or the error."""
        result = None
        try:
            job.close()
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
