"""S7: hits of a replayed trace beside LRU of the same capacity, and what a write budget costs in hits.

Hits are those of readers of prefixes, who stop at the first hole. Half the writes: the budget is half of what
is written when every block is admitted. Belady's MIN is named for what any policy could do at best.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figure import Figure, Target
from benchmarks.replayed import workload
from ostraca.cli.bench.series import Finding, Series
from ostraca.cli.replay.plan import OURS, Plan, parse_budget, parse_capacity
from ostraca.cli.replay.suite import outcomes

if TYPE_CHECKING:
    from benchmarks.conditions import Conditions
    from ostraca.cli.replay.outcome import Outcome

_KEPT_AT_LEAST = {"3%": 0.9, "10%": 0.9, "30%": 0.75}
"""The share of hits that half the writes keep, by capacity: less where there is room for nearly everything,
and a hit is lost for each block that was not taken at first (docs/adr/0015)."""

_BUDGET = "50%"


def run(conditions: Conditions) -> list[Figure]:
    """Replay at several capacities."""
    name, trace = workload(conditions)
    figures = []
    for capacity, kept_at_least in _KEPT_AT_LEAST.items():
        if conditions.is_short and capacity != "30%":
            continue
        plan = Plan(
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


def _hits(what: str, ours: Outcome, beside: str, other: Outcome, at_least: float) -> Figure:
    measured, limit = Series((100 * ours.prefix_hit_rate,)), Series((100 * other.prefix_hit_rate,))
    finding = Finding("hits", measured, beside, limit)
    return Figure("S7", what, "%", finding, Target(ratio_at_least=at_least))


def _writes(what: str, limited: Outcome, everything: Outcome) -> Figure:
    written = [
        each.written.all_bytes / (each.blocks_asked * each.block_bytes) for each in (limited, everything)
    ]
    finding = Finding("written", Series((100 * written[0],)), "all admitted", Series((100 * written[1],)))
    return Figure("S7", what, "% of blocks asked for", finding, Target(ratio_at_most=0.5))
