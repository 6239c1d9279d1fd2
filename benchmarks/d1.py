"""D1: gets of blocks that the agent's DRAM holds, beside raw NIXL writing the same batch."""

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
    """Measure views of arena slots, and copies into the caller's memory."""
    return [figure for plan in conditions.plans() for figure in _figures(plan, conditions)]


def _figures(plan: Plan, conditions: Conditions) -> list[Figure]:
    directory, batch = conditions.new_directory(), batch_text(plan)
    with (
        suite.own_workload(plan, directory, dram_bytes=suite.dram_bytes(plan)) as work,
        contextlib.closing(suite.raw_of(plan, work)) as raw,
    ):
        chain = suite.resident_chain(work)
        limit = f"{raw.name} WRITE"
        views = measure(Case("views", lambda: work.get_views(chain), limit, raw.write), plan.pace)
        copied = measure(Case("copied", lambda: work.get_into(chain), limit, raw.write), plan.pace)
    return [
        Figure("D1", f"get {batch} from DRAM, views", "GB/s", views, Target(ratio_at_least=0.85)),
        Figure("D1c", f"get {batch} from DRAM, copied", "GB/s", copied, Target(ratio_at_least=0.65)),
    ]
