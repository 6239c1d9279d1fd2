"""D10: D1 without NIXL: inline transfers, beside a plain socket, and regions beside arena and copies."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target
from benchmarks.support.operations import RegionWork

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.series import Comparison, measure
from ostraca_fabric.model.outcome import Ack

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.suite import BenchPlan


def run(conditions: Conditions) -> list[Figure]:
    """Measure views of arena slots, and rows of a region."""
    return [figure for plan in conditions.plans() for figure in _figures(plan, conditions)]


def _figures(plan: BenchPlan, conditions: Conditions) -> list[Figure]:
    dram_bytes, batch = suite.dram_bytes(plan), batch_text(plan)
    with (
        suite.own_workload(
            plan, conditions.new_directory(), dram_bytes=dram_bytes, transport="inline"
        ) as work,
        contextlib.closing(suite.start_raw_pair(plan, work)) as raw,
        RegionWork(work) as rows,
    ):
        chain = suite.resident_chain(work)

        def views() -> float:
            return work.get_views(chain)

        found = measure(Comparison("views", views, raw.name, raw.write), plan.pace)
        beside_views = measure(Comparison("region", lambda: rows.get(chain), "views", views), plan.pace)
        beside_copies = measure(
            Comparison("region", lambda: rows.get(chain), "copied", lambda: work.get_into(chain)), plan.pace
        )
        puts = measure(
            Comparison("region", lambda: rows.put(Ack.STAGED), "arena", lambda: work.put_slots(Ack.STAGED)),
            plan.pace,
        )
    get, put = f"get {batch} from DRAM inline", f"put {batch} staged inline"
    return [
        Figure("D10", f"{get}, views", "GB/s", found, Target(ratio_at_least=0.8)),
        Figure("D10v", f"{get}, region beside views", "GB/s", beside_views, Target(ratio_at_least=1.0)),
        Figure("D10c", f"{get}, region beside copies", "GB/s", beside_copies, Target(ratio_at_least=1.25)),
        Figure("D10p", f"{put}, region beside arena", "GB/s", puts, Target(ratio_at_least=1.0)),
    ]
