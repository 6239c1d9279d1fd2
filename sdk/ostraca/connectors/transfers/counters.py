"""Counters of a connector, with names without the engine's prefix."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from ostraca_fabric.model.outcome import BlockState, PutState, Reason

_KNOWN_REASONS = frozenset(Reason)
ACCEPTED = frozenset({PutState.STAGED, PutState.COMMITTED, PutState.EXISTS})
"""States of a stored chunk; a chunk with another state is dropped."""

_STORED = frozenset(state.name.lower() for state in ACCEPTED) | {Reason.IN_FLIGHT.name.lower()}
"""Outcomes of chunks that are not dropped. A chunk in flight is stored by another writer."""


@dataclass(frozen=True, slots=True, eq=False)
class ConnectorMetric:
    """Metric with identity by object; the connector adds the engine's prefix to the name."""

    name: str
    kind: str
    """``counter`` or ``gauge``."""
    help: str
    label: str = ""
    """The only label besides the engine's own; empty for none."""


LOOKUP_CHUNKS = ConnectorMetric("lookup_chunks", "counter", "Chunks looked up, by outcome.", "outcome")
LOAD_CHUNKS = ConnectorMetric("load_chunks", "counter", "Chunks to load, by outcome.", "outcome")
STORE_CHUNKS = ConnectorMetric("store_chunks", "counter", "Chunks to store, by outcome.", "outcome")
OFFERED_CHUNKS = ConnectorMetric("offered_chunks", "counter", "Chunks that the engine gave to be stored.")
DROPPED_CHUNKS = ConnectorMetric(
    "dropped_chunks", "counter", "Offered chunks that were not stored, by reason.", "reason"
)
LOAD_BYTES = ConnectorMetric("load_bytes", "counter", "Bytes loaded and verified.")
REQUESTS = ConnectorMetric("requests", "counter", "Requests to the fabric, by operation.", "operation")
INFLIGHT_CHUNKS = ConnectorMetric(
    "inflight_chunks", "gauge", "Chunks of loads and stores under way.", "operation"
)
IS_USABLE = ConnectorMetric("is_usable", "gauge", "1 while the fabric is connected and answers, else 0.")

METRICS = (
    LOOKUP_CHUNKS,
    LOAD_CHUNKS,
    STORE_CHUNKS,
    OFFERED_CHUNKS,
    DROPPED_CHUNKS,
    LOAD_BYTES,
    REQUESTS,
    INFLIGHT_CHUNKS,
    IS_USABLE,
)


class MetricSample(NamedTuple):
    """Value of a metric; for a counter, the increase since the last call."""

    metric: ConnectorMetric
    label: str
    value: float


class ConnectorCounters:
    """Counts since the connector began, and since the last ``take``. Thread-safe."""

    def __init__(self) -> None:
        self.total: Counter[tuple[ConnectorMetric, str]] = Counter()
        self._new: Counter[tuple[ConnectorMetric, str]] = Counter()
        self._counting = threading.Lock()

    def add(self, metric: ConnectorMetric, label: str = "", count: int = 1) -> None:
        """Add to a metric. Chunks of a store that the fabric has not accepted count as dropped, too."""
        if metric is STORE_CHUNKS and label not in _STORED:
            self.add(DROPPED_CHUNKS, label, count)
        if count:
            with self._counting:
                self.total[metric, label] += count
                self._new[metric, label] += count

    def by_name(self) -> dict[str, int]:
        """Return the totals; a label follows the metric's name."""
        with self._counting:
            totals = dict(self.total)
        return {
            f"{metric.name}_{label}" if label else metric.name: count
            for (metric, label), count in totals.items()
        }

    def drops(self) -> str:
        """Return the share of dropped chunks in words, for a log; empty if nothing was dropped."""
        with self._counting:
            totals = self.total.copy()
        dropped = {reason: count for (metric, reason), count in totals.items() if metric is DROPPED_CHUNKS}
        if not dropped:
            return ""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        offered = totals[OFFERED_CHUNKS, ""]
        return f"{sum(dropped.values())} of {offered} chunks were not stored: {reasons}"

    def take(self) -> list[MetricSample]:
        """Return the increases since the last call."""
        with self._counting:
            new, self._new = self._new, Counter()
        return [MetricSample(metric, label, value) for (metric, label), value in new.items()]

    def add_outcomes(
        self, metric: ConnectorMetric, states: type[BlockState | PutState], codes: bytes, reasons: bytes
    ) -> None:
        """Add the chunks of a result by outcome: the reason if any, else the state."""
        for (state, reason), count in Counter(zip(codes, reasons, strict=True)).items():
            self.add(metric, _outcome(states(state), reason), count)


def _outcome(state: BlockState | PutState, reason: int) -> str:
    if not reason:
        return state.name.lower()
    return Reason(reason).name.lower() if reason in _KNOWN_REASONS else "other"
