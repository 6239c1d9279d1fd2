"""What a trace is like: the numbers that decide how much a cache can do for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca.cli.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """A trace in numbers."""

    requests: int
    span_s: float
    requests_per_s: float
    input_tokens_mean: float
    output_tokens_mean: float
    blocks: int
    """Asked for, one for every 512 tokens of each prompt."""

    unique_blocks: int
    blocks_per_request_mean: float
    blocks_per_request_p99: float
    blocks_per_request_max: int
    reusable_share: float
    """Of the blocks asked for, those that were asked for before: what an endless cache would hit."""

    reusable_prefix_share: float
    """The same for a reader that stops at the first block which was not."""

    asked_once_share: float
    """Of the unique blocks, those asked for a single time: written for nothing by whoever writes all."""

    reuse_gap_s_p50: float
    """From one time a block was asked for to the next; 0 where none was asked for twice."""

    reuse_gap_s_p90: float


def statistics_of(trace: Trace) -> TraceStatistics:
    """Count."""
    per_request = np.diff(trace.bounds)
    times_s = np.repeat(trace.times_s, per_request)
    is_again, gaps_s = _asked_again(trace.blocks, times_s)
    counts = np.bincount(trace.blocks, minlength=1)
    starts = trace.bounds[:-1][per_request > 0]
    prefix = int(prefix_lengths(is_again, starts).sum())
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
        asked_once_share=float((counts == 1).mean()),
        reuse_gap_s_p50=float(np.quantile(gaps_s, 0.5)) if len(gaps_s) else 0.0,
        reuse_gap_s_p90=float(np.quantile(gaps_s, 0.9)) if len(gaps_s) else 0.0,
    )


def prefix_lengths(is_there: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many blocks are there from each start on, before the first that is not.

    *starts*: where each request's blocks begin in *is_there*, rising; no request is empty.
    """
    ends = np.append(starts[1:], len(is_there))
    holes = np.append(np.flatnonzero(~is_there), len(is_there))
    first_hole = holes[np.searchsorted(holes, starts)]
    lengths: NDArray[np.int64] = np.minimum(first_hole, ends) - starts
    return lengths


def _asked_again(
    blocks: NDArray[np.int64], times_s: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Tell which were asked for before, and after how long each of those came again."""
    order = np.argsort(blocks, kind="stable")
    is_same = blocks[order][1:] == blocks[order][:-1]
    is_again = np.zeros(len(blocks), np.bool_)
    is_again[order[1:][is_same]] = True
    return is_again, np.diff(times_s[order])[is_same]
