"""D10: D1 without NIXL: inline transfers, beside a plain socket with the same batch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.series import Comparison, measure

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.suite import BenchPlan


def run(conditions: Conditions) -> list[Figure]:
    """Measure views of arena slots."""
    return [_figure(plan, conditions) for plan in conditions.plans()]


def _figure(plan: BenchPlan, conditions: Conditions) -> Figure:
    dram_bytes = suite.dram_bytes(plan)
    with (
        suite.own_workload(
            plan, conditions.new_directory(), dram_bytes=dram_bytes, transport="inline"
        ) as work,
        contextlib.closing(suite.start_raw_pair(plan, work)) as raw,
    ):
        chain = suite.resident_chain(work)
        found = measure(Comparison("views", lambda: work.get_views(chain), raw.name, raw.write), plan.pace)
    what = f"get {batch_text(plan)} from DRAM inline, views"
    return Figure("D10", what, "GB/s", found, Target(ratio_at_least=0.8))
