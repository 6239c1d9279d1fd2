"""The driver: a thread of the client for all operations, blocking or submitted.

Requests and events arrive in an inbox. The driver lets each batch go on, and delivers results. Checks of tags
and copies run in the driver and the copy pool, without the interpreter lock. While jobs are under way, the
driver reads the connection. Blocking steps (dialling, opening a volume) run in a second thread; a job in such
a step still ends by the deadline.

Callers' threads post to the inbox, and wait on private locks. So exceptions of signal handlers, raised in the
main thread between any two bytecodes, harm no shared state.

States of a job::

    submit --> connecting --connected--> running --> delivered
                   |                        |
                   +-- deadline, cancel, close: delivered as late, cancelled or disconnected

Errors of a job are delivered to the submitter, and the driver goes on with other jobs. *deliver* is called
once per job, in the driver's thread, and must not block.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from ostraca._memory.views import HoldRelease, SlotHolds
from ostraca._operations.batch import BatchContext
from ostraca._operations.handoff import Call, Completion, Inbox, Ticket
from ostraca_fabric.errors import ClosedError, ConnectError
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.runtime.threads import show_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostraca._connection.session import AgentSession
    from ostraca._operations.batch import Batch, OperationJob, Runtime
    from ostraca._protocol.events import Event
    from ostraca._protocol.specs import OperationSpec
    from ostraca_fabric.wire.codec import Outcomes

    OpenedVolume = tuple[AgentSession, int]

log = logging.getLogger("ostraca")

Deliver = Callable[[Ticket, Any, "BaseException | None"], None]
"""Takes the result or the error of a job."""

_ROOM_RECHECK_S = 0.05
"""Longest sleep of a batch without slots, in case a wake-up gets lost."""

_DEADLINES_SPARE = 64

_IDLE_S = 3600.0
"""Longest sleep on a connection: select and poll take no infinite time."""

_NO_THREADS = "the process can start no more threads"


@dataclass(slots=True)
class ActiveJob:
    """A job under way; also the driver's item for a new job."""

    ticket: Ticket
    job: OperationJob[Any]
    deliver: Deliver | None
    """None for the queue of completions; such jobs count against ``submitted_max``."""

    batch: Batch[OperationSpec] | None = None


@dataclass(frozen=True, slots=True)
class _Begin:
    """The job's volume is open on a session; or no session was found, or the dial raised."""

    ticket: Ticket
    opened: OpenedVolume | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Process:
    """An event of a request of a batch."""

    ticket: Ticket
    request: int
    event: Event


@dataclass(frozen=True, slots=True)
class CancelJob:
    """A job is cancelled; *call* must have ended afterwards."""

    ticket: Ticket
    call: Call[Any] | None = None


@dataclass(frozen=True, slots=True)
class RunAction:
    """A short action for the driver's thread."""

    act: Callable[[], Any]
    call: Call[Any]


@dataclass(frozen=True, slots=True)
class _Retry:
    """Slots or request places may be free; also sent only to wake the driver."""


@dataclass(frozen=True, slots=True)
class _Stop:
    """The client is being closed; *call* waits for the end."""

    call: Call[None] | None = None


_Item = ActiveJob | _Begin | _Process | CancelJob | RunAction | HoldRelease | _Retry | _Stop


@dataclass(frozen=True, slots=True)
class _BatchMailbox:
    """Mailbox of a batch: forwards events to the driver's inbox, with the job's ticket."""

    ticket: Ticket
    reader: Inbox[_Item] = field(repr=False)

    def put(self, item: tuple[int, Event], /) -> None:
        """Take an event of a request; from any thread."""
        self.reader.put(_Process(self.ticket, *item))


