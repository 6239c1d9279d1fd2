"""D8: cost of tag checks: gets with checks at both ends, beside gets without checks."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING
from unittest.mock import patch

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target
from benchmarks.support.without_tag_checks import all_good

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.series import Comparison, measure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.series import Measurement
    from ostraca_cli.tools.bench.suite import BenchPlan
    from ostraca_cli.tools.bench.workload import Workload
    from ostraca_fabric.model.chain import Chain

UNCHECKED = "benchmarks.support.without_tag_checks"


def run(conditions: Conditions) -> list[Figure]:
    """Measure views of arena slots, from DRAM and from flash."""
    plan = conditions.one_plan()
    dram = _finding(plan, conditions, dram_bytes=suite.dram_bytes(plan))
    flash = _finding(plan, conditions, dram_bytes=0)
    what = f"get {batch_text(plan)}, tags on"
    return [
        Figure("D8", f"{what}, from DRAM", "GB/s", dram, Target(ratio_at_least=0.9)),
        Figure("D8", f"{what}, from flash", "GB/s", flash, Target(ratio_at_least=0.98)),
    ]


def _finding(plan: BenchPlan, conditions: Conditions, *, dram_bytes: int) -> Measurement:
    with (
        _workload(plan, conditions, dram_bytes, "ostraca_cli") as tagged,
        _workload(plan, conditions, dram_bytes, UNCHECKED) as untagged,
    ):
        ours, theirs = (_chains(work, dram_bytes=dram_bytes, plan=plan) for work in (tagged, untagged))

        def unchecked() -> float:
            with patch("ostraca._memory.copy_pool.are_good", all_good):
                return untagged.get_views(next(theirs))

        case = Comparison("tags on", lambda: tagged.get_views(next(ours)), "tags off", unchecked)
        return measure(case, plan.pace)


def _chains(work: Workload, *, dram_bytes: int, plan: BenchPlan) -> Iterator[Chain]:
    if dram_bytes:
        return itertools.repeat(suite.resident_chain(work))
    return itertools.cycle([work.stored_chain() for _ in range(plan.flash_bytes // plan.batch_bytes)])


@contextlib.contextmanager
def _workload(plan: BenchPlan, conditions: Conditions, dram_bytes: int, program: str) -> Iterator[Workload]:
    options = ("--capacity", str(plan.capacity_bytes), "--dram", str(dram_bytes))
    with (
        running_fabric(conditions.new_directory(), *options, program=program) as fabric,
        contextlib.closing(suite.workload(plan, fabric.address)) as work,
    ):
        yield work
