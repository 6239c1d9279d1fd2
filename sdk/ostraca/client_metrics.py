"""Counters of a client's operations, for exporters of metrics."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca._protocol.specs import GetSpec
from ostraca_fabric.model.outcome import BlockState, PutState
from ostraca_fabric.telemetry.openmetrics import (
    OUTCOME_LABELS,
    Metric,
    MetricKind,
    blocks_by_outcome,
    bytes_by_operation,
    render,
    tallies_by_operation,
)
from ostraca_fabric.telemetry.requests import STATES, HitWatches, OperationTally, Tally, unhit_sentence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca._protocol.specs import OperationSpec
    from ostraca_fabric.wire.codec import Outcomes

log = logging.getLogger(__name__)

_VOLUMES_WATCHED_MAX = 256

_IS_HIT = np.arange(256) == int(BlockState.HIT)
_IS_STORED = np.isin(np.arange(256), (PutState.STAGED, PutState.COMMITTED))


@dataclass(frozen=True, slots=True)
class ClientMetrics:
    """Counts of one client since its creation."""

    worker: str
    """Name of the client in the agent's logs, first part of request labels."""

    agent: str
    transport: str
    operations: tuple[OperationTally, ...]
    """Lookups, gets, puts and prefetches, with the outcomes returned to callers."""

    hit_tokens: int
    """Tokens with KV handed over: hit blocks of gets times the layout's ``page_tokens``, separately for each
    rank and KV group.
    """

    declared_saved_s: float
    """Saved recomputation, *as declared by callers*. Each get with ``recompute_s`` adds this time, multiplied
    by the share of blocks that hit, less the get's duration. Negative if gets did not pay off.
    """

    arena_bytes: int
    quarantined_bytes: int

    def operation(self, name: str) -> OperationTally:
        """Return the tally of ``lookup``, ``get``, ``put`` or ``prefetch``."""
        return next(tally for tally in self.operations if tally.operation == name)

    def openmetrics(self) -> str:
        """Return the counts as OpenMetrics text, for Prometheus.

        ``docs/reference/metrics.md`` lists the metrics.
        """
        return render(CLIENT_METRICS, self)


CLIENT_METRICS: tuple[Metric[ClientMetrics], ...] = (
    Metric(
        "ostraca_client",
        MetricKind.INFO,
        "",
        ("worker", "agent", "transport"),
        "Identity of the client, its agent and transport.",
        lambda client: {(client.worker, client.agent, client.transport): 1},
    ),
    Metric(
        "ostraca_client_blocks",
        MetricKind.COUNTER,
        "blocks",
        OUTCOME_LABELS,
        "Blocks by outcome as returned to the caller.",
        blocks_by_outcome,
    ),
    Metric(
        "ostraca_client_bytes",
        MetricKind.COUNTER,
        "bytes",
        ("operation",),
        "Bytes of blocks returned to the caller (get) or accepted by the fabric (put).",
        bytes_by_operation,
    ),
    Metric(
        "ostraca_client_operation_seconds",
        MetricKind.HISTOGRAM,
        "seconds",
        ("operation",),
        "Time from the caller's call until the result is ready, waits included.",
        tallies_by_operation,
    ),
    Metric(
        "ostraca_client_hit_tokens",
        MetricKind.COUNTER,
        "tokens",
        (),
        "Tokens whose KV reached the caller: hit blocks of gets times the layout's page_tokens. Each rank and"
        " KV group counts separately.",
        lambda client: client.hit_tokens,
    ),
    Metric(
        "ostraca_client_declared_saved_seconds",
        MetricKind.GAUGE,
        "seconds",
        (),
        "Saved recomputing: for each get with recompute_s, that time multiplied by the share of hit blocks, "
        "minus the get's duration. May fall.",
        lambda client: client.declared_saved_s,
    ),
    Metric(
        "ostraca_client_arena_bytes",
        MetricKind.GAUGE,
        "bytes",
        (),
        "Memory for transfers of blocks.",
        lambda client: client.arena_bytes,
    ),
    Metric(
        "ostraca_client_quarantined_bytes",
        MetricKind.GAUGE,
        "bytes",
        (),
        "Arena memory under transfers not known to have ended.",
        lambda client: client.quarantined_bytes,
    ),
)


class Meter:
    """Running counts of one client.

    Only the client's driver counts. Any thread may take a snapshot, without a lock that an exception of a
    signal handler could leave held. An operation that ends meanwhile may be counted in part of the snapshot.
    """

    def __init__(self) -> None:
        self._tallies = {operation: Tally(operation) for operation in STATES}
        self._hit_tokens = 0
        self._saved_s = 0.0
        self._hit_watches = HitWatches(_VOLUMES_WATCHED_MAX)

    def count(
        self, spec: OperationSpec, outcomes: Outcomes, *, lengths: NDArray[np.uint32] | None, took_s: float
    ) -> None:
        """Count an ended operation; *lengths* are the bytes of its blocks, if blocks moved."""
        states, reasons = outcomes.states, outcomes.reasons
        record = spec.volume.record
        hits, moved_bytes = 0, 0
        if isinstance(spec, GetSpec):
            is_hit = _IS_HIT[states]
            hits = int(np.count_nonzero(is_hit))
            moved_bytes = _bytes_of(lengths, is_hit)
            if spec.recompute_s and spec.blocks:
                self._saved_s += spec.recompute_s * hits / spec.blocks - took_s
        elif spec.operation == "put":
            moved_bytes = _bytes_of(lengths, _IS_STORED[states])
        tally = self._tallies[spec.operation]
        tally.count(states, reasons)
        tally.bytes += moved_bytes
        tally.timed(took_s)
        self._hit_tokens += hits * record.layout.page_tokens
        name = f"{record.tenant}/{record.name}"
        watch = self._hit_watches.count(name, spec.operation, *outcomes.encode())
        if watch.take_notice():
            notice = unhit_sentence(name, put_blocks=watch.put_blocks, asked_blocks=watch.asked_blocks)
            log.warning("No hits in %s", notice)

    def snapshot(
        self, *, worker: str, agent: str, transport: str, arena_bytes: int, quarantined_bytes: int
    ) -> ClientMetrics:
        """Return the current counts, with the client's description of itself."""
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
