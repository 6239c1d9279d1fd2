"""D3: puts acknowledged when staged, beside raw NIXL reading the same batch between two processes.

The next put begins when the last one's blocks are committed, so that none is measured against another's
writes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.conditions import batch_text
from benchmarks.figure import Figure, Target
from ostraca.cli.bench import suite
from ostraca.cli.bench.series import Case, measure
from ostraca_fabric.outcome import Ack

if TYPE_CHECKING:
    from benchmarks.conditions import Conditions
    from ostraca.cli.bench.suite import Plan


def run(conditions: Conditions) -> list[Figure]:
    """Measure puts from arena slots, and from the caller's memory."""
    return [figure for plan in conditions.plans() for figure in _figures(plan, conditions)]


def _figures(plan: Plan, conditions: Conditions) -> list[Figure]:
    directory, batch = conditions.new_directory(), batch_text(plan)
    with (
        suite.own_workload(plan, directory, dram_bytes=suite.dram_bytes(plan)) as work,
        contextlib.closing(suite.raw_of(plan, work)) as raw,
    ):
        limit = f"{raw.name} READ"
        slots = measure(Case("arena", lambda: work.put_slots(Ack.STAGED), limit, raw.read), plan.pace)
        memory = measure(Case("memory", lambda: work.put(Ack.STAGED), limit, raw.read), plan.pace)
    return [
        Figure("D3", f"put {batch} staged, from arena", "GB/s", slots, Target(ratio_at_least=0.80)),
        Figure("D3", f"put {batch} staged, from memory", "GB/s", memory, Target(ratio_at_least=0.60)),
    ]
