"""D10: D1 without NIXL: blocks cross inline, beside a plain socket that moves the same batch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.conditions import batch_text
from benchmarks.figure import Figure, Target
from ostraca.cli.bench import suite
from ostraca.cli.bench.series import Case, measure

if TYPE_CHECKING:
    from benchmarks.conditions import Conditions
    from ostraca.cli.bench.suite import Plan


def run(conditions: Conditions) -> list[Figure]:
    """Measure views of arena slots."""
    return [_figure(plan, conditions) for plan in conditions.plans()]


def _figure(plan: Plan, conditions: Conditions) -> Figure:
    dram_bytes = suite.dram_bytes(plan)
    with (
        suite.own_workload(
            plan, conditions.new_directory(), dram_bytes=dram_bytes, transport="inline"
        ) as work,
        contextlib.closing(suite.raw_of(plan, work)) as raw,
    ):
        chain = suite.resident_chain(work)
        found = measure(Case("views", lambda: work.get_views(chain), raw.name, raw.write), plan.pace)
    what = f"get {batch_text(plan)} from DRAM inline, views"
    return Figure("D10", what, "GB/s", found, Target(ratio_at_least=0.8))
