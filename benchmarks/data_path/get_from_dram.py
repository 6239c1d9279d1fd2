"""D1: gets of blocks in the agent's DRAM, beside raw NIXL writes, and beside such writes with a tag pass.

D1m are gets of a worker that copies the blocks out of the agent's memory itself. D1n are gets into rows of a
region to which the agent writes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target
from benchmarks.support.operations import RegionWork
from benchmarks.support.tagged_nixl import TaggedNixl

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.series import Comparison, measure

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.suite import BenchPlan


def run(conditions: Conditions) -> list[Figure]:
    """Measure views of arena slots, copies into the caller's memory, and rows of a region."""
    return [figure for plan in conditions.plans() for figure in _figures(plan, conditions)]


def _figures(plan: BenchPlan, conditions: Conditions) -> list[Figure]:
    directory, batch = conditions.new_directory(), batch_text(plan)
    with (
        suite.own_workload(plan, directory, dram_bytes=suite.dram_bytes(plan)) as work,
        contextlib.closing(suite.workload(plan, work.address, direct_memory=True)) as own,
        contextlib.closing(suite.start_raw_pair(plan, work)) as raw,
        RegionWork(own) as rows,
        RegionWork(work, may_withhold=True) as written,
    ):
        chain = suite.resident_chain(work)
        limit = f"{raw.name} WRITE"
        views = measure(Comparison("views", lambda: work.get_views(chain), limit, raw.write), plan.pace)
        copied = measure(Comparison("copied", lambda: work.get_into(chain), limit, raw.write), plan.pace)
        own_views = measure(Comparison("views", lambda: own.get_views(chain), limit, raw.write), plan.pace)
        own_copied = measure(Comparison("copied", lambda: own.get_into(chain), limit, raw.write), plan.pace)
        beside_views = measure(
            Comparison("region", lambda: rows.get(chain), "views", lambda: work.get_views(chain)), plan.pace
        )
        beside_copies = measure(
            Comparison("region", lambda: rows.get(chain), "copied", lambda: work.get_into(chain)), plan.pace
        )
        written_beside_views = measure(
            Comparison("region", lambda: written.get(chain), "views", lambda: work.get_views(chain)),
            plan.pace,
        )
        written_beside_copies = measure(
            Comparison("region", lambda: written.get(chain), "copied", lambda: work.get_into(chain)),
            plan.pace,
        )
        with contextlib.closing(TaggedNixl(plan.blocks, plan.block_bytes)) as tagged:
            checked = measure(
                Comparison("views", lambda: work.get_views(chain), tagged.name, tagged.write), plan.pace
            )
            own_checked = measure(
                Comparison("views", lambda: own.get_views(chain), tagged.name, tagged.write), plan.pace
            )
    get = f"get {batch} from DRAM, read by the worker"
    write = f"get {batch} from DRAM into a region"
    return [
        Figure("D1", f"get {batch} from DRAM, views", "GB/s", views, Target(ratio_at_least=0.70)),
        Figure("D1c", f"get {batch} from DRAM, copied", "GB/s", copied, Target(ratio_at_least=0.55)),
        Figure("D1p", f"get {batch} from DRAM, views", "GB/s", checked, Target(ratio_at_least=0.85)),
        Figure("D1m", f"{get}, views", "GB/s", own_views, Target(ratio_at_least=0.70)),
        Figure("D1mc", f"{get}, copied", "GB/s", own_copied, Target(ratio_at_least=0.55)),
        Figure("D1mp", f"{get}, views", "GB/s", own_checked, Target(ratio_at_least=0.85)),
        Figure("D1mv", f"{get}, region beside views", "GB/s", beside_views, Target(ratio_at_least=1.0)),
        Figure("D1mr", f"{get}, region beside copies", "GB/s", beside_copies, Target(ratio_at_least=1.25)),
        Figure("D1nv", f"{write} beside views", "GB/s", written_beside_views, Target(ratio_at_least=1.0)),
        Figure("D1nr", f"{write} beside copies", "GB/s", written_beside_copies, Target(ratio_at_least=1.25)),
    ]
