"""Measuring one thing beside another on a machine that is not quiet.

What is measured and its limit take turns (A B, B A, A B ...), so that whatever slows the machine down for a
while slows both; the ratio is taken turn by turn, and its median is what counts. Warm-up turns are thrown
away.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

GB = 1e9
ROUNDS_MAX = 2_000
"""Enough for a 99th percentile, few enough to keep every value."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to measure: for ``seconds``, but at least ``rounds_min`` rounds, after ``warm_ups`` rounds."""

    seconds: float
    rounds_min: int = 5
    warm_ups: int = 3


SHORT = Pace(seconds=0.0, rounds_min=2, warm_ups=1)
"""Shows that a measurement runs. Its figures mean nothing."""


@dataclass(frozen=True, slots=True)
class Series:
    """One value per turn, in the order measured."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    def quantile(self, share: float) -> float:
        """Return the value that *share* of all values do not exceed."""
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Case:
    """Something to measure and what limits it; a turn does the work once and returns its value."""

    what: str
    turn: Callable[[], float]
    limit_name: str
    limit: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a case. Both series have a value for each round."""

    what: str
    measured: Series
    limit_name: str
    limit: Series

    @property
    def ratio(self) -> float:
        """The median, over all rounds, of the measured value over its limit in the same round.

        Infinite where the limit is zero.
        """
        pairs = zip(self.measured.values, self.limit.values, strict=True)
        return statistics.median(measured / limit if limit else math.inf for measured, limit in pairs)


def measure(case: Case, pace: Pace, on_progress: Callable[[float], None] = lambda _: None) -> Finding:
    """Measure a case. *on_progress* is told from time to time which part of it is done."""
    for _ in range(pace.warm_ups):
        case.turn()
        case.limit()
    measured: list[float] = []
    limits: list[float] = []
    started_s = time.perf_counter()
    while len(measured) < ROUNDS_MAX:
        spent_s = time.perf_counter() - started_s
        if len(measured) >= pace.rounds_min and spent_s >= pace.seconds:
            break
        if len(measured) % 2:
            limits.append(case.limit())
            measured.append(case.turn())
        else:
            measured.append(case.turn())
            limits.append(case.limit())
        by_time = (time.perf_counter() - started_s) / pace.seconds if pace.seconds else 1.0
        on_progress(min(by_time, len(measured) / pace.rounds_min, 1.0))
    return Finding(case.what, Series(tuple(measured)), case.limit_name, Series(tuple(limits)))


def seconds_of(work: Callable[[], object]) -> float:
    """Do it, and return how long it took."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def gb_per_s(size_bytes: int, work: Callable[[], object]) -> float:
    """Do it, and return the rate at which it moved *size_bytes*, in 1e9 bytes per second."""
    return size_bytes / GB / seconds_of(work)
