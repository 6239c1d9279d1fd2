"""Runner: entry of callers' threads to the runtime of a client, for operations and for questions.

Python runs signal handlers in the main thread, between any two bytecodes, and a handler may raise. So a
caller's thread holds no lock of the client. Shared state lives in the runtime, on threads of the client's
own. The caller posts a request to the driver, and waits for its ``Call`` on a private lock. An exception in
between harms only its own call: the interrupted operation is cancelled and has ended when the exception
propagates; the next operation works. A question to the agent runs in a thread of its own.
"""

from __future__ import annotations

import _thread
import atexit
import itertools
import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from ostraca._connection.dial import SIGNALS_S
from ostraca._connection.rpc import ask
from ostraca._connection.session import AgentSession
from ostraca._operations.completions import Ticket
from ostraca._operations.driver import Driver
from ostraca._operations.job import Deliver, Job, Runtime
from ostraca._protocol.operations import blocks_per_request, windows
from ostraca._protocol.specs import VolumeSpec, check_batch, checked_chain, checked_chains, checked_seconds
from ostraca_fabric.errors import ConnectError, OstracaError, RefusedError, UsageError
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.telemetry.explain import BlockExplanation
from ostraca_fabric.telemetry.status import AgentStatus
from ostraca_fabric.wire.codec import read_body
from ostraca_fabric.wire.messages import EndSession, Explain, Explained, Message, StatusDone, StatusRequest

_Result = TypeVar("_Result")

_CLOSE_S = 10.0
"""Longest wait of ``close``. A dial or a device copy still under way continues in the background."""

_alive: weakref.WeakSet[JobRunner] = weakref.WeakSet()


