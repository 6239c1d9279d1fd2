"""Metrics as text, for Prometheus and other readers of OpenMetrics 1.0. Pure.

A table of metrics and the status of a daemon or client make the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Generic, Protocol, TypeAlias, TypeVar

from ostraca_fabric.telemetry.requests import LATENCY_BOUNDS_S, OperationTally

_Subject = TypeVar("_Subject")

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class MetricKind(Enum):
    """Type of a metric, as in OpenMetrics."""

    COUNTER = "counter"
    """Only rises, from zero at each start."""

    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"
    """Always 1; the labels carry the information."""


_SUFFIXES = {MetricKind.COUNTER: "_total", MetricKind.INFO: "_info"}

Values: TypeAlias = float | Mapping[tuple[str, ...], float | OperationTally]
"""Value of a metric without labels, or the values by labels; for a histogram, the tally with the buckets."""


@dataclass(frozen=True, slots=True)
class Metric(Generic[_Subject]):
    """Definition of a metric, and its values in a status. The name ends in the unit, if any."""

    name: str
    kind: MetricKind
    unit: str
    labels: tuple[str, ...]
    help: str
    values: Callable[[_Subject], Values]


class Operations(Protocol):
    """Status with the counts of operations."""

    @property
    def operations(self) -> tuple[OperationTally, ...]:
        """Counts by operation."""


OUTCOME_LABELS = ("operation", "state", "reason")


def blocks_by_outcome(status: Operations) -> dict[tuple[str, ...], float]:
    """Return the blocks of each operation by state and reason: ``OUTCOME_LABELS``."""
    return {
        (tally.operation, count.state, count.reason): count.blocks
        for tally in status.operations
        for count in tally.blocks
    }


def bytes_by_operation(status: Operations) -> dict[tuple[str, ...], float]:
    """Return the moved bytes of each operation but lookups, which move none."""
    return {
        (tally.operation,): tally.bytes
        for tally in status.operations
        if not tally.operation.endswith("lookup")
    }


def tallies_by_operation(status: Operations) -> dict[tuple[str, ...], OperationTally]:
    """Return the tally of each operation, for histograms."""
    return {(tally.operation,): tally for tally in status.operations}


def render(metrics: Iterable[Metric[_Subject]], subject: _Subject) -> str:
    """Render the metrics of a status as text."""
    lines = [line for metric in metrics for line in _family(metric, metric.values(subject))]
    return "\n".join((*lines, "# EOF", ""))


def _family(metric: Metric[_Subject], values: Values) -> Iterator[str]:
    if values == {}:
        return
    yield f"# TYPE {metric.name} {metric.kind.value}"
    if metric.unit:
        yield f"# UNIT {metric.name} {metric.unit}"
    yield f"# HELP {metric.name} {_escaped(metric.help)}"
    for said, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        labels = tuple(zip(metric.labels, said, strict=True))
        if not isinstance(value, OperationTally):
            yield _line(metric.name + _SUFFIXES.get(metric.kind, ""), labels, value)
            continue
        bounds = (*map(_number, LATENCY_BOUNDS_S), "+Inf")
        for bound, ended in zip(bounds, accumulate(value.buckets), strict=True):
            yield _line(f"{metric.name}_bucket", (*labels, ("le", bound)), ended)
        yield _line(f"{metric.name}_count", labels, value.requests)
        yield _line(f"{metric.name}_sum", labels, value.seconds)


def _line(name: str, labels: Iterable[tuple[str, str]], value: float) -> str:
    named = ",".join(f'{label}="{_escaped(said)}"' for label, said in labels)
    return f"{name}{{{named}}} {_number(value)}" if named else f"{name} {_number(value)}"


def _number(value: float) -> str:
    return str(int(value)) if value % 1 == 0 else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
