"""What the tier counts, and under which names it appears among vLLM's metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ostraca_fabric.outcome import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ostraca_fabric.outcome import BlockState, PutState

_PREFIX = "vllm:kv_offload_ostraca_"
_KNOWN_REASONS = frozenset(Reason)


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric, the same only as itself. Prometheus adds ``_total`` to the name of a counter."""

    name: str
    kind: str
    """``counter`` or ``gauge``."""
    help: str
    label: str = ""
    """Its one label besides vLLM's own; empty for none."""


LOOKUP_CHUNKS = Metric(
    f"{_PREFIX}lookup_chunks", "counter", "Chunks that were asked for, by what was answered.", "outcome"
)
LOAD_CHUNKS = Metric(
    f"{_PREFIX}load_chunks", "counter", "Chunks that were to be loaded, by what became of them.", "outcome"
)
STORE_CHUNKS = Metric(
    f"{_PREFIX}store_chunks", "counter", "Chunks that were to be stored, by what became of them.", "outcome"
)
LOAD_BYTES = Metric(f"{_PREFIX}load_bytes", "counter", "Bytes that were loaded and verified.")
REQUESTS = Metric(
    f"{_PREFIX}requests", "counter", "Requests that were sent to the fabric, by operation.", "operation"
)
INFLIGHT_CHUNKS = Metric(
    f"{_PREFIX}inflight_chunks", "gauge", "Chunks of loads and stores under way.", "operation"
)
IS_USABLE = Metric(f"{_PREFIX}is_usable", "gauge", "1 while the fabric is connected and answers, else 0.")

METRICS = (
    LOOKUP_CHUNKS,
    LOAD_CHUNKS,
    STORE_CHUNKS,
    LOAD_BYTES,
    REQUESTS,
    INFLIGHT_CHUNKS,
    IS_USABLE,
)


class Sample(NamedTuple):
    """A value of a metric: for a counter, what was added since the last time."""

    metric: Metric
    label: str
    value: float


class Counters:
    """Counts since the tier began, and since they were last taken."""

    def __init__(self) -> None:
        self.total: Counter[tuple[Metric, str]] = Counter()
        self._new: Counter[tuple[Metric, str]] = Counter()

    def add(self, metric: Metric, label: str = "", count: int = 1) -> None:
        """Count something."""
        if count:
            self.total[metric, label] += count
            self._new[metric, label] += count

    def take(self) -> Iterable[Sample]:
        """Return what was added since the last time."""
        new, self._new = self._new, Counter()
        return [Sample(metric, label, value) for (metric, label), value in new.items()]


def outcome_name(state: BlockState | PutState, reason: int) -> str:
    """Name what became of a block: by its reason where it has one, else by its state."""
    if not reason:
        return state.name.lower()
    return Reason(reason).name.lower() if reason in _KNOWN_REASONS else "other"
