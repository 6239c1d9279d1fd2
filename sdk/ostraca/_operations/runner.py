"""Runner: entry of callers' threads to the runtime of a client, for all front ends.

Shared state lives in the runtime, on threads of the client's own. Callers' threads post requests and wait
(``ostraca._operations.handoff``), so an exception of a signal handler harms only its own call. The
interrupted operation is cancelled and has ended when the exception propagates; the next operation works.
"""

from __future__ import annotations

import atexit
import itertools
import warnings
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from ostraca._operations.driver import ActiveJob, CancelJob, Driver, RunAction
from ostraca._operations.handoff import Call, Ticket, run_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca._memory.views import SlotHolds
    from ostraca._operations.batch import OperationJob, Runtime
    from ostraca._operations.driver import Deliver

_Result = TypeVar("_Result")

_CLOSE_S = 10.0
"""Longest wait of ``close``. A dial or a device copy still under way continues in the background."""

_alive: weakref.WeakSet[JobRunner] = weakref.WeakSet()


class JobRunner:
    """Runs operations of one client. Thread-safe. Close it."""

    _is_closed = True  # until construction is complete

    def __init__(self, runtime: Runtime, name: str) -> None:
        """Begin without a thread; *name* describes the client in warnings."""
        self.runtime = runtime
        self._name = name
        self._driver = Driver(runtime, submitted_max=runtime.settings.submitted_max)
        self._tickets = itertools.count(1)
        self._is_closed = False
        _alive.add(self)

    def start(self, until_s: float) -> None:
        """Start the client's thread, and connect to an agent.

        Raises ConnectError if the process can start no thread, or if no agent answers by *until_s*.
        """
        self._driver.start()
        with self.runtime.connections.borrow_session(until_s):
            """A live session exists."""

    @property
    def holds(self) -> SlotHolds:
        """Slots held by callers, for code in the driver's thread."""
        return self._driver.holds

    def run(self, job: OperationJob[_Result]) -> _Result:
        """Run a job to its end, and return its result.

        An exception of a signal handler also waits for the end of the job.
        """
        self.runtime.check_open()
        ticket, call = self._next_ticket(), Call[_Result]()
        try:
            self._driver.post(ActiveJob(ticket, job, lambda _, *end: call.end(*end)))
            call.wait()
        except BaseException:
            call.outlast(lambda: self._driver.post(CancelJob(ticket, call)))
            raise
        return call.take()

    def submit(self, job: OperationJob[Any], deliver: Deliver | None = None) -> Ticket:
        """Start a job, and pass its result to *deliver*; without, to the queue of completions.

        *deliver* runs in the driver's thread and must not block.
        """
        self.runtime.check_open()
        ticket = self._next_ticket()
        self._driver.post(ActiveJob(ticket, job, deliver))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a job, which still ends, soon. Never blocks."""
        self.runtime.check_process()
        self._driver.post(CancelJob(ticket))

    def do(self, act: Callable[[], _Result]) -> _Result:
        """Run a short action in the driver's thread, and return its result."""
        self.runtime.check_open()
        call: Call[_Result] = Call()
        self._driver.post(RunAction(act, call))
        call.wait()
        return call.take()

    def post(self, act: Callable[[], None]) -> None:
        """Run a short action in the driver's thread, without a result. Never blocks."""
        self.runtime.check_open()
        self._driver.post(RunAction(act, Call()))

    def run_in_thread(self, act: Callable[[], _Result]) -> _Result:
        """Run a blocking action in a thread of its own, and return its result."""
        self.runtime.check_open()
        return run_in_thread(act, name="rpc")

    def close(self) -> None:
        """End all jobs, the connection and the arena. Repeated calls do nothing."""
        if self.runtime.is_ours:
            self._is_closed = self.runtime.is_closed = True
            self._driver.stop(timeout_s=_CLOSE_S)
            _alive.discard(self)

    def __del__(self) -> None:
        """End an unclosed client, with a ResourceWarning."""
        if not self._is_closed and self.runtime.is_ours:
            self._is_closed = self.runtime.is_closed = True
            self._driver.stop()
            warnings.warn(
                f"{self._name} was dropped and not closed", ResourceWarning, stacklevel=2, source=self
            )

    def _next_ticket(self) -> Ticket:
        return Ticket(next(self._tickets))


@atexit.register
def _close_all() -> None:
    """Close every client before the interpreter exits.

    An I/O loop must not run in a half torn down process.
    """
    for runner in list(_alive):
        runner.close()
