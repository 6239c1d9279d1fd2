"""Counters of the tier, and their names among vLLM's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ostraca_fabric.model.outcome import BlockState, PutState, Reason

_PREFIX = "vllm:kv_offload_ostraca_"
_KNOWN_REASONS = frozenset(Reason)


@dataclass(frozen=True, slots=True, eq=False)
class TierMetric:
    """Metric with identity by object. Prometheus adds ``_total`` to a counter's name."""

    name: str
    kind: str
    """``counter`` or ``gauge``."""
    help: str
    label: str = ""
    """The only label besides vLLM's own; empty for none."""


LOOKUP_CHUNKS = TierMetric(f"{_PREFIX}lookup_chunks", "counter", "Chunks looked up, by outcome.", "outcome")
LOAD_CHUNKS = TierMetric(f"{_PREFIX}load_chunks", "counter", "Chunks to load, by outcome.", "outcome")
STORE_CHUNKS = TierMetric(f"{_PREFIX}store_chunks", "counter", "Chunks to store, by outcome.", "outcome")
LOAD_BYTES = TierMetric(f"{_PREFIX}load_bytes", "counter", "Bytes loaded and verified.")
REQUESTS = TierMetric(f"{_PREFIX}requests", "counter", "Requests to the fabric, by operation.", "operation")
INFLIGHT_CHUNKS = TierMetric(
    f"{_PREFIX}inflight_chunks", "gauge", "Chunks of loads and stores under way.", "operation"
)
IS_USABLE = TierMetric(f"{_PREFIX}is_usable", "gauge", "1 while the fabric is connected and answers, else 0.")

METRICS = (
    LOOKUP_CHUNKS,
    LOAD_CHUNKS,
    STORE_CHUNKS,
    LOAD_BYTES,
    REQUESTS,
    INFLIGHT_CHUNKS,
    IS_USABLE,
)


class TierSample(NamedTuple):
    """Value of a metric; for a counter, the increase since the last call."""

    metric: TierMetric
    label: str
    value: float


class TierCounters:
    """Counts since the tier began, and since the last ``take``."""

    def __init__(self) -> None:
        self.total: Counter[tuple[TierMetric, str]] = Counter()
        self._new: Counter[tuple[TierMetric, str]] = Counter()

    def add(self, metric: TierMetric, label: str = "", count: int = 1) -> None:
        """Add to a metric."""
        if count:
            self.total[metric, label] += count
            self._new[metric, label] += count

    def take(self) -> Iterable[TierSample]:
        """Return the increases since the last call."""
        new, self._new = self._new, Counter()
        return [TierSample(metric, label, value) for (metric, label), value in new.items()]


def outcome_name(state: BlockState | PutState, reason: int) -> str:
    """Return the name of a block's outcome: its reason if any, else its state."""
    if not reason:
        return state.name.lower()
    return Reason(reason).name.lower() if reason in _KNOWN_REASONS else "other"
