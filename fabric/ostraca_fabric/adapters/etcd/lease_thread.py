"""The thread in which a process keeps its leases: one for all keepers, on one event loop.

grpc.aio has one poller for all event loops of a process. Whichever loop wakes first takes what the poller has
found, and hands each other loop what is its own. Of a call that was given up the poller hears once more, when
its parts have ended, and nothing public waits for that. So when a loop is closed right after calls on it were
given up, another one is left with news for it, and logs ``RuntimeError: Event loop is closed``.

Here the loop is never closed. It stops when its last user leaves, and goes on with the next: one that stands
still takes what it is told, and complains of no other that has closed.

A process that was forked from one with such a thread has none, and makes its own with its first keeper.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, TypeVar

from ostraca_fabric.threads import show_name

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future
    from typing import Any

_Given = TypeVar("_Given")


class LeaseThread:
    """A thread with an event loop, while anybody uses it. Get it from ``lease_thread``. For any thread."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread()
        self._users = 0
        self._changing = threading.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether work is done here: never in a process that was forked from this one."""
        return self._thread.is_alive()

    def enter(self) -> None:
        """Use it from now on; the first who does starts it. You must ``leave``."""
        with self._changing:
            self._users += 1
            if self._users == 1:
                # A daemon, so that who forgets to leave does not keep the process from ending.
                self._thread = threading.Thread(target=self._run, name="etcd-lease", daemon=True)
                self._thread.start()

    def leave(self) -> None:
        """Use it no more, once what you submitted has ended; the last who leaves ends it."""
        with self._changing:
            self._users -= 1
            if not self._users:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()

    def submit(self, work: Coroutine[Any, Any, _Given]) -> Future[_Given]:
        """Do work there. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        show_name("etcd-lease")
        self._loop.run_forever()


_threads: dict[int, LeaseThread] = {}
"""By process id. A forked process keeps its parent's as it is: to close it there would disturb the parent."""

_making = threading.Lock()


def lease_thread() -> LeaseThread:
    """Return this process's thread for leases."""
    with _making:
        process = os.getpid()
        if process not in _threads:
            _threads[process] = LeaseThread()
        return _threads[process]


def _unlock() -> None:
    """Let a forked process make its own, even if another thread of its parent was just about to."""
    global _making  # noqa: PLW0603
    _making = threading.Lock()


os.register_at_fork(after_in_child=_unlock)
