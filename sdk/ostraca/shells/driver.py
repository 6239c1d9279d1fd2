"""The driver: one thread of a client that carries the jobs nobody waits for in a call.

It hears of every job's requests in one inbox, lets each batch go on, and hands results to whoever submitted
the job. Checking tags and copying happen in this thread, without the interpreter lock. What may block
(dialling, opening a volume on a new connection) happens in a thread beside it, and a job that waits for that
still ends by its deadline here.

States of a job::

    submit --> reaching --reached--> running --> delivered
                   |                    |
                   +-- deadline, cancel, close: delivered as late, cancelled or disconnected

What a job raises is handed to who submitted it, whatever it is: the thread goes on with the others.

*deliver* is called once for each job, in the driver's thread, and must not block. Where the process may have
no more threads it is called by who submits: the job is declined then, and the next one tries again.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from ostraca.jobs import Outcome
from ostraca.shells.done import Ticket
from ostraca_fabric.outcome import Reason
from ostraca_fabric.threads import show_name

if TYPE_CHECKING:
    from ostraca.batch import Batch, Target
    from ostraca.client import Client
    from ostraca.core.events import Event
    from ostraca.jobs import Job

Deliver = Callable[[Ticket, Any, "BaseException | None"], None]
"""Takes a job's result, or what it raised."""

_ROOM_RECHECK_S = 0.05
"""Longest sleep while a batch waits for others' slots, should the word that one is free get lost."""

_DEADLINES_SPARE = 64


@dataclass(slots=True)
class _Carried:
    """A job on its way."""

    ticket: Ticket
    job: Job[Any]
    deliver: Deliver
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class _Submitted:
    carried: _Carried


@dataclass(frozen=True, slots=True)
class _Reached:
    """The job's volume is open on a session; or none was found, or finding one raised."""

    ticket: Ticket
    target: Target | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Heard:
    """Something happened to a request of a batch."""

    ticket: Ticket
    request: int
    event: Event


@dataclass(frozen=True, slots=True)
class _Cancelled:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class _RoomMade:
    """Slots or requests of others have ended."""


@dataclass(frozen=True, slots=True)
class _Stopped:
    """The client is being closed."""


_Item = _Submitted | _Reached | _Heard | _Cancelled | _RoomMade | _Stopped


@dataclass(frozen=True, slots=True)
class _Mail:
    """A batch's mailbox: puts what comes into the driver's inbox, with the job's name on it."""

    ticket: Ticket
    inbox: SimpleQueue[_Item] = field(repr=False)

    def put(self, item: tuple[int, Event], /) -> None:
        """Take what happened to a request; from any thread."""
        self.inbox.put(_Heard(self.ticket, *item))


