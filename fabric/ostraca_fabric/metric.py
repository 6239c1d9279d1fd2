"""What a metric is, and one value of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ostraca_fabric.tallies import OperationTally


class Kind(Enum):
    """How a metric's values are to be read."""

    COUNTER = "counter"
    """Only rises, from zero at each start."""

    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"
    """Always 1; its labels are what it says."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Its name ends in its unit, if it has one."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric; a histogram's is the tally that holds its buckets."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | OperationTally
