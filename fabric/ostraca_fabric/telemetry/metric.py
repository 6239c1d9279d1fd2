"""Metric definitions and samples."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ostraca_fabric.telemetry.requests import OperationTally


class MetricKind(Enum):
    """Type of a metric, as in OpenMetrics."""

    COUNTER = "counter"
    """Only rises, from zero at each start."""

    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"
    """Always 1; the labels carry the information."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a metric. The name ends in the unit, if any."""

    name: str
    kind: MetricKind
    unit: str
    labels: tuple[str, ...]
    help: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Single value of a metric; for a histogram, the tally with the buckets."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | OperationTally
