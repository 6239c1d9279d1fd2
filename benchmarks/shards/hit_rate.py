"""S7: hits of a replayed trace beside LRU of the same capacity, and hits lost to a write budget.

Hits count for readers of unbroken prefixes. The budget is half of the writes under full admission. Belady's
MIN shows the limit for any policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.support.figure import Figure, Target
from benchmarks.support.workload_trace import workload

from ostraca_cli.tools.bench.series import Measurement, Series
from ostraca_cli.tools.replay.plan import OURS, ReplayPlan, parse_budget, parse_capacity
from ostraca_cli.tools.replay.suite import outcomes

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.replay.outcome import ReplayOutcome

_KEPT_AT_LEAST = {"3%": 0.9, "10%": 0.9, "30%": 0.75}
"""Share of hits kept with half the writes, by capacity. The share is smaller at capacities near the whole
trace, because each block declined at first costs a hit (docs/adr/0015)."""

_BUDGET = "50%"


def run(conditions: Conditions) -> list[Figure]:
    """Replay at several capacities."""
    name, trace = workload(conditions)
    figures = []
    for capacity, kept_at_least in _KEPT_AT_LEAST.items():
        if conditions.is_short and capacity != "30%":
            continue
        plan = ReplayPlan(
            capacities=(parse_capacity(capacity),),
            policies=(OURS, "lru", "belady"),
            budgets=(parse_budget(_BUDGET),),
        )
        ours, limited, lru, belady = outcomes(trace, plan, lambda _title, _part: None)
        where = f"{name}, {capacity} of its blocks held"
        figures += [
            _hits(f"{where}: hits (Belady {100 * belady.prefix_hit_rate:.1f} %)", ours, "LRU", lru, 1.0),
            _hits(f"{where}: hits with half the writes", limited, "all admitted", ours, kept_at_least),
            _writes(f"{where}: writes then", limited, ours),
        ]
    return figures


def _hits(what: str, ours: ReplayOutcome, limit_name: str, other: ReplayOutcome, at_least: float) -> Figure:
    measured, limit = Series((100 * ours.prefix_hit_rate,)), Series((100 * other.prefix_hit_rate,))
    finding = Measurement("hits", measured, limit_name, limit)
    return Figure("S7", what, "%", finding, Target(ratio_at_least=at_least))


def _writes(what: str, limited: ReplayOutcome, unlimited: ReplayOutcome) -> Figure:
    written = [
        each.written.all_bytes / (each.blocks_requested * each.block_bytes) for each in (limited, unlimited)
    ]
    finding = Measurement("written", Series((100 * written[0],)), "all admitted", Series((100 * written[1],)))
    return Figure("S7", what, "% of blocks asked for", finding, Target(ratio_at_most=0.5))