class Call(Generic[_Result]):
    """The pending result of a call. Another thread calls ``end``; all other methods are the caller's."""

    def __init__(self) -> None:
        self.is_ended = False
        self.is_given_up = False
        """Whether the caller was interrupted, and takes no result."""

        self.result: _Result | None = None
        self._error: BaseException | None = None
        self._ended = _thread.allocate_lock()
        self._ended.acquire()

    def end(self, result: _Result | None = None, error: BaseException | None = None) -> None:
        """Hand the caller a result, or an error to raise. Repeated calls do nothing. Never blocks."""
        if self.is_ended:
            return
        self.result, self._error = result, error
        self.is_ended = True
        self._ended.release()

    def run(self, act: Callable[[], _Result]) -> None:
        """End with the result or the error of *act*."""
        try:
            result = act()
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            self.end(error=error)
        else:
            self.end(result)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait for the end; return whether the call has ended within *timeout_s* seconds."""
        until_s = time.monotonic() + timeout_s
        while not self.is_ended and (left_s := until_s - time.monotonic()) > 0:
            self._ended.acquire(timeout=min(left_s, SIGNALS_S))
        return self.is_ended

    def outlast(self, request_end: Callable[[], None]) -> None:
        """Wait for the end through any exception of signal handlers.

        Calls *request_end* before each wait.
        """
        while not self.is_ended:
            try:
                request_end()
                self.wait()
            except BaseException:  # noqa: BLE001, S112 (the caller raises the first)
                continue

    def take(self) -> _Result:
        """Return the result or raise the error of an ended call, and keep neither."""
        result, self.result = self.result, None
        error, self._error = self._error, None
        try:
            if isinstance(error, OstracaError):
                raise error.with_traceback(None)  # frames of the other thread tell a caller nothing
            if error is not None:
                raise error
        finally:
            del error  # its traceback knows this frame: the two would keep each other
        return result  # type: ignore[return-value]  # a call that did not fail has its result


def _keep(_: object) -> None:
    """Leave an unclaimed result to the garbage collector."""


def run_in_thread(
    act: Callable[[], _Result], *, name: str, dispose: Callable[[_Result], None] = _keep
) -> _Result:
    """Run *act*, which may block, in a new thread; return its result or raise its error.

    If the caller is interrupted, the thread goes on, and *dispose* gets the unclaimed result, maybe twice.
    Raises ConnectError if the process can start no thread.
    """
    call: Call[_Result] = Call()

    def run() -> None:
        call.run(act)
        if call.is_given_up and call.result is not None:
            dispose(call.result)

    _start(threading.Thread(target=run, name=f"ostraca-{name}", daemon=True), call)
    try:
        call.wait()
    except BaseException:
        call.is_given_up = True
        if call.result is not None:
            dispose(call.result)
        raise
    return call.take()


def _start(thread: threading.Thread, call: Call[_Result]) -> None:
    """Start *thread* by way of a helper thread, beyond the reach of signal handlers; end *call* on failure.

    ``Thread.start`` is Python code with a condition inside. An interrupt could leave the condition's lock
    taken, and the new thread would wait for the lock forever.
    """

    def start() -> None:
        try:
            thread.start()
        except RuntimeError as error:
            call.end(error=_no_thread(error))

    try:
        _thread.start_new_thread(start, ())
    except RuntimeError as error:
        raise _no_thread(error) from error


def _no_thread(error: RuntimeError) -> ConnectError:
    return ConnectError(
        f"the process can start no more threads ({error}): raise the limit (ulimit -u, or pids.max of the "
        "cgroup)"
    )


class JobRunner:
    """Runs operations of one client. Thread-safe. Close it."""

    _is_closed = True  # until construction is complete

    def __init__(self, runtime: Runtime, name: str) -> None:
        """Begin without a thread; *name* describes the client in warnings."""
        self.runtime = runtime
        self._name = name
        self._driver = Driver(runtime, submitted_max=runtime.settings.submitted_max)
        self._tickets = itertools.count(1)
        self._counts_later = False
        """Whether callers have done jobs since the last ``await_counts``."""

        self._is_closed = False
        _alive.add(self)

    def start(self, until_s: float) -> None:
        """Start the client's thread, and connect to an agent.

        Raises ConnectError if the process can start no thread, or if no agent answers by *until_s*.
        """
        self._driver.start()
        with self.runtime.connections.borrow_session(until_s):
            """A live session exists."""

    def run(self, job: Job[Any, _Result]) -> _Result:
        """Run a job to its end, and return its result.

        An exception of a signal handler also waits for the end of the job.
        """
        self.runtime.check_open()
        self._check_thread()
        call: Call[_Result] = Call()
        job.ticket, job.deliver = Ticket(next(self._tickets)), call.end
        try:
            self._driver.begin(job)
            call.wait()
        except BaseException:
            call.outlast(lambda: self._driver.cancel(job.ticket, call.end))
            raise
        return call.take()

    def run_brief(self, job: Job[Any, _Result]) -> _Result:
        """Run a job in this thread, if it is brief and a connection of callers is free; else as ``run``."""
        self.runtime.check_open()
        if job.is_brief and self.runtime.connections.callers.run(job):
            ended_s = time.monotonic()
            is_late = ended_s >= job.until_s
            self._driver.run(partial(self._count, job, ended_s), Call().end, is_urgent=is_late)
            self._counts_later = True
            return job.result()
        if job.is_brief and self.runtime.is_closed:  # meanwhile
            job.decline(Reason.DISCONNECTED, "closed here")
            return job.result()
        return self.run(job)

    def _count(self, job: Job[Any, Any], ended_s: float) -> None:
        """Count a job of a caller's thread. In the driver's thread."""
        job.count()
        self.runtime.meter.count(job, ended_s - job.begun_s)
        session = self.runtime.connections.session
        if ended_s >= job.until_s and session is not None:
            session.report_late(job.begun_s)

    def await_counts(self) -> None:
        """Wait for the counts of ended jobs, briefly: a busy driver counts later."""
        runtime = self.runtime
        if not self._counts_later or runtime.is_closed or not runtime.is_ours or self._driver.is_this_thread:
            return
        self._counts_later = False
        call: Call[None] = Call()
        self._driver.run(call.end, call.end)
        call.wait(SIGNALS_S)

    def submit(self, job: Job[Any, Any], deliver: Deliver | None = None) -> Ticket:
        """Start a job, and pass its result to *deliver*; without, to the queue of completions.

        *deliver* runs in the driver's thread and must not block.
        """
        self.runtime.check_open()
        job.ticket, job.deliver = Ticket(next(self._tickets)), deliver
        self._driver.begin(job)
        return job.ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a job, which still ends, soon. Never blocks."""
        self.runtime.check_process()
        self._driver.cancel(ticket)

    def do(self, act: Callable[[], _Result]) -> _Result:
        """Run a short action in the driver's thread, and return its result."""
        self.runtime.check_open()
        self._check_thread()
        return self.do_at_end(act)

    def post(self, act: Callable[[], None]) -> None:
        """Run a short action in the driver's thread, without a result. Never blocks."""
        self.runtime.check_open()
        call: Call[None] = Call()
        self._driver.run(partial(call.run, act), call.end)

    def do_at_end(self, act: Callable[[], _Result]) -> _Result:
        """Run a short action as ``do``, also while the client is being closed.

        After a ClosedError in the client's own process, the driver begins no job any more. A finalizer in the
        driver's thread runs the action at once, amid a step of the driver: the action waits for no lock.
        """
        self.runtime.check_process()
        if self._driver.is_this_thread:
            return act()
        call: Call[_Result] = Call()
        self._driver.run(partial(call.run, act), call.end)
        call.wait()
        return call.take()

    def _check_thread(self) -> None:
        """Raise UsageError in the driver's thread, where finalizers of callers may run."""
        if self._driver.is_this_thread:
            raise UsageError("a finalizer in the client's own thread can't wait for the client: submit it")

    def close(self) -> None:
        """End all jobs, the connection and the arena. Repeated calls do nothing."""
        if self.runtime.is_ours:
            self._is_closed = self.runtime.is_closed = True
            call: Call[None] = Call()
            self._driver.end(call.end)
            if not self._driver.is_this_thread:
                call.wait(_CLOSE_S)
            _alive.discard(self)

    def __del__(self) -> None:
        """End an unclosed client, with a ResourceWarning."""
        if not self._is_closed and self.runtime.is_ours:
            self._is_closed = self.runtime.is_closed = True
            self._driver.end(Call().end)
            warnings.warn(
                f"{self._name} was dropped and not closed", ResourceWarning, stacklevel=2, source=self
            )


