"""Hand-off between callers' threads and the client's own threads, without a lock that a caller could hold.

Python runs signal handlers in the main thread, between any two bytecodes, and a handler may raise. So a
caller's thread holds no lock of the client. The caller posts a request to the driver's ``Inbox``, and waits
for its ``Call`` on a private lock, or takes results from the ``CompletionQueue``. An exception in between
leaves all shared state unchanged.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue
from threading import get_ident
from typing import TYPE_CHECKING, Generic, NewType, TypeVar

from ostraca_fabric.errors import ConnectError, OstracaError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca._memory.views import BlockViews
    from ostraca.results import GetResult, LookupResult, PrefetchResult, PutResult

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_SIGNALS_S = 0.05
"""Longest sleep of a caller. A signal that comes right before the sleep does not end it, so its handler would
run at the operation's deadline only."""


class Inbox(Generic[_Item]):
    """Queue for a single reader, with a descriptor to wake the reader in ``select``.

    ``put`` may be called at any moment: in a signal handler, in a finalizer, and between any two bytecodes of
    another ``put``. The queue is C code, without a lock for a thread to leave taken.
    """

    descriptor = -1  # as long as none was made, which may fail

    def __init__(self, no_op: _Item) -> None:
        """Begin empty; *no_op* is an item without a meaning, only to wake the reader."""
        self._no_op = no_op
        self.items: SimpleQueue[_Item] = SimpleQueue()
        """The items. Direct ``put`` calls here do not wake a reader in ``select``."""

        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable after a ``put`` of another thread than ``watcher``. The reader clears the descriptor."""

        self.watcher = 0
        """The identifier of the reader's thread while in ``select``, else 0: set before a look for items."""

    def put(self, item: _Item) -> None:
        """Add an item. Never blocks."""
        self.items.put(item)
        if self.watcher not in (0, get_ident()):  # the reader itself may add items in its own turn
            os.eventfd_write(self.descriptor, 1)

    def wake(self) -> None:
        """Wake the reader."""
        self.put(self._no_op)

    def empty(self) -> bool:
        """Tell whether the queue is empty now."""
        return self.items.empty()

    def get(self, timeout: float | None = None) -> _Item:
        """Take the oldest item, within *timeout* seconds. Raises queue.Empty."""
        return self.items.get(timeout=timeout)

    def __del__(self) -> None:
        """Close the descriptor. Closed earlier, a late ``put`` could write to a reused number."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


Ticket = NewType("Ticket", int)
"""Names a submitted operation; never used twice by one client."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An ended ticket: the result or the error of the blocking call."""

    ticket: Ticket
    result: LookupResult | GetResult | PutResult | PrefetchResult | BlockViews | None
    error: BaseException | None = None


class CompletionQueue:
    """Ended tickets, with a descriptor readable while the queue is not empty.

    The client's driver adds, and any thread takes, without a lock: an exception of a signal handler inside
    ``take`` loses no ticket. The descriptor counts additions, and each taken ticket is counted off. So the
    count is never below the length of the queue.
    """

    _descriptor = -1  # as long as none was made, which may fail

    def __init__(self) -> None:
        self._completions: deque[Completion] = deque()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._is_closed = False

    def __len__(self) -> int:
        """Count the tickets not taken."""
        return len(self._completions)

    def put(self, completion: Completion) -> None:
        """Add a ticket. In the driver's thread only."""
        self._completions.append(completion)
        os.eventfd_write(self._descriptor, 1)

    def take(self) -> list[Completion]:
        """Take all tickets, oldest first."""
        taken: list[Completion] = []
        # A single call into C, ended by the IndexError of an empty queue: no ticket is lost halfway.
        with contextlib.suppress(IndexError):
            taken.extend(iter(self._completions.popleft, None))
        # An interrupted call before may have left a taken ticket counted.
        with contextlib.suppress(BlockingIOError):
            for _ in taken or (None,):
                os.eventfd_read(self._descriptor)
        if not taken and self._completions:  # a new ticket may have been counted off already
            os.eventfd_write(self._descriptor, 1)
        return taken

    def fileno(self) -> int:
        """Return the descriptor; -1 after ``close``."""
        return -1 if self._is_closed else self._descriptor

    def close(self) -> None:
        """Stop offering the descriptor. The remaining tickets can still be taken."""
        self._is_closed = True

    def __del__(self) -> None:
        """Close the descriptor: a thread in ``take`` may have used it until now."""
        if self._descriptor >= 0:
            os.close(self._descriptor)


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

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait for the end; return whether the call has ended within *timeout_s* seconds."""
        until_s = time.monotonic() + timeout_s
        while not self.is_ended and (left_s := until_s - time.monotonic()) > 0:
            self._ended.acquire(timeout=min(left_s, _SIGNALS_S))
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
        try:
            result = act()
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            call.end(error=error)
        else:
            call.end(result)
            if call.is_given_up:
                dispose(result)

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
