"""S6: bytes that reach the flash for each byte of a block that is new to it.

A request trace is replayed through the owner's code, with its default settings and every block admitted.
Beside what callers put, flash takes the summaries, and the blocks that eviction carries forward. Small
blocks show what summaries cost, large ones what carrying does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figure import Figure, Target
from benchmarks.replayed import workload
from ostraca.cli.bench.series import Finding, Series
from ostraca.cli.replay.plan import BLOCK_BYTES, OURS, Plan, parse_capacity
from ostraca.cli.replay.suite import outcomes

if TYPE_CHECKING:
    from benchmarks.conditions import Conditions

_CAPACITIES = ("3%", "10%", "30%")
_SMALL_BLOCK_BYTES = 64 << 10


def run(conditions: Conditions) -> list[Figure]:
    """Replay at several capacities."""
    name, trace = workload(conditions)
    capacities = ("30%",) if conditions.is_short else _CAPACITIES
    figures = []
    for block_bytes in (_SMALL_BLOCK_BYTES, BLOCK_BYTES):
        plan = Plan(
            capacities=tuple(map(parse_capacity, capacities)), policies=(OURS,), block_bytes=block_bytes
        )
        for capacity, found in zip(
            capacities, outcomes(trace, plan, lambda _title, _part: None), strict=True
        ):
            size = f"{block_bytes >> 10} KiB" if block_bytes < 1 << 20 else f"{block_bytes >> 20} MiB"
            finding = Finding(
                "written", Series((found.write_amplification,)), "the blocks alone", Series((1.0,))
            )
            what = f"{name}, {capacity} of its blocks held, {size} each"
            figures.append(Figure("S6", what, "x", finding, Target(value_at_most=1.15)))
    return figures
