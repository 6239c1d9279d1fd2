"""Whether a get's blocks are worth loading, and what the get has queued once they are.

A caller that says how long recomputing would take is told at once when loading would take longer: before any
memory is leased, and blocks of the DRAM cache and those on flash each by themselves, because losing one half
does not make the other worse. Callers that do not say are let in, and counted for those that do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.mover.pace import Booking, Load

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from numpy.typing import NDArray

    from ostraca_dpu_agent.mover.located import Located
    from ostraca_dpu_agent.mover.pace import Pace


class Admission:
    """One get, as the lines it waits for see it. Call ``over`` when it is answered."""

    def __init__(
        self,
        pace: Pace,
        clock: Callable[[], float],
        worker: Hashable,
        lengths: NDArray[np.uint32],
        recompute_s: float,
    ) -> None:
        """Of blocks of these *lengths*; *recompute_s* is for all of them, 0 when not known."""
        self._pace = pace
        self._clock = clock
        self._way = pace.way(worker)
        self._lengths = lengths
        self._recompute_s = recompute_s
        self._booking = Booking()
        self._is_over = False
        self._moving_bytes = 0
        self._estimated: tuple[float, float] | None = None
        """When loading from flash began, and how long it was to take."""

    def admits_cached(self, is_cached: NDArray[np.bool_], *, waves: int) -> bool:
        """Tell whether moving the blocks that the DRAM cache has, in so many waves, is worth it.

        What is begun at once in one wave is not booked, here and in ``admits``.
        """
        if waves == 1 and not self._recompute_s > 0:
            return True
        load = Load({}, int(self._lengths[is_cached].sum()))
        if self._worth_s(int(np.count_nonzero(is_cached)), load) is None:
            return False
        if waves > 1:
            self._booking.add(self._way, load.load_bytes)
        return True

    def admits(self, located: Located, positions: NDArray[np.intp], *, per_wave: int) -> NDArray[np.intp]:
        """Return which of these located blocks, in waves of so many, are worth loading.

        Where all of them are not, the slowest drives are left out, one after the other: a slow drive makes no
        difference to blocks that lie elsewhere.
        """
        if len(positions) <= per_wave and not self._recompute_s > 0:
            return positions
        load = Load(located.bytes_by_drive(positions), self._bytes(positions))
        estimate_s = self._worth_s(len(positions), load)
        while estimate_s is None:
            if len(load.by_drive) <= 1:
                return positions[:0]
            slowest = self._pace.slowest(self._clock(), load)
            positions = np.concatenate(
                [its for drive, its in located.by_drive(positions) if drive != slowest]
            )
            positions.sort()
            load = Load(located.bytes_by_drive(positions), self._bytes(positions))
            estimate_s = self._worth_s(len(positions), load)
        if self._recompute_s > 0:
            self._estimated = self._clock(), estimate_s
        if len(positions) > per_wave or len(load.by_drive) > 1:
            self._booking.add(self._way, load.load_bytes)
            for drive, read_bytes in load.by_drive.items():
                self._booking.add(self._pace.drives[drive], read_bytes)
        return positions

    def reads(self, located: Located, positions: NDArray[np.intp]) -> None:
        """Take off the books what is being read from now on."""
        if self._booking:
            for drive, read_bytes in located.bytes_by_drive(positions).items():
                self._booking.take(self._pace.drives[drive], read_bytes)

    def moves(self, positions: NDArray[np.intp]) -> int:
        """Count what is being moved from now on; returns what to pass to ``moved``."""
        moved_bytes = self._bytes(positions)
        self._booking.take(self._way, moved_bytes)
        self._way.begin(self._clock(), moved_bytes)
        self._moving_bytes += moved_bytes
        return moved_bytes

    def drops(self, positions: NDArray[np.intp]) -> None:
        """Take off the books what was to be moved and is not."""
        self._booking.take(self._way, self._bytes(positions))

    def moved(self, moved_bytes: int) -> None:
        """Measure a move that has ended, however it did."""
        self._moving_bytes -= moved_bytes
        if not self._is_over:
            self._way.end(self._clock(), moved_bytes)

    def loaded(self) -> None:
        """Everything from flash has ended: compare with what was expected, unless it was cut short."""
        if self._estimated is not None and not self._is_over:
            begun_s, estimate_s = self._estimated
            self._pace.compare(estimate_s, self._clock() - begun_s)
        self._estimated = None

    def over(self) -> None:
        """The get is answered: nothing more begins, and what is moving still is not waited for."""
        self._is_over = True
        self._way.abandon(self._moving_bytes)
        self._booking.close()

    def _worth_s(self, blocks: int, load: Load) -> float | None:
        """Return how long a load will take; None when recomputing these blocks takes less."""
        if not self._recompute_s > 0:
            return 0.0
        own_bytes = self._booking.of(self._way) + self._moving_bytes
        estimate_s = self._pace.estimate_s(self._clock(), load, self._way, own_bytes=own_bytes)
        share_s = self._recompute_s * blocks / len(self._lengths)
        return None if estimate_s > share_s else estimate_s

    def _bytes(self, positions: NDArray[np.intp]) -> int:
        return int(self._lengths[positions].sum())
