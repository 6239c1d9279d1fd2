"""Admission of gets: is loading the blocks faster than recomputing them? Pure.

If the caller states its recompute time and loading would take longer, the blocks are declined at once,
before any lease. Cached blocks and flash blocks are judged separately: a decline of either does not slow
the other. Other callers are always admitted, but their bookings count for all.

The latency estimator uses recent measurements and queues. A load waits in the queue of a drive, and in the
queue for a worker's arena. Each queue is measured while busy. Two numbers describe the queue: the time before
the first byte, and the time per byte after that. A single speed from small loads alone would underestimate
large loads and wrongly decline them.

Unknown is fast. A queue without measurements costs no time, and old measurements fade. A declined load
measures nothing, so a formerly slow queue must be tried again.

Not covered: writes, seen only in later measurements of reads. Loads of other workers on their way show
only in a queue's speed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import exp2
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.datapath.location.routing import BlockLocations
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.telemetry.status import EstimateCounters

_MIB: Final = 1 << 20

_KEPT: Final = 63 / 64
"""Weight of the past at each new measurement; a burst of simultaneous reads is one of many."""

_FADE_S: Final = 5.0
"""Time in which an idle queue's estimated costs are halved."""

_PULL: Final = 0.01
"""Pull of each load on an idle queue towards zero for both numbers, with a start weighing as much as one MiB.
Loads of one size leave open which number took the time: up to about one MiB the start is assumed.
"""

_TINY: Final = 1e-12
"""Prevents a division by zero without measurements."""


class LoadQueue:
    """A queue for loads."""

    def __init__(self) -> None:
        """Begin unmeasured and idle."""
        self.waiting_bytes = 0
        """Bytes of admitted loads that have not started here."""

        self.active_bytes = 0
        self._since_s = 0.0
        self._ended_s = 0.0
        self._is_start = False
        self._sums = [0.0] * 5
        """Sums over measurements: starts, starts times MiB, MiB squared, starts times seconds, MiB times
        seconds.
        """

    def begin(self, now_s: float, load_bytes: int) -> None:
        """Count a load at its start."""
        if not self.active_bytes:
            self._since_s, self._is_start = now_s, True
        self.active_bytes += load_bytes

    def end(self, now_s: float, load_bytes: int) -> None:
        """Count and measure the end of a load."""
        took_s = max(0.0, now_s - self._since_s)
        start, size = float(self._is_start), load_bytes / _MIB
        products = (start, start * size, size * size, start * took_s, size * took_s)
        self._sums = [kept * _KEPT + new for kept, new in zip(self._sums, products, strict=True)]
        self.active_bytes -= load_bytes
        self._since_s, self._ended_s, self._is_start = now_s, now_s, False

    def abandon(self, load_bytes: int) -> None:
        """Stop counting an abandoned load; its end says nothing about this queue."""
        self.active_bytes -= load_bytes

    def wait_s(self, now_s: float) -> float:
        """Return the time until a new load's first byte."""
        first_s, byte_s = self._costs(now_s)
        # A silent queue is assumed to stay silent for as long again.
        silent_s = now_s - self._since_s if self.active_bytes else 0.0
        return max(first_s + byte_s * (self.waiting_bytes + self.active_bytes), silent_s)

    def serve_s(self, now_s: float, load_bytes: int) -> float:
        """Return the duration of a load after its turn has come."""
        return self._costs(now_s)[1] * load_bytes

    def _costs(self, now_s: float) -> tuple[float, float]:
        """Return seconds before the first byte and per byte, by least squares.

        Neither is negative.
        """
        begun, cross, squared, starts_s, sizes_s = self._sums
        starts = begun * (1 + _PULL) + _TINY
        squares = squared + begun * _PULL + _TINY
        first = (starts_s * squares - sizes_s * cross) / (starts * squares - cross * cross)
        each = (sizes_s - cross * first) / squares
        if first < 0:
            first, each = 0.0, sizes_s / squares
        elif each < 0:
            first, each = starts_s / starts, 0.0
        faded = exp2(-max(0.0, now_s - self._ended_s) / _FADE_S)
        return first * faded, each * faded / _MIB


