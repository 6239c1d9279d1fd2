"""Statistics of a trace that bound the benefit of a cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_cli.tools.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Statistics of a trace."""

    requests: int
    span_s: float
    requests_per_s: float
    input_tokens_mean: float
    output_tokens_mean: float
    blocks: int
    """Requested blocks: each 512 tokens of each prompt."""

    unique_blocks: int
    blocks_per_request_mean: float
    blocks_per_request_p99: float
    blocks_per_request_max: int
    reusable_share: float
    """Share of requested blocks with an earlier request: hits of an infinite cache."""

    reusable_prefix_share: float
    """Hits of an infinite cache for readers of the unbroken prefix."""

    requested_once_share: float
    """Share of unique blocks requested a single time; writing these blocks is wasted."""

    reuse_gap_s_p50: float
    """Median time between two requests of a block; 0 without repeated requests."""

    reuse_gap_s_p90: float


def statistics_of(trace: Trace) -> TraceStatistics:
    """Compute the statistics of a trace."""
    per_request = np.diff(trace.bounds)
    is_again, gaps_s = _repeated_requests(trace.blocks, np.repeat(trace.times_s, per_request))
    counts = np.bincount(trace.blocks, minlength=1)
    prefix = int(prefix_lengths(is_again, trace.bounds[:-1][per_request > 0]).sum())
    return TraceStatistics(
        requests=len(trace),
        span_s=trace.span_s,
        requests_per_s=len(trace) / trace.span_s if trace.span_s else 0.0,
        input_tokens_mean=float(trace.input_tokens.mean()),
        output_tokens_mean=float(trace.output_tokens.mean()),
        blocks=len(trace.blocks),
        unique_blocks=trace.unique_blocks,
        blocks_per_request_mean=float(per_request.mean()),
        blocks_per_request_p99=float(np.quantile(per_request, 0.99)),
        blocks_per_request_max=int(per_request.max()),
        reusable_share=float(is_again.mean()),
        reusable_prefix_share=prefix / len(trace.blocks),
        requested_once_share=float((counts == 1).mean()),
        reuse_gap_s_p50=float(np.quantile(gaps_s, 0.5)) if len(gaps_s) else 0.0,
        reuse_gap_s_p90=float(np.quantile(gaps_s, 0.9)) if len(gaps_s) else 0.0,
    )


def prefix_lengths(is_present: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of present blocks from each start to the first hole.

    *starts*: index of each request's first block in *is_present*, increasing; no request is empty.
    """
    ends = np.append(starts[1:], len(is_present))
    holes = np.append(np.flatnonzero(~is_present), len(is_present))
    lengths: NDArray[np.int64] = np.minimum(holes[np.searchsorted(holes, starts)], ends) - starts
    return lengths


def _repeated_requests(
    blocks: NDArray[np.int64], times_s: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return whether each block was requested before, and the gaps in seconds."""
    order = np.argsort(blocks, kind="stable")
    is_same = blocks[order][1:] == blocks[order][:-1]
    is_again = np.zeros(len(blocks), np.bool_)
    is_again[order[1:][is_same]] = True
    return is_again, np.diff(times_s[order])[is_same]
