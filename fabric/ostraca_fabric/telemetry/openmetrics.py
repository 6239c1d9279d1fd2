"""Metrics as text, for Prometheus and other readers of OpenMetrics 1.0. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from ostraca_fabric.telemetry.metric import Metric, MetricKind, Sample
from ostraca_fabric.telemetry.metrics import METRICS
from ostraca_fabric.telemetry.requests import LATENCY_BOUNDS_S, OperationTally

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_SUFFIXES = {MetricKind.COUNTER: "_total", MetricKind.INFO: "_info"}


def render(samples: Iterable[Sample]) -> str:
    """Render samples as text, grouped by metric in the table's order.

    All samples of a metric differ in their labels.
    """
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.metric.name, []).append(sample)
    lines = [line for metric in METRICS for line in _family(metric, by_name.pop(metric.name, []))]
    assert not by_name, f"metrics that are not in the table: {', '.join(by_name)}"
    return "\n".join((*lines, "# EOF", ""))


def _family(metric: Metric, samples: list[Sample]) -> Iterator[str]:
    if not samples:
        return
    yield f"# TYPE {metric.name} {metric.kind.value}"
    if metric.unit:
        yield f"# UNIT {metric.name} {metric.unit}"
    yield f"# HELP {metric.name} {_escaped(metric.help)}"
    for sample in samples:
        yield from sample_lines(sample)


def sample_lines(sample: Sample) -> Iterator[str]:
    """Yield the line of a sample, or the lines of a histogram."""
    metric, value = sample.metric, sample.value
    labels = tuple(zip(metric.labels, sample.labels, strict=True))
    if not isinstance(value, OperationTally):
        yield _line(metric.name + _SUFFIXES.get(metric.kind, ""), labels, value)
        return
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
