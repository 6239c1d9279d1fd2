"""S6: bytes written to flash per byte of a new block.

A request trace is replayed through the shard owner's code, with default settings and full admission. Beside
new blocks, flash takes summaries and reinserted blocks. Small blocks show the cost of summaries, large blocks
the cost of reinsertion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.support.figure import Figure, Target
from benchmarks.support.workload_trace import workload

from ostraca_cli.tools.bench.series import Measurement, Series
from ostraca_cli.tools.replay.plan import BLOCK_BYTES, OURS, ReplayPlan, parse_capacity
from ostraca_cli.tools.replay.suite import outcomes

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

_CAPACITIES = ("3%", "10%", "30%")
_SMALL_BLOCK_BYTES = 64 << 10


def run(conditions: Conditions) -> list[Figure]:
    """Replay at several capacities."""
    name, trace = workload(conditions)
    capacities = ("30%",) if conditions.is_short else _CAPACITIES
    figures = []
    for block_bytes in (_SMALL_BLOCK_BYTES, BLOCK_BYTES):
        plan = ReplayPlan(
            capacities=tuple(map(parse_capacity, capacities)), policies=(OURS,), block_bytes=block_bytes
        )
        for capacity, found in zip(
            capacities, outcomes(trace, plan, lambda _title, _part: None), strict=True
        ):
            size = f"{block_bytes >> 10} KiB" if block_bytes < 1 << 20 else f"{block_bytes >> 20} MiB"
            finding = Measurement(
                "written", Series((found.write_amplification,)), "the blocks alone", Series((1.0,))
            )
            what = f"{name}, {capacity} of its blocks held, {size} each"
            figures.append(Figure("S6", what, "x", finding, Target(value_at_most=1.15)))
    return figures
