"""What a client's operations have come to, for whoever exports metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric import metrics, openmetrics
from ostraca_fabric.metric import Sample
from ostraca_fabric.outcome import BlockState, PutState
from ostraca_fabric.tallies import STATES, OperationTally, Tally

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca.jobs import Job, Outcome

_IS_HIT = np.arange(256) == int(BlockState.HIT)
_IS_STORED = np.isin(np.arange(256), (PutState.STAGED, PutState.COMMITTED))


@dataclass(frozen=True, slots=True)
class ClientMetrics:
    """The counts of one client since it was made."""

    worker: str
    """The client's name in the agent's logs: what its requests' labels begin with."""

    agent: str
    transport: str
    operations: tuple[OperationTally, ...]
    """Lookups, gets, puts and prefetches: outcomes as their callers were told them."""

    hit_tokens: int
    """Tokens whose KV was handed over: hit blocks of gets times the layout's ``page_tokens``. Each rank and
    KV group counts its own."""

    declared_saved_s: float
    """Recomputing saved, *as callers declared it*: for each get with ``recompute_s``, that time the share of
    its blocks that hit, less what the get took. Negative when gets were not worth it."""

    arena_bytes: int
    quarantined_bytes: int

    def operation(self, name: str) -> OperationTally:
        """Return the tally of ``lookup``, ``get``, ``put`` or ``prefetch``."""
        return next(tally for tally in self.operations if tally.operation == name)

    def openmetrics(self) -> str:
        """Return them as OpenMetrics text, for Prometheus: ``docs/reference/metrics.md`` lists them."""
        return openmetrics.render(self._samples())

    def _samples(self) -> Iterator[Sample]:
        yield Sample(metrics.CLIENT_INFO, (self.worker, self.agent, self.transport), 1)
        yield from metrics.operation_samples(
            self.operations, metrics.CLIENT_BLOCKS, metrics.CLIENT_BYTES, metrics.CLIENT_SECONDS
        )
        for metric, value in (
            (metrics.CLIENT_TOKENS, self.hit_tokens),
            (metrics.CLIENT_SAVED, self.declared_saved_s),
            (metrics.CLIENT_ARENA, self.arena_bytes),
            (metrics.CLIENT_QUARANTINED, self.quarantined_bytes),
        ):
            yield Sample(metric, (), value)


class Meter:
    """The running counts of one client. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies = {operation: Tally(operation) for operation in STATES}
        self._hit_tokens = 0
        self._saved_s = 0.0

    def count(self, job: Job[object], outcome: Outcome, *, took_s: float) -> None:
        """Count an operation that has ended for its caller."""
        states = np.frombuffer(outcome.states, np.uint8)
        reasons = np.frombuffer(outcome.reasons, np.uint8)
        hits, moved_bytes, saved_s = 0, 0, 0.0
        if job.operation == "get":
            hits = outcome.states.count(BlockState.HIT)
            moved_bytes = _bytes_of(job.lengths, _IS_HIT[states])
            if job.recompute_s > 0 and job.blocks:
                saved_s = job.recompute_s * hits / job.blocks - took_s
        elif job.operation == "put":
            moved_bytes = _bytes_of(job.lengths, _IS_STORED[states])
        with self._lock:
            tally = self._tallies[job.operation]
            tally.count(states, reasons)
            tally.bytes += moved_bytes
            tally.timed(took_s)
            self._hit_tokens += hits * job.volume.layout.page_tokens
            self._saved_s += saved_s

    def snapshot(
        self, *, worker: str, agent: str, transport: str, arena_bytes: int, quarantined_bytes: int
    ) -> ClientMetrics:
        """Return the counts as they are now, with what the client says of itself."""
        with self._lock:
            return ClientMetrics(
                worker=worker,
                agent=agent,
                transport=transport,
                operations=tuple(tally.snapshot() for tally in self._tallies.values()),
                hit_tokens=self._hit_tokens,
                declared_saved_s=self._saved_s,
                arena_bytes=arena_bytes,
                quarantined_bytes=quarantined_bytes,
            )


def _bytes_of(lengths: NDArray[np.uint32] | None, is_counted: NDArray[np.bool_]) -> int:
    return 0 if lengths is None else int(lengths @ is_counted.astype(np.int64))
