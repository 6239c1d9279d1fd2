"""Counters of a client's operations, for exporters of metrics."""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.limits import described
from ostraca_fabric.telemetry.openmetrics import (
    OUTCOME_LABELS,
    Metric,
    MetricKind,
    blocks_by_outcome,
    bytes_by_operation,
    render,
    tallies_by_operation,
)
from ostraca_fabric.telemetry.requests import OperationTally


@dataclass(slots=True)
class DirectCounters:
    """Blocks that a client read itself, from drives or from its agent's memory."""

    blocks_read: int = 0
    blocks_failed: int = 0
    """Blocks left to the agent: failed reads, damaged blocks, and blocks of suspended drives."""

    blocks_lost: int = 0
    bytes_read: int = 0

    def __add__(self, other: DirectCounters) -> DirectCounters:
        """Add counts of other reads."""
        return DirectCounters(
            self.blocks_read + other.blocks_read,
            self.blocks_failed + other.blocks_failed,
            self.blocks_lost + other.blocks_lost,
            self.bytes_read + other.bytes_read,
        )


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
    direct: DirectCounters | None = None
    """Blocks that the client read itself; None if it may not."""

    def operation(self, name: str) -> OperationTally:
        """Return the tally of ``lookup``, ``get``, ``put`` or ``prefetch``. Raises UsageError."""
        tallies = {tally.operation: tally for tally in self.operations}
        if name not in tallies:
            raise UsageError(f"{described(name)} is no operation: pass one of {', '.join(tallies)}")
        return tallies[name]

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
    Metric(
        "ostraca_client_direct_blocks",
        MetricKind.COUNTER,
        "blocks",
        ("result",),
        "Blocks that the client read itself, from drives or from its agent's memory: read, failed (delivered "
        "by the agent), or lost on a silent drive.",
        lambda client: {} if client.direct is None else _direct_blocks(client.direct),
    ),
)


def _direct_blocks(direct: DirectCounters) -> dict[tuple[str, ...], int]:
    counts = (("read", direct.blocks_read), ("failed", direct.blocks_failed), ("lost", direct.blocks_lost))
    return {(result,): blocks for result, blocks in counts}
