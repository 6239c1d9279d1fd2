"""The crew: threads of a client that share a wave's bytes with the thread that has the wave.

Checking and copying a wave is calls into C, without the interpreter lock. Whoever has a large one, a caller
or the driver, cuts it at blocks into shares, and does shares until none is left; so does every thread of the
crew that is free. Shares are taken in order: when time runs out, what was looked at is still about the front
of the wave, which is what a prefix is worth most for. Nobody waits for a helper that is busy elsewhere, only
for shares that are being done.

**Ends.** ``share`` returns or raises when no thread does anything of the wave any more, an interrupt
included: afterwards its slots and the caller's memory are their owners' again.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.threads import show_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

SHARE_BYTES = 2 << 20
"""The least that is worth another thread: a fifth of a millisecond of copying, several times what waking one
costs."""

_SHARES_PER_THREAD = 2
"""Of a wave that is large enough: who is held up leaves one to the others."""

_CPUS_PER_THREAD = 4
_THREADS_MAX = 4


def threads_for(cpus: int) -> int:
    """Choose how many threads copy one wave where this process may use so many CPUs.

    Up to three have enough to do with the engine, the transport and one copy: two threads were no faster than
    one where two CPUs share the memory's bandwidth. Then a quarter of them, two at least: the engine's
    threads want the others. Four copy what a 400 Gb/s network brings.
    """
    if cpus < _CPUS_PER_THREAD:
        return 1
    return min(_THREADS_MAX, max(2, cpus // _CPUS_PER_THREAD))


class Crew:
    """Up to *threads* threads for each wave, that of its owner among them. Thread-safe. Close it.

    Starts its threads with the first wave that is shared; without one, or with one thread, there are none.
    """

    def __init__(self, threads: int) -> None:
        self._helpers_max = threads - 1
        self._waves: SimpleQueue[_Wave | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def share(self, lengths: NDArray[np.uint32], work: Callable[[slice], None]) -> None:
        """Call *work* with slices that together are all blocks, of these *lengths* in bytes.

        Several at once, from several threads, when there are bytes enough. Raises what a call raised, once
        all have ended; what was not begun then is not done.
        """
        shares = self._shares(lengths) if self._helpers_max else []
        if len(shares) < 2:  # noqa: PLR2004 (two can be done at once)
            work(slice(0, len(lengths)))
            return
        wave = _Wave(work, shares)
        for _ in range(min(self._helpers(), len(shares) - 1)):
            self._waves.put(wave)
        wave.finish()

    def close(self) -> None:
        """End the threads. Waves that come yet are done by their owners alone."""
        with self._starting:
            self._is_closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._waves.put(None)
        for thread in threads:
            thread.join()

    def _shares(self, lengths: NDArray[np.uint32]) -> list[slice]:
        """Cut blocks into shares of about equal bytes, ``SHARE_BYTES`` each or more."""
        ends = np.cumsum(lengths, dtype=np.int64)
        all_bytes = int(ends[-1]) if len(ends) else 0
        wanted = min(all_bytes // SHARE_BYTES, _SHARES_PER_THREAD * (1 + self._helpers_max))
        if wanted < 2:  # noqa: PLR2004
            return []
        marks = np.arange(1, wanted) * (all_bytes // wanted)
        cuts = [0, *(np.searchsorted(ends, marks) + 1).tolist(), len(ends)]
        return [slice(first, last) for first, last in pairwise(cuts) if first < last]

    def _helpers(self) -> int:
        """Count the threads, and start them if this is the first wave."""
        with self._starting:
            if not self._threads and not self._is_closed:
                self._start()
            return len(self._threads)

    def _start(self) -> None:
        for number in range(1, 1 + self._helpers_max):
            thread = threading.Thread(target=self._help, name=f"ostraca-copy-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # this process may have no more threads, and the owner does all of a wave
                return
            self._threads.append(thread)

    def _help(self) -> None:
        show_name("copy")
        while self._help_once():
            pass

    def _help_once(self) -> bool:
        """Help with the next wave; nothing of it is kept while the next one is waited for."""
        wave = self._waves.get()
        if wave is not None:
            wave.help()
        return wave is not None


class _Wave:
    """One wave, and who is doing something of it."""

    def __init__(self, work: Callable[[slice], None], shares: list[slice]) -> None:
        self._work = work
        self._left = deque(shares)
        self._changed = threading.Condition(threading.Lock())  # guards what follows
        self._helpers = 0
        self._error: BaseException | None = None

    def help(self) -> None:
        """Do shares beside the owner, if any is left."""
        with self._changed:
            self._helpers += 1
        try:
            self._do()
        except BaseException as error:  # noqa: BLE001 (its owner raises it)
            self._left.clear()
            self._error = error
        with self._changed:
            self._helpers -= 1
            self._changed.notify_all()

    def finish(self) -> None:
        """Do shares until none is left, and wait for helpers. Raises what a share raised."""
        try:
            self._do()
        finally:
            error = self._settle()
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback knows this frame: the two would outlive the wave, and keep its memory

    def _do(self) -> None:
        while True:
            try:
                share = self._left.popleft()
            except IndexError:
                return
            self._work(share)

    def _settle(self) -> BaseException | None:
        """Leave helpers nothing to begin, and wait for those that have; return what one raised.

        An interrupt meanwhile is raised when nothing is under way any more.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._left.clear()
                    self._changed.wait_for(lambda: not self._helpers)
            except BaseException as raised:  # noqa: BLE001 (raised below)
                interrupt = raised
            else:
                break
        error, self._error = self._error, None
        try:
            if interrupt is not None:
                raise interrupt
        finally:
            del interrupt
        return error