@atexit.register
def _close_all() -> None:
    """Close every client before the interpreter exits.

    An I/O loop must not run in a half torn down process.
    """
    for runner in list(_alive):
        runner.close()


_Answer = TypeVar("_Answer", StatusDone, Explained)


def open_volume(runner: JobRunner, volume: VolumeSpec, *, timeout_s: float) -> None:
    """Open a volume on the live session.

    Raises UsageError, RefusedError and ConnectError.
    """
    opened = runner.runtime.connections.open_volume
    try:
        _ask(runner, timeout_s, lambda session, until_s: opened(session, volume, until_s))
    except RefusedError as error:
        if error.code == "usage":
            raise UsageError(str(error)) from error
        raise


def query_status(runner: JobRunner, *, timeout_s: float) -> AgentStatus:
    """Return the agent's status.

    Raises ConnectError if no answer arrives in time.
    """
    answer = _query(runner, lambda request, _: StatusRequest(request), StatusDone, timeout_s)
    return read_body(answer.body, AgentStatus)


def query_explanation(
    runner: JobRunner, volume: VolumeSpec, chain: Chain, *, timeout_s: float
) -> BlockExplanation:
    """Return the explanation of one block.

    Raises UsageError, RefusedError and ConnectError.
    """
    if len(checked_chain(chain, hash_bytes=volume.hash_bytes)) != 1:
        raise UsageError(f"{len(chain)} blocks to explain: name a single block, as in chain[4:5]")
    name, spans = volume.record.name, (chain.span(),)
    answer = _query(
        runner, lambda request, left_s: Explain(request, left_s, name, spans), Explained, timeout_s
    )
    return read_body(answer.body, BlockExplanation)


def send_session_end(runner: JobRunner, volume: VolumeSpec, chains: Chain | Sequence[Chain]) -> None:
    """Send the hint of ``Volume.end_session``, which has no answer. Never blocks.

    Raises UsageError and ClosedError.
    """
    listed = checked_chains(chains, hash_bytes=volume.hash_bytes)
    check_batch(sum(map(len, listed)), blocks_max=volume.settings.batch_blocks_max)
    connections = runner.runtime.connections

    def act() -> None:
        session = connections.live
        handle = None if session is None else session.handles.get(volume.key)
        if session is not None and handle is not None:
            for part in windows(listed, blocks_per_request(session.limits, volume.hash_bytes)):
                session.send(EndSession(handle, tuple(chain.span() for chain in part)))

    runner.post(act)


def _query(
    runner: JobRunner, question: Callable[[int, float], Message], answer: type[_Answer], timeout_s: float
) -> _Answer:
    """Ask the agent; *question* builds the message from a request id and the remaining time."""

    def act(session: AgentSession, until_s: float) -> _Answer:
        return ask(
            session, lambda request: question(request, until_s - time.monotonic()), answer, until_s=until_s
        )

    return _ask(runner, timeout_s, act)


def _ask(runner: JobRunner, timeout_s: float, act: Callable[[AgentSession, float], _Result]) -> _Result:
    """Call *act* with a live session and the end of its time, in a thread of its own."""
    runtime = runner.runtime
    runtime.check_open()
    longest_s = runtime.settings.deadline_s_max
    within_s = checked_seconds("timeout_s", timeout_s, longest_s=longest_s)
    if within_s <= 0:
        raise ConnectError(f"no time was left to ask the agent: timeout_s is {within_s:g}")
    until_s = time.monotonic() + within_s

    def borrow() -> _Result:
        with runtime.connections.borrow_session(until_s) as session:
            return act(session, until_s)

    return run_in_thread(borrow, name="rpc")