class Driver:
    """Carries jobs. Starts its threads at the first one."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox: SimpleQueue[_Item] = SimpleQueue()
        self._to_reach: SimpleQueue[_Carried | None] = SimpleQueue()
        self._carried: dict[Ticket, _Carried] = {}
        self._deadlines: list[tuple[float, Ticket]] = []
        self._starved: dict[Ticket, _Carried] = {}
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, ticket: Ticket, job: Job[Any], deliver: Deliver) -> None:
        """Take a job over. Never blocks for what the fabric does."""
        if self._has_started():
            self._inbox.put(_Submitted(_Carried(ticket, job, deliver)))
        else:
            declined = job.ended(job.declined, Reason.OVERLOADED, "this process may have no more threads")
            deliver(ticket, job.skipped(declined), None)

    def cancel(self, ticket: Ticket) -> None:
        """Nobody wants the rest of this job. It is still delivered, soon."""
        self._inbox.put(_Cancelled(ticket))

    def room_made(self) -> None:
        """Slots or requests may have become free. From any thread, under the arena's lock."""
        if self._starved:
            self._inbox.put(_RoomMade())

    def close(self) -> None:
        """End what is left as disconnected, and the threads. The client's session is closed already."""
        with self._starting:
            threads, self._threads = self._threads, []
        self._to_reach.put(None)
        self._inbox.put(_Stopped())
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _has_started(self) -> bool:
        """Start the threads that are missing; False where this process may have no more."""
        roles = ((self._drive, "ostraca-driver"), (self._reach, "ostraca-reach"))
        with self._starting:
            for run, name in roles[len(self._threads) :]:
                thread = threading.Thread(target=run, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # this process may have no more threads, and the next job tries again
                    return False
                self._threads.append(thread)
        return True

    # In the thread beside the driver's.

    def _reach(self) -> None:
        while (carried := self._to_reach.get()) is not None:
            job, ticket = carried.job, carried.ticket
            if time.monotonic() >= job.until_s:
                continue  # ended by the driver already
            try:
                target = self._client.reach.target(job.volume, _Mail(ticket, self._inbox), job.until_s)
            except Exception as error:  # noqa: BLE001 (handed to who submitted the job)
                self._inbox.put(_Reached(ticket, error=error))
            else:
                self._inbox.put(_Reached(ticket, target))

    # In the driver's thread.

    def _drive(self) -> None:
        show_name("driver")
        is_stopped = False
        while not is_stopped:
            item = self._next()
            touched = None if item is None else self._take(item)
            if touched is not None and touched.ticket in self._carried:
                self._go_on(touched)
            if item is None or isinstance(item, _RoomMade | _Heard):
                self._feed()
            self._end_late()
            is_stopped = isinstance(item, _Stopped)
        for carried in list(self._carried.values()):  # the session is gone, and batches find that out
            self._go_on(carried)
        for carried in list(self._carried.values()):
            self._skip(carried, carried.job.ended(carried.job.declined, Reason.DISCONNECTED, "closed here"))

    def _next(self) -> _Item | None:
        """Wait for something, at most until something is due; None when that is so."""
        waits = [self._deadlines[0][0] - time.monotonic()] if self._deadlines else []
        step_s = self._client.reach.progress_s if self._carried else None
        if step_s is not None:
            waits.append(step_s)
        if self._starved:
            waits.append(_ROOM_RECHECK_S)
        try:
            return self._inbox.get(timeout=max(0.0, min(waits)) if waits else None)
        except Empty:
            if step_s is not None:
                self._client.reach.progress()
            return None

    def _take(self, item: _Item) -> _Carried | None:
        """Take one item; return the job it changed."""
        match item:
            case _Submitted(carried=carried):
                self._begin(carried)
                return carried
            case _Reached(ticket=ticket, target=target, error=error):
                return self._reached(self._carried.get(ticket), target, error)
            case _Heard(ticket=ticket, request=request, event=event):
                return self._heard(self._carried.get(ticket), request, event)
            case _Cancelled(ticket=ticket):
                return self._cancelled(self._carried.get(ticket))
            case _RoomMade() | _Stopped():
                return None

    def _begin(self, carried: _Carried) -> None:
        job = carried.job
        self._carried[carried.ticket] = carried
        ready = job.at_once()
        if ready is not None:
            self._skip(carried, ready)
            return
        if len(self._deadlines) > 2 * len(self._carried) + _DEADLINES_SPARE:  # most of these have ended
            self._deadlines = [(each.job.until_s, ticket) for ticket, each in self._carried.items()]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (job.until_s, carried.ticket))
        target = self._client.reach.target_at_hand(job.volume, _Mail(carried.ticket, self._inbox))
        if target is not None:
            self._begin_at(target, carried)
        else:
            self._to_reach.put(carried)

    def _begin_at(self, target: Target, carried: _Carried) -> None:
        try:
            carried.batch = carried.job.begin(target)
        except Exception as error:  # noqa: BLE001 (handed to who submitted the job)
            target.session.put_down()
            self._fail(carried, error)

    def _reached(
        self, carried: _Carried | None, target: Target | None, error: Exception | None
    ) -> _Carried | None:
        if carried is None:
            if target is not None:
                target.session.put_down()
            return None
        if error is not None:
            self._fail(carried, error)
        elif target is None:
            self._skip(carried, carried.job.unreachable(self._client.reach.unreachable_because))
        else:
            self._begin_at(target, carried)
        return carried

    def _heard(self, carried: _Carried | None, request: int, event: Event) -> _Carried | None:
        if carried is not None and carried.batch is not None:
            try:
                carried.batch.on(request, event)
            except Exception as error:  # noqa: BLE001 (handed to who submitted the job)
                self._fail(carried, error)
        return carried

    def _cancelled(self, carried: _Carried | None) -> _Carried | None:
        if carried is not None and carried.batch is None:
            self._skip(carried, carried.job.ended(carried.job.late, Reason.CANCELLED))
        elif carried is not None and carried.batch is not None:
            try:
                carried.batch.cancel()
            except Exception as error:  # noqa: BLE001 (handed to who submitted the job)
                self._fail(carried, error)
        return carried

    def _go_on(self, carried: _Carried) -> None:
        """Let a batch start what there is room for, and deliver it when it is over."""
        batch, job = carried.batch, carried.job
        if batch is None:
            return
        try:
            batch.advance()
            if not batch.is_over:
                if batch.is_starved:
                    self._starved[carried.ticket] = carried
                return
            batch.close()
            result = job.end(Outcome(batch.states, batch.reasons, batch.note), batch)
        except Exception as error:  # noqa: BLE001 (handed to who submitted the job)
            self._fail(carried, error)
        else:
            self._deliver(carried, result, None)

    def _feed(self) -> None:
        """Let those that wait for room try again, in the order in which they were submitted."""
        starved, self._starved = self._starved, {}
        for ticket, carried in starved.items():
            if ticket in self._carried:
                self._go_on(carried)

    def _end_late(self) -> None:
        now_s = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            carried = self._carried.get(heapq.heappop(self._deadlines)[1])
            if carried is None:
                continue
            if carried.batch is None:
                self._skip(carried, carried.job.ended(carried.job.late, Reason.DEADLINE))
            else:
                self._tick(carried, carried.batch)

    def _tick(self, carried: _Carried, batch: Batch) -> None:
        try:
            batch.tick()
        except Exception as error:  # noqa: BLE001 (handed to who submitted the job)
            self._fail(carried, error)
        else:
            self._go_on(carried)

    def _skip(self, carried: _Carried, outcome: Outcome) -> None:
        """Deliver a job whose batch was never begun, or has lost its client."""
        batch, job = carried.batch, carried.job
        try:
            if batch is not None:
                batch.close()
            result = job.skipped(outcome) if batch is None else job.end(outcome, batch)
        except Exception as error:  # noqa: BLE001 (handed to who submitted the job)
            self._deliver(carried, None, error)
        else:
            self._deliver(carried, result, None)

    def _fail(self, carried: _Carried, error: Exception) -> None:
        """Let go of what a job has, and deliver what it raised."""
        try:
            if carried.batch is None:
                carried.job.never_begun()
            else:
                carried.batch.close()
        except Exception as another:  # noqa: BLE001 (delivered, and tells of the first)
            error = another
        self._deliver(carried, None, error)

    def _deliver(self, carried: _Carried, result: object, error: Exception | None) -> None:
        del self._carried[carried.ticket]
        carried.deliver(carried.ticket, result, error)
