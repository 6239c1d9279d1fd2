"""D3: puts acknowledged when staged, beside raw NIXL reads of the same batch between two processes.

The next put begins after the commit of the previous put, so that no put competes with earlier writes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.series import Comparison, measure
from ostraca_fabric.model.outcome import Ack

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.suite import BenchPlan


def run(conditions: Conditions) -> list[Figure]:
    """Measure puts from arena slots, and from the caller's memory."""
    return [figure for plan in conditions.plans() for figure in _figures(plan, conditions)]


def _figures(plan: BenchPlan, conditions: Conditions) -> list[Figure]:
    directory, batch = conditions.new_directory(), batch_text(plan)
    with (
        suite.own_workload(plan, directory, dram_bytes=suite.dram_bytes(plan)) as work,
        contextlib.closing(suite.start_raw_pair(plan, work)) as raw,
    ):
        limit = f"{raw.name} READ"
        slots = measure(Comparison("arena", lambda: work.put_slots(Ack.STAGED), limit, raw.read), plan.pace)
        memory = measure(Comparison("memory", lambda: work.put(Ack.STAGED), limit, raw.read), plan.pace)
    return [
        Figure("D3", f"put {batch} staged, from arena", "GB/s", slots, Target(ratio_at_least=0.80)),
        Figure("D3", f"put {batch} staged, from memory", "GB/s", memory, Target(ratio_at_least=0.60)),
    ]