class Driver:
    """Runs jobs. ``start`` it once, and ``stop`` it."""

    def __init__(self, runtime: Runtime, *, submitted_max: int) -> None:
        """Begin without jobs; decline more than *submitted_max* submitted and not taken."""
        self._runtime = runtime
        self._connections = runtime.connections
        self._submitted_max = submitted_max
        self._inbox: Inbox[_Item] = Inbox(_Retry())
        self.holds = SlotHolds(self._inbox.put, self._inbox.items)
        """Slots held by callers, for code in the driver's thread."""

        self._to_connect: SimpleQueue[ActiveJob | None] = SimpleQueue()
        self._active: dict[Ticket, ActiveJob] = {}
        self._submitted = 0
        self._deadlines: list[tuple[float, Ticket]] = []
        self._starved: dict[Ticket, ActiveJob] = {}
        self._closing: list[Call[None]] = []
        self._is_over = False
        self._connecting: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="ostraca-driver", daemon=True)
        runtime.arena.on_changed = self._retry_starved

    def start(self) -> None:
        """Begin. Raises ConnectError where the process may have no more threads."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise ConnectError(f"{_NO_THREADS}: {error}") from error

    # For callers, at any moment: between two bytecodes of another call, and in finalizers.

    def post(self, item: _Item) -> None:
        """Take over a caller's request: ``ActiveJob``, ``CancelJob`` or ``RunAction``. Never blocks.

        A cancelled job is still delivered, soon; unknown tickets are ignored. After the driver's end, the
        request is refused in this thread.
        """
        self._inbox.put(item)
        if self._is_over:
            self._refuse_all()

    def stop(self, *, timeout_s: float | None = None) -> None:
        """End all jobs as disconnected, then the runtime and the thread.

        Returns at the end, or after *timeout_s* with the end still under way. None: do not wait.
        """
        if self._thread.ident is None:
            self._finish()
        elif timeout_s is None:
            self.post(_Stop())
        else:
            call: Call[None] = Call()
            self.post(_Stop(call))
            call.wait(timeout_s)

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
            case ActiveJob() as active:
                active.job.release()
                self._hand_over(active, None, closed)
            case RunAction(call=call):
                call.end(error=closed)
            case CancelJob(call=call) | _Stop(call=call):
                if call is not None:
                    call.end()
            case _Begin(opened=(session, _)):
                session.release()
            case _Begin() | _Process() | HoldRelease() | _Retry():
                pass

    def _retry_starved(self) -> None:
        """Note that slots or requests may have become free. From any thread, under the arena's lock."""
        if self._starved:
            self._inbox.put(_Retry())

    def _hand_over(self, active: ActiveJob, result: Any, error: BaseException | None) -> None:  # noqa: ANN401 (of any job)
        if active.deliver is None:
            self._runtime.completions.put(Completion(active.ticket, result, error))
        else:
            active.deliver(active.ticket, result, error)

    # In the thread beside the driver's.

    def _run_connecting(self) -> None:
        show_name("dial")
        while (active := self._to_connect.get()) is not None:
            job, ticket = active.job, active.ticket
            if time.monotonic() >= job.until_s:
                continue  # ended by the driver already
            try:
                opened = self._connections.find_volume(job.spec.volume, job.until_s)
            except Exception as error:  # noqa: BLE001 (handed to the submitter of the job)
                self._inbox.put(_Begin(ticket, error=error))
            else:
                self._inbox.put(_Begin(ticket, opened))

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
            touched = None if item is None else self._take(item)
            if touched is not None and touched.ticket in self._active:
                self._go_on(touched)
            if item is None or isinstance(item, _Retry | _Process):
                self._feed()
            self._end_late()
            is_stopped = isinstance(item, _Stop)

    def _finish(self) -> None:
        """End session, jobs and runtime; refuse all later items."""
        try:
            self._connections.close()
            self._end_rest()
            if self._connecting is not None:
                self._to_connect.put(None)
                self._connecting.join()
            self._runtime.close()
        except Exception:
            log.critical("the client could not be closed whole", exc_info=True)
        finally:
            self._is_over = True
            for active in list(self._active.values()):
                self._deliver(active, None, ClosedError("the client's driver failed: connect again"))
            self._refuse_all()
            for call in self._closing:
                call.end()

    def _end_rest(self) -> None:
        """Let batches notice the lost session, and skip jobs without a batch."""
        for item in self._queued_items():
            if isinstance(item, _Process | HoldRelease | CancelJob | _Stop):
                self._take(item)
            else:
                self._refuse(item)
        for active in list(self._active.values()):
            self._go_on(active)
        for active in list(self._active.values()):
            self._skip(active, active.job.declined(Reason.DISCONNECTED, "closed here"))

    def _next(self) -> _Item | None:
        """Wait for an item until a deadline is due; return None then."""
        now_s = time.monotonic()
        until_s = self._deadlines[0][0] if self._deadlines else math.inf
        step_s = self._connections.retired_progress_s if self._active else None
        if step_s is not None:
            until_s = min(until_s, now_s + step_s)
        if self._starved:
            until_s = min(until_s, now_s + _ROOM_RECHECK_S)
        session = self._connections.live if self._active else None
        item: _Item | None = None
        if session is not None:
            self._inbox.watcher = threading.get_ident()
            item = session.wait(self._inbox, until_s=min(until_s, now_s + _IDLE_S))
            self._inbox.watcher = 0
        else:
            with contextlib.suppress(Empty):
                item = self._inbox.get(timeout=None if until_s == math.inf else max(0.0, until_s - now_s))
        if item is None and step_s is not None:
            self._connections.progress_retired()
        return item

    def _take(self, item: _Item) -> ActiveJob | None:
        """Take an item; return the changed job."""
        match item:
            case ActiveJob() as active:
                self._begin(active)
                return active
            case _Begin(ticket=ticket, opened=opened, error=error):
                return self._begin_opened(self._active.get(ticket), opened, error)
            case _Process(ticket=ticket, request=request, event=event):
                return self._process(self._active.get(ticket), request, event)
            case CancelJob(ticket=ticket, call=call):
                return self._cancel(self._active.get(ticket), call)
            case RunAction(act=act, call=call):
                self._act(act, call)
            case HoldRelease():
                self.holds.give_back(item)
            case _Stop(call=call):
                if call is not None:
                    self._closing.append(call)
            case _Retry():
                pass
        return None

    def _act(self, act: Callable[[], Any], call: Call[Any]) -> None:
        try:
            result = act()
        except Exception as error:  # noqa: BLE001 (raised in the caller's thread)
            call.end(error=error)
        else:
            call.end(result)

    def _begin(self, active: ActiveJob) -> None:
        job, is_submitted = active.job, active.deliver is None
        is_full = is_submitted and self._submitted + len(self._runtime.completions) >= self._submitted_max
        self._active[active.ticket] = active
        self._submitted += is_submitted
        if is_full:
            note = "too many tickets are submitted and not taken"
            self._skip(active, job.declined(Reason.OVERLOADED, note))
            return
        outcomes = job.immediate_outcomes()
        if outcomes is not None:
            self._skip(active, outcomes)
            return
        if len(self._deadlines) > 2 * len(self._active) + _DEADLINES_SPARE:  # most of these have ended
            self._deadlines = [(each.job.until_s, ticket) for ticket, each in self._active.items()]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (job.until_s, active.ticket))
        opened = self._connections.volume_at_hand(job.spec.volume)
        if opened is not None:
            self._begin_at(opened, active)
        elif self._is_connecting():
            self._to_connect.put(active)
        else:
            self._skip(active, job.declined(Reason.OVERLOADED, _NO_THREADS))

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

    def _begin_at(self, opened: OpenedVolume, active: ActiveJob) -> None:
        session, handle = opened
        try:
            active.batch = active.job.begin(
                BatchContext(
                    self._runtime,
                    self.holds,
                    _BatchMailbox(active.ticket, self._inbox),
                    session,
                    handle,
                    active.job.until_s,
                )
            )
        except Exception as error:  # noqa: BLE001 (handed to the submitter of the job)
            session.release()
            self._fail(active, error)

    def _begin_opened(
        self, active: ActiveJob | None, opened: OpenedVolume | None, error: Exception | None
    ) -> ActiveJob | None:
        if active is None:
            if opened is not None:
                opened[0].release()
            return None
        if error is not None:
            self._fail(active, error)
        elif opened is None:
            self._skip(active, active.job.unreachable(self._connections.unreachable_because))
        else:
            self._begin_at(opened, active)
        return active

    def _process(self, active: ActiveJob | None, request: int, event: Event) -> ActiveJob | None:
        if active is not None and active.batch is not None:
            self._try(active, partial(active.batch.on, request, event))
        return active

    def _cancel(self, active: ActiveJob | None, call: Call[Any] | None) -> ActiveJob | None:
        if active is None:
            if call is not None:
                call.end()  # its job was interrupted on the way here
        elif active.batch is None:
            self._skip(active, active.job.late(Reason.CANCELLED))
        else:
            self._try(active, active.batch.cancel)
        return active

    def _try(self, active: ActiveJob, act: Callable[[], None]) -> bool:
        """Do a step of a job; after an error, deliver the error and return False."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 (handed to the submitter of the job)
            self._fail(active, error)
            return False
        return True

    def _go_on(self, active: ActiveJob) -> None:
        """Let a batch start what there is room for, and deliver it when it is over."""
        batch = active.batch
        if batch is None:
            return
        try:
            batch.advance()
            if not batch.is_over:
                if batch.is_starved:
                    self._starved[active.ticket] = active
                return
            batch.close()
            result = self._result(active, batch.outcomes)
        except Exception as error:  # noqa: BLE001 (handed to the submitter of the job)
            self._fail(active, error)
        else:
            self._deliver(active, result, None)

    def _feed(self) -> None:
        """Let jobs that wait for room try again, in the order of their submission."""
        starved, self._starved = self._starved, {}
        for ticket, active in starved.items():
            if ticket in self._active:
                self._go_on(active)

    def _end_late(self) -> None:
        now_s = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            active = self._active.get(heapq.heappop(self._deadlines)[1])
            if active is None:
                continue
            if active.batch is None:
                self._skip(active, active.job.late())
            elif self._try(active, active.batch.tick):
                self._go_on(active)

    def _skip(self, active: ActiveJob, outcomes: Outcomes) -> None:
        """Deliver a job whose batch was never begun, or has lost its client."""
        try:
            if active.batch is not None:
                active.batch.close()
            else:
                active.job.release()
            result = self._result(active, outcomes)
        except Exception as error:  # noqa: BLE001 (handed to the submitter of the job)
            self._deliver(active, None, error)
        else:
            self._deliver(active, result, None)

    def _result(self, active: ActiveJob, outcomes: Outcomes) -> object:
        """Count the ended job, and return its result."""
        job = active.job
        self._runtime.meter.count(
            job.spec, outcomes, lengths=job.lengths, took_s=time.monotonic() - job.begun_s
        )
        return job.result(outcomes, active.batch)

    def _fail(self, active: ActiveJob, error: Exception) -> None:
        """Release the resources of a job, and deliver its error."""
        try:
            if active.batch is None:
                active.job.release()
            else:
                active.batch.close()
        except Exception as another:  # noqa: BLE001 (delivered, and tells of the first)
            error = another
        self._deliver(active, None, error)

    def _deliver(self, active: ActiveJob, result: object, error: Exception | None) -> None:
        del self._active[active.ticket]
        self._submitted -= active.deliver is None
        self._hand_over(active, result, error)
