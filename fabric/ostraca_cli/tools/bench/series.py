"""Paired measurement of a value and its limit on a noisy machine.

The measured work and its limit alternate (A B, B A, A B ...), so that a slow phase of the machine affects
both. The result is the median of the ratios of all turns. Warm-up turns are discarded.
The module also writes results as a table and as JSON.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.table import Table

_T = TypeVar("_T")

GB = 1e9
ROUNDS_MAX = 2_000
"""Enough for a 99th percentile, few enough to keep every value."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """Length of a measurement.

    A measurement lasts for ``seconds``, but at least ``rounds_min`` rounds, after ``warm_ups`` rounds.
    """

    seconds: float
    rounds_min: int = 5
    warm_ups: int = 3


SHORT = Pacing(seconds=0.0, rounds_min=2, warm_ups=1)
"""Smoke test of a measurement; the figures mean nothing."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values of all turns, in order."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median."""
        return statistics.median(self.values)

    def quantile(self, share: float) -> float:
        """Return the quantile *share* of the values."""
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Work to measure, and its limit; a turn does the work once and returns its value."""

    name: str
    turn: Callable[[], float]
    limit_name: str
    limit: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of a case; both series have a value for each round."""

    name: str
    measured: Series
    limit_name: str
    limit: Series

    @property
    def ratio(self) -> float:
        """Return the median over all rounds of value over limit in the same round.

        Infinite if the limit is zero.
        """
        pairs = zip(self.measured.values, self.limit.values, strict=True)
        return statistics.median(measured / limit if limit else math.inf for measured, limit in pairs)


def measure(
    case: Comparison, pace: Pacing, on_progress: Callable[[float], None] = lambda _: None
) -> Measurement:
    """Measure a case; *on_progress* receives the completed part, 0 to 1."""
    for _ in range(pace.warm_ups):
        case.turn()
        case.limit()
    measured: list[float] = []
    limits: list[float] = []
    started_s = time.perf_counter()
    while len(measured) < ROUNDS_MAX:
        if len(measured) >= pace.rounds_min and time.perf_counter() - started_s >= pace.seconds:
            break
        if len(measured) % 2:
            limits.append(case.limit())
            measured.append(case.turn())
        else:
            measured.append(case.turn())
            limits.append(case.limit())
        by_time = (time.perf_counter() - started_s) / pace.seconds if pace.seconds else 1.0
        on_progress(min(by_time, len(measured) / pace.rounds_min, 1.0))
    return Measurement(case.name, Series(tuple(measured)), case.limit_name, Series(tuple(limits)))


def timed(work: Callable[[], _T]) -> tuple[float, _T]:
    """Run *work*; return the duration in seconds, and the result."""
    started_s = time.perf_counter()
    result = work()
    return time.perf_counter() - started_s, result


def seconds_of(work: Callable[[], object]) -> float:
    """Run *work* and return the duration in seconds."""
    return timed(work)[0]


def gb_per_s(size_bytes: int, work: Callable[[], object]) -> float:
    """Run *work* and return its rate for *size_bytes*, in 1e9 bytes per second."""
    return size_bytes / GB / seconds_of(work)


def as_table(findings: Sequence[Measurement], title: str) -> Table:
    """Return a table of medians in GB/s (1e9 bytes per second) and of ratios.

    Ratios are taken turn by turn. Needs rich.
    """
    from ostraca_cli.terminal.tables import right, table

    rows = (
        (
            *(each.name, f"{each.measured.median:.2f}", each.limit_name),
            *(f"{each.limit.median:.2f}", f"{each.ratio:.2f}"),
        )
        for each in findings
    )
    return table(
        rows, "operation", *right("GB/s"), "limit on this machine", *right("GB/s", "ratio"), title=title
    )


def as_json(findings: Sequence[Measurement], **conditions: object) -> str:
    """Return medians, extremes and ratios as JSON, with the conditions."""
    listed = [
        {
            "name": finding.name,
            "gb_per_s": spread(finding.measured),
            "limit": finding.limit_name,
            "limit_gb_per_s": spread(finding.limit),
            "ratio": finding.ratio,
            "rounds": len(finding.measured.values),
        }
        for finding in findings
    ]
    return json.dumps({"machine": machine(), "conditions": conditions, "findings": listed}, indent=2)


def spread(series: Series) -> dict[str, float]:
    """Return the median and the extremes."""
    return {"median": series.median, "min": min(series.values), "max": max(series.values)}


def machine() -> dict[str, Any]:
    """Describe the machine as far as figures depend on the machine."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / (1 << 30), 1),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