class LatencyEstimator:
    """Load queues of an agent."""

    def __init__(self, wave_bytes: int, lock: AbstractContextManager[object] | None = None) -> None:
        """Begin unmeasured; loads are read in waves of *wave_bytes*, moved in turn.

        *lock* protects the queues of workers, if moves start and end in several threads.
        """
        self._wave_bytes = wave_bytes
        self.drives: defaultdict[DriveId, LoadQueue] = defaultdict(LoadQueue)
        self._worker_queues: WeakKeyDictionary[Hashable, LoadQueue] = WeakKeyDictionary()
        self.estimates = EstimateCounters()
        self.lock = nullcontext() if lock is None else lock

    def worker_queue(self, worker: Hashable) -> LoadQueue:
        """Return the queue to a worker, kept as long as the worker."""
        queue = self._worker_queues.get(worker)
        if queue is None:
            queue = self._worker_queues[worker] = LoadQueue()
        return queue

    def estimate_s(
        self,
        now_s: float,
        by_drive: Mapping[DriveId, int],
        load_bytes: int,
        worker_queue: LoadQueue,
        *,
        own_bytes: int = 0,
    ) -> float:
        """Return the estimated duration of a load admitted now: bytes to read per drive, and bytes to move.

        Reading and moving overlap except for one wave. *own_bytes* in *worker_queue* belong to the
        same request and are not waited for.
        """
        move_s = worker_queue.serve_s(now_s, load_bytes)
        own_s = worker_queue.serve_s(now_s, own_bytes)
        alone = min(1.0, self._wave_bytes / load_bytes) if load_bytes else 1.0
        takes_s = max(0.0, worker_queue.wait_s(now_s) - own_s) + move_s
        for drive, read_bytes in by_drive.items():
            queue = self.drives[drive]
            read_s = queue.serve_s(now_s, read_bytes)
            longer_s, shorter_s = max(read_s, move_s), min(read_s, move_s)
            takes_s = max(takes_s, queue.wait_s(now_s) + longer_s + alone * shorter_s)
        return takes_s

    def slowest(self, now_s: float, by_drive: Mapping[DriveId, int]) -> DriveId:
        """Return the drive with the longest wait for a load."""

        def takes_s(drive: DriveId) -> float:
            queue = self.drives[drive]
            return queue.wait_s(now_s) + queue.serve_s(now_s, by_drive[drive])

        return max(by_drive, key=takes_s)

    def compare(self, estimate_s: float, took_s: float) -> None:
        """Compare the duration of an admitted load with its estimate."""
        counters = self.estimates
        counters.loads += 1
        counters.estimated_s += estimate_s
        counters.took_s += took_s
        counters.error_s += abs(took_s - estimate_s)


