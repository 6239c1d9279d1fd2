"""D1: gets of blocks in the agent's DRAM, beside raw NIXL writes, and beside such writes with a tag pass."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target
from benchmarks.support.tagged_nixl import TaggedNixl

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.series import Comparison, measure

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.suite import BenchPlan


def run(conditions: Conditions) -> list[Figure]:
    """Measure views of arena slots, and copies into the caller's memory."""
    return [figure for plan in conditions.plans() for figure in _figures(plan, conditions)]


def _figures(plan: BenchPlan, conditions: Conditions) -> list[Figure]:
    directory, batch = conditions.new_directory(), batch_text(plan)
    with (
        suite.own_workload(plan, directory, dram_bytes=suite.dram_bytes(plan)) as work,
        contextlib.closing(suite.start_raw_pair(plan, work)) as raw,
    ):
        chain = suite.resident_chain(work)
        limit = f"{raw.name} WRITE"
        views = measure(Comparison("views", lambda: work.get_views(chain), limit, raw.write), plan.pace)
        copied = measure(Comparison("copied", lambda: work.get_into(chain), limit, raw.write), plan.pace)
        with contextlib.closing(TaggedNixl(plan.blocks, plan.block_bytes)) as tagged:
            checked = measure(
                Comparison("views", lambda: work.get_views(chain), tagged.name, tagged.write), plan.pace
            )
    return [
        Figure("D1", f"get {batch} from DRAM, views", "GB/s", views, Target(ratio_at_least=0.70)),
        Figure("D1c", f"get {batch} from DRAM, copied", "GB/s", copied, Target(ratio_at_least=0.55)),
        Figure("D1p", f"get {batch} from DRAM, views", "GB/s", checked, Target(ratio_at_least=0.85)),
    ]
