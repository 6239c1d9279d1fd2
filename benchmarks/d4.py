"""D4: puts acknowledged when committed, beside the best O_DIRECT write of a file on that disk."""

from __future__ import annotations

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
    """Measure puts from arena slots."""
    return [_figure(plan, conditions) for plan in conditions.plans()]


def _figure(plan: Plan, conditions: Conditions) -> Figure:
    directory = conditions.new_directory()
    with (
        suite.own_workload(plan, directory, dram_bytes=0) as work,
        suite.direct_file(plan, directory) as file,
    ):
        # Once around every shard's ring: the file was written before, so shall the drives have been.
        for _ in range(1 if conditions.is_short else plan.capacity_bytes // plan.batch_bytes):
            work.stored_chain()
        file.tune_writes()
        case = Case("committed", lambda: work.put_slots(Ack.COMMITTED), "O_DIRECT write", file.write)
        found = measure(case, plan.pace)
    what = f"put {batch_text(plan)} committed, from arena"
    return Figure("D4", what, "GB/s", found, Target(ratio_at_least=0.90))