class GetAdmission:
    """Admission of a get, with its bookings. Call ``close`` once answered."""

    def __init__(
        self,
        estimator: LatencyEstimator,
        clock: Callable[[], float],
        worker: Hashable,
        blocks: int,
        bytes_of: Callable[[NDArray[np.intp]], int],
        recompute_s: float,
    ) -> None:
        """Admit a request of so many *blocks*; *bytes_of* sums the lengths of some.

        *recompute_s* is for all blocks together, 0 if unknown.
        """
        self._estimator = estimator
        self._clock = clock
        self._worker_queue = estimator.worker_queue(worker)
        self._blocks = blocks
        self._bytes_of = bytes_of
        self._recompute_s = recompute_s
        self._booked: Counter[LoadQueue] = Counter()
        """Bytes of admitted loads not yet started; later loads wait for them."""

        self._is_over = False
        self._moving_bytes = 0
        self._estimated: tuple[float, float] | None = None
        """Start of loading from flash, and the estimated duration."""

    def admit_in_memory(self, is_here: NDArray[np.bool_], *, waves: int) -> bool:
        """Return whether moving the cached blocks in *waves* waves is worth it.

        A single wave that starts at once is not booked, here and in ``admit``.
        """
        if waves == 1 and not self._recompute_s > 0:
            return True
        load_bytes = self._bytes_of(np.flatnonzero(is_here))
        with self._estimator.lock:
            if self._worth_s(int(np.count_nonzero(is_here)), {}, load_bytes) is None:
                return False
            if waves > 1:
                self._book(self._worker_queue, load_bytes)
            return True

    def admit(
        self, locations: BlockLocations, positions: NDArray[np.intp], *, at_once: int
    ) -> NDArray[np.intp]:
        """Return the located blocks that are worth loading, up to *at_once* of a drive at once.

        If not all are, the slowest drives are left out one by one, since a slow drive does not affect
        blocks elsewhere.
        """
        if len(positions) <= at_once and not self._recompute_s > 0:
            return positions
        with self._estimator.lock:
            while True:
                by_drive, load_bytes = locations.bytes_by_drive(positions), self._bytes_of(positions)
                estimate_s = self._worth_s(len(positions), by_drive, load_bytes)
                if estimate_s is not None:
                    break
                if len(by_drive) <= 1:
                    return positions[:0]
                slowest = self._estimator.slowest(self._clock(), by_drive)
                others = [its for drive, its in locations.by_drive(positions) if drive != slowest]
                positions = np.sort(np.concatenate(others))
            if self._recompute_s > 0:
                self._estimated = self._clock(), estimate_s
            if len(positions) > at_once or len(by_drive) > 1:
                self._book(self._worker_queue, load_bytes)
                for drive, read_bytes in by_drive.items():
                    self._book(self._estimator.drives[drive], read_bytes)
            return positions

    def start_read(self, drive: DriveId, lengths: NDArray[np.uint32]) -> None:
        """Remove a started read from the bookings."""
        if self._booked:
            with self._estimator.lock:
                self._book(self._estimator.drives[drive], -int(lengths.sum()))

    def start_move(self, at_s: float, positions: NDArray[np.intp]) -> None:
        """Count a move started at *at_s*. Call in any thread."""
        moved_bytes = self._bytes_of(positions)
        with self._estimator.lock:
            if not self._is_over:
                self._book(self._worker_queue, -moved_bytes)
                self._worker_queue.begin(at_s, moved_bytes)
                self._moving_bytes += moved_bytes

    def cancel_move(self, positions: NDArray[np.intp]) -> None:
        """Remove moves that will not happen from the bookings."""
        with self._estimator.lock:
            self._book(self._worker_queue, -self._bytes_of(positions))

    def end_move(self, at_s: float, positions: NDArray[np.intp]) -> None:
        """Measure a move that has ended at *at_s*, with any result. Call in any thread."""
        moved_bytes = self._bytes_of(positions)
        with self._estimator.lock:
            if not self._is_over:
                self._worker_queue.end(at_s, moved_bytes)
                self._moving_bytes -= moved_bytes

    def leave_to_worker(self, locations: BlockLocations, positions: NDArray[np.intp]) -> None:
        """Remove blocks that the worker reads itself from the bookings and the estimate."""
        self._estimated = None
        if self._booked:
            for drive, its in locations.by_drive(positions):
                self.start_read(drive, locations.lengths[its])
            self.cancel_move(positions)

    def end_loads(self) -> None:
        """Note the end of all flash loads; compare with the estimate if complete."""
        if self._estimated is not None and not self._is_over:
            begun_s, estimate_s = self._estimated
            self._estimator.compare(estimate_s, self._clock() - begun_s)
        self._estimated = None

    def close(self) -> None:
        """Note the answer: no step begins, and unfinished moves are ignored."""
        with self._estimator.lock:
            self._is_over = True
            self._worker_queue.abandon(self._moving_bytes)
            for queue, booked in self._booked.items():
                queue.waiting_bytes -= booked
            self._booked.clear()

    def _book(self, queue: LoadQueue, more_bytes: int) -> None:
        """Book bytes of an admitted load, or, below zero, remove started bytes, at most the booked bytes.

        After the answer nothing is booked: no step begins any more.
        """
        if self._is_over:
            return
        more_bytes = max(more_bytes, -self._booked[queue])
        self._booked[queue] += more_bytes
        queue.waiting_bytes += more_bytes

    def _worth_s(self, blocks: int, by_drive: Mapping[DriveId, int], load_bytes: int) -> float | None:
        """Return the estimated time of a load; None if recomputing is faster."""
        if not self._recompute_s > 0:
            return 0.0
        own_bytes = self._booked[self._worker_queue] + self._moving_bytes
        estimate_s = self._estimator.estimate_s(
            self._clock(), by_drive, load_bytes, self._worker_queue, own_bytes=own_bytes
        )
        return None if estimate_s > self._recompute_s * blocks / self._blocks else estimate_s
