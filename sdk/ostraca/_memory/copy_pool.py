"""Copy pool: verification, tags and copies of blocks, shared among threads.

Verifying and copying a wave are calls into C, without the GIL unless brief. The client's driver cuts a large
wave at block boundaries into shares. The driver and every free helper take shares in order until none is
left. When time runs out, the processed blocks are therefore mostly the front of the wave: the most valuable
part of a prefix. The owner never waits for a busy helper, only for shares under way.

**Ends.** ``share`` returns or raises only when no thread works on the wave any more. The slots and the
caller's memory then belong to their owners again. An owner with helpers is the driver, in whose thread no
handler of signals raises.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from ctypes import CDLL
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.native import library, library_for
from ostraca_fabric.runtime.process_memory import ProcessBlocks, copy_verified
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.tables.digests import TAG_BYTES, are_good, check_states, tags_of

SHARE_BYTES = 2 << 20
"""Smallest share worth another thread: a fifth of a millisecond of copying, several times the cost of a
wake-up.
"""

_SHARES_PER_THREAD = 2
"""Shares of a large wave per thread: a delayed thread leaves one to the others."""

_CPUS_PER_THREAD = 4
_THREADS_MAX = 4

_HASH_BYTES = 32 << 20
"""A few milliseconds of hashing: the most a get overruns its deadline by."""


def threads_for(cpus: int, *, are_fetching: bool = False) -> int:
    """Choose the number of threads for one wave, with so many CPUs available.

    Up to three CPUs are busy with the engine, the transport and one copy. With two CPUs on one memory bus,
    two threads were no faster than one, unless they *are_fetching*: then no transport is busy. Beyond three
    CPUs, the pool takes a quarter, two at least, and leaves the others to the engine. Four threads copy at
    the rate of a 400 Gb/s network.
    """
    if cpus < _CPUS_PER_THREAD:
        return 2 if are_fetching and cpus > 1 else 1
    return min(_THREADS_MAX, max(2, cpus // _CPUS_PER_THREAD))


class CopyPool:
    """Pool of up to *threads* threads per wave, the owner's included. Thread-safe.

    Close the pool. The threads start with the first shared wave; with a single thread there are none.
    """

    def __init__(self, threads: int) -> None:
        self._helpers_max = threads - 1
        self._waves: SimpleQueue[_Wave | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def calls_for(self, lengths: NDArray[np.uint32]) -> CDLL:
        """Return the library for work on these blocks: without the GIL if the work is long, or shared."""
        all_bytes = int(lengths.sum(dtype=np.int64))
        is_shared = self._helpers_max > 0 and all_bytes >= 2 * SHARE_BYTES
        return library if is_shared else library_for(all_bytes)

    def share(self, lengths: NDArray[np.uint32], work: Callable[[slice], None]) -> None:
        """Call *work* with slices that together cover all blocks.

        *lengths* are the blocks' bytes. With enough bytes, several threads call *work* at once. Raises an
        error of a call after all calls have ended; shares not yet begun are then dropped.
        """
        shares = self._shares(lengths) if self._helpers_max and len(lengths) > 1 else []
        if len(shares) < 2:  # noqa: PLR2004 (two can run at once)
            work(slice(0, len(lengths)))
            return
        wave = _Wave(work, shares)
        for _ in range(min(self._helpers(), len(shares) - 1)):
            self._waves.put(wave)
        wave.finish()

    def close(self) -> None:
        """End the threads. The owners of later waves do all the work."""
        with self._starting:
            self._is_closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._waves.put(None)
        for thread in threads:
            thread.join()

    def _shares(self, lengths: NDArray[np.uint32]) -> list[slice]:
        """Cut blocks into shares of about equal bytes, at least ``SHARE_BYTES`` each."""
        ends = np.cumsum(lengths, dtype=np.int64)
        all_bytes = int(ends[-1]) if len(ends) else 0
        wanted = min(all_bytes // SHARE_BYTES, _SHARES_PER_THREAD * (1 + self._helpers_max))
        if wanted < 2:  # noqa: PLR2004
            return []
        marks = np.arange(1, wanted) * (all_bytes // wanted)
        cuts = [0, *(np.searchsorted(ends, marks) + 1).tolist(), len(ends)]
        return [slice(first, last) for first, last in pairwise(cuts) if first < last]

    def _helpers(self) -> int:
        """Return the number of threads, after starting them for the first wave."""
        with self._starting:
            if not self._threads and not self._is_closed:
                self._start()
            return len(self._threads)

    def _start(self) -> None:
        for number in range(1, 1 + self._helpers_max):
            thread = threading.Thread(target=self._help, name=f"ostraca-copy-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads: the owner does all of a wave
                return
            self._threads.append(thread)

    def _help(self) -> None:
        show_name("copy")
        while self._help_once():
            pass

    def _help_once(self) -> bool:
        """Help with the next wave, keeping no reference during the next wait."""
        wave = self._waves.get()
        if wave is not None:
            wave.help()
        return wave is not None


class _Wave:
    """Wave in work, with the number of its helpers."""

    def __init__(self, work: Callable[[slice], None], shares: list[slice]) -> None:
        self._work = work
        self._left = deque(shares)
        self._changed = threading.Condition(threading.Lock())  # guards the next fields
        self._helpers = 0
        self._error: BaseException | None = None

    def help(self) -> None:
        """Do shares beside the owner, if any are left."""
        with self._changed:
            self._helpers += 1
        try:
            self._do()
        except BaseException as error:  # noqa: BLE001 (raised by the owner)
            self._left.clear()
            self._error = error
        with self._changed:
            self._helpers -= 1
            self._changed.notify_all()

    def finish(self) -> None:
        """Do shares until none is left, and wait for helpers.

        Raises the error of a share.
        """
        try:
            self._do()
        finally:
            self._left.clear()
            with self._changed:
                self._changed.wait_for(lambda: not self._helpers)
        error, self._error = self._error, None
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


def verdicts_in(
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
    tags: NDArray[np.uint8],
    *,
    until_s: float,
    copy_pool: CopyPool,
    source: ProcessBlocks | None = None,
) -> NDArray[np.uint8]:
    """Verify blocks in order until *until_s*; return a ``CheckState`` for each.

    Arguments are those of ``check_tags``.
    """
    verdicts = np.zeros(len(lengths), np.uint8)
    for some in slices_until(lengths, until_s):
        columns = offsets[some], lengths[some], seeds[some], tags[some]
        copied = None if source is None else source[some]
        verdicts[some] = check_tags(memory, *columns, copy_pool=copy_pool, source=copied)
    return verdicts


def check_tags(
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
    tags: NDArray[np.uint8],
    *,
    copy_pool: CopyPool,
    source: ProcessBlocks | None = None,
) -> NDArray[np.uint8]:
    """Check tags in the copy pool, with the arguments of ``are_good``; return a ``CheckState`` for each.

    Blocks with a *source* are copied from there first. A failed copy is noted in the source's errors, and
    blocks after it are PENDING.
    """
    states, calls = np.zeros(len(lengths), np.uint8), copy_pool.calls_for(lengths)

    def check(share: slice) -> None:
        columns = offsets[share], lengths[share], seeds[share], tags[share]
        if source is None:
            states[share] = check_states(are_good(memory, *columns, calls=calls))
            return
        try:
            copy_verified(source[share], memory, *columns, states[share], calls=calls)
        except OSError as error:
            source.errors.append(error.errno or 0)

    copy_pool.share(lengths, check)
    return states


def compute_tags(
    memory: NDArray[np.uint8] | None,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
    *,
    copy_pool: CopyPool,
) -> NDArray[np.uint8]:
    """Compute tags in the copy pool, as ``ostraca_fabric.tables.digests.tags_of``."""
    tags, calls = np.empty((len(offsets), TAG_BYTES), np.uint8), copy_pool.calls_for(lengths)

    def make(share: slice) -> None:
        tags[share] = tags_of(memory, offsets[share], lengths[share], seeds[share], calls=calls)

    copy_pool.share(lengths, make)
    return tags


def slices_until(lengths: NDArray[np.uint32], until_s: float) -> Iterator[slice]:
    """Cut blocks into slices of a few milliseconds of hashing, while time is left.

    Hashing can't be interrupted, so the clock is read between slices. A slice has at least one block.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    first, first_bytes = 0, 0
    while first < len(ends) and time.monotonic() < until_s:
        last = max(first + 1, int(np.searchsorted(ends, first_bytes + _HASH_BYTES, side="right")))
        yield slice(first, last)
        first, first_bytes = last, int(ends[last - 1])
