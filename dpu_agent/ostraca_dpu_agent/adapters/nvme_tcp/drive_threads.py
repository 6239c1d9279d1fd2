"""Threads that move pieces over the user-space initiator.

``DriveThreads`` runs batches of pieces, cut into shares that the threads take in turn. A blocked operation
can't be interrupted, so the threads and their backlog are bounded. Before its next share, a thread runs one
waiting short batch: short batches overtake long ones, but can't starve them. The last share of a batch wakes
the event loop, once per batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.telemetry.requests import current_label, labelled

log = logging.getLogger(__name__)

_THREADS = 4
_SHARE_BYTES_MAX = 4 << 20
"""Approximate bytes of one thread's share. Blocks are never cut, so a share may exceed the limit by one
block."""

Act = Callable[[slice], NDArray[np.bool_]]
"""Operation on some pieces of a batch, in a thread of the drive; returns the success of each piece."""

_ONE_SHARE = [slice(0, 1)]
_SHORT_BYTES = 256 << 10
"""Batches up to this size overtake longer ones. For example a summary page: all writers of the listed blocks
wait for the page."""


class DriveThreads:
    """Threads and queue of one drive. Submit on an event loop; call ``close`` at the end."""

    def __init__(self, drive: DriveId, *, pieces_queued_max: int) -> None:
        """Start the threads of *drive*."""
        self._drive = drive
        self._pieces_queued_max = pieces_queued_max
        self.queued = 0
        """Pieces submitted and not ended."""

        self._failing = threading.Lock()
        self.failures = 0
        """Failed operations since the drive was opened."""

        self.last_error = ""
        """Message of the last failure; empty without a failure."""

        self._jobs: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._short: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"ostraca-{drive}-{number}", daemon=True)
            for number in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit_pieces(self, pieces: Pieces, act: Act) -> asyncio.Future[NDArray[np.bool_]]:
        """Run *act* on every piece, in shares; the future gives the success of each piece."""
        is_short = int(pieces.lengths.sum(dtype=np.int64)) <= _SHORT_BYTES
        return self._submit(self._shares(pieces), act, is_short=is_short)

    def submit_one(self, act: Callable[[], bool]) -> asyncio.Future[bool]:
        """Run *act* in a thread; the future gives the result."""
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def end(ends: asyncio.Future[NDArray[np.bool_]]) -> None:
            if not ended.done():
                ended.set_result(bool(ends.result()[0]))

        submitted = self._submit(_ONE_SHARE, lambda _: np.full(1, act(), np.bool_), is_short=True)
        submitted.add_done_callback(end)
        return ended

    def count_failures(self, failed: int, reason: str) -> None:
        """Count failed operations, and log some. May be called in any thread."""
        with self._failing:
            before, self.failures = self.failures, self.failures + failed
            self.last_error = reason
            count = self.failures
        # Warn only the 1st, 2nd, 4th, 8th ... time: a broken drive fails thousands of times.
        level = logging.WARNING if count.bit_length() > before.bit_length() else logging.DEBUG
        log.log(level, "Drive %s has failed %d times, just now: %s", self._drive, count, reason)

    def close(self) -> None:
        """Wait for operations in progress, then end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _shares(self, pieces: Pieces) -> list[slice]:
        """Cut a batch into shares: distribute its I/Os evenly to the threads, and cut long I/Os."""
        count = len(pieces)
        if not count:
            return []
        lengths, share_bytes = pieces.lengths, _SHARE_BYTES_MAX
        begins = np.flatnonzero(pieces.drive_offsets[1:] != (pieces.drive_offsets + lengths)[:-1]) + 1
        each = len(begins) // len(self._threads) + 1
        cuts = {0, *begins[each - 1 :: each].tolist(), count}
        if int(lengths.sum(dtype=np.int64)) > share_bytes:
            filled = (np.cumsum(lengths, dtype=np.int64) - lengths) // share_bytes
            cuts.update((np.flatnonzero(filled[1:] != filled[:-1]) + 1).tolist())
        return [slice(*pair) for pair in itertools.pairwise(sorted(cuts))]

    def _submit(self, shares: list[slice], act: Act, *, is_short: bool) -> asyncio.Future[NDArray[np.bool_]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[NDArray[np.bool_]] = loop.create_future()
        count = shares[-1].stop if shares else 0
        if not count or self.queued + count > self._pieces_queued_max:
            future.set_result(np.zeros(count, np.bool_))
            return future
        self.queued += count
        log.debug("drive %s: %d blocks submitted behind %d", self._drive, count, self.queued - count)

        def end(ends: NDArray[np.bool_]) -> None:
            self.queued -= count
            if not future.done():  # a caller may have cancelled the future, against the rules of the port
                future.set_result(ends)

        batch = _Batch(shares, act, loop, end)
        if is_short:
            self._short.put(batch)
        for _ in range(min(len(shares), len(self._threads))):
            self._jobs.put(batch)
        return future

    def _work(self) -> None:
        show_name("drive")
        while (batch := self._jobs.get()) is not None:
            batch.work(self._work_short)

    def _work_short(self) -> None:
        """Run one waiting short batch, if any.

        The batch's entry in the other queue then finds no shares left.
        """
        with contextlib.suppress(queue.Empty):
            self._short.get_nowait().work()


class _Batch:
    """Shares for several threads to take in turn; the last to finish wakes the loop."""

    def __init__(
        self,
        shares: list[slice],
        act: Act,
        loop: asyncio.AbstractEventLoop,
        end: Callable[[NDArray[np.bool_]], None],
    ) -> None:
        self._shares = shares
        self._act = act
        self._loop = loop
        self._end = end
        self._label = current_label()
        self._ends = np.zeros(shares[-1].stop, np.bool_)
        # next() of a count is atomic under the interpreter lock: no two threads get the same number.
        self._next = itertools.count()
        self._done = itertools.count(1)

    def work(self, before_each: Callable[[], None] = lambda: None) -> None:
        """Take shares until none is left."""
        before_each()
        shares = self._shares
        while (number := next(self._next)) < len(shares):
            with labelled(self._label):
                self._take(shares[number])
            before_each()

    def _take(self, share: slice) -> None:
        try:
            self._ends[share] = self._act(share)
        except Exception:
            log.exception("A bug in a drive's thread; the operation counts as failed")
        if next(self._done) == len(self._shares):
            # The loop may be gone at the end of the process; then no caller waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end, self._ends)


def good_stretches(is_good: NDArray[np.bool_]) -> list[list[int]]:
    """Return (begin, end) of each run of good pieces."""
    edges = np.flatnonzero(np.diff(is_good, prepend=False, append=False))
    stretches: list[list[int]] = edges.reshape(-1, 2).tolist()
    return stretches
