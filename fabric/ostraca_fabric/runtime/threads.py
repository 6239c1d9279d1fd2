"""Threads: repeated background work, and names shown by the kernel.

The names appear in ``top -H``, in profilers, and in ``benchmarks.thread_time``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")

_PR_SET_NAME = 15
_NAME_BYTES_MAX = 15

_libc = ctypes.CDLL(None, use_errno=True)


def show_name(name: str) -> None:
    """Give the calling thread a kernel name, cut to 15 bytes.

    Before 3.14 Python does not pass the name of ``threading.Thread`` to the kernel.
    """
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:_NAME_BYTES_MAX]), 0, 0, 0)


def run_in_background(name: str, act: Callable[[], _Result]) -> Future[_Result]:
    """Run *act* once, in a daemon thread, or here if the process can start no more threads."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            result = act()
        except BaseException as error:  # noqa: BLE001 (raised in the waiting thread)
            future.set_exception(error)
        else:
            future.set_result(result)

    def run_in_thread() -> None:
        show_name(name)
        run()

    try:
        threading.Thread(target=run_in_thread, name=f"ostraca-{name}", daemon=True).start()
    except RuntimeError:
        run()
    return future


class BackgroundTask:
    """Work repeated in a thread, which ends when the work is needed no longer. Thread-safe. Close it."""

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        *,
        is_needed: Callable[[], bool],
        pauses_s: Callable[[], Iterator[float]],
    ) -> None:
        """Begin without a thread.

        Each thread calls *pauses_s* once, and waits for the next pause before each turn. *is_needed* is asked
        under a lock, before each pause; it never blocks.
        """
        self._name = name
        self._work = work
        self._is_needed = is_needed
        self._pauses_s = pauses_s
        self._changing = threading.Lock()  # held while the thread begins or decides to end
        self._is_running = False
        self._closed = threading.Event()

    @property
    def is_closed(self) -> bool:
        """Whether the work is to end soon."""
        return self._closed.is_set()

    def start(self) -> bool:
        """Start the thread if the work is needed and none runs. Never blocks.

        Returns False if the process can start no more threads; then the next call tries again.
        """
        with self._changing:
            if self._is_running or self.is_closed or not self._is_needed():
                return True
            thread = threading.Thread(target=self._run, name=f"ostraca-{self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._is_running = True
            return True

    def close(self) -> None:
        """End a pause, and start no further turn. Does not wait for a turn under way."""
        self._closed.set()

    def _run(self) -> None:
        show_name(self._name)
        pauses_s = self._pauses_s()
        try:
            while self._continues():
                if not self._closed.wait(next(pauses_s)):
                    self._work()
        except BaseException:
            with self._changing:  # ``start`` may start another thread
                self._is_running = False
            raise

    def _continues(self) -> bool:
        with self._changing:
            self._is_running = not self.is_closed and self._is_needed()
            return self._is_running
