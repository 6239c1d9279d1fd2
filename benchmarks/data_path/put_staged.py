"""D3: puts acknowledged when staged, beside raw NIXL reads of the same batch between two processes.

D3m are puts that the agent copies out of the worker's memory itself. D3n are puts from rows of a region, out
of which the agent reads. The next batch begins after the commit of the previous one, so that no put competes
with earlier writes.

D6p are puts of one block, another each time, beside a memcpy. They follow each other without a wait for
commits.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target
from benchmarks.support.operations import RegionWork

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.limits import Memcpy
from ostraca_cli.tools.bench.series import GB, Comparison, measure
from ostraca_fabric.model.outcome import Ack

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.suite import BenchPlan

MS = 1e3

_EARLIER_PUTS = 200
"""Puts of one block before the measured ones, whose writes and commits go on meanwhile."""


def run(conditions: Conditions) -> list[Figure]:
    """Measure puts from arena slots, and from the caller's memory."""
    batches = [figure for plan in conditions.plans() for figure in _figures(plan, conditions)]
    return [*batches, _put_of_one(conditions)]


def _figures(plan: BenchPlan, conditions: Conditions) -> list[Figure]:
    directory, batch = conditions.new_directory(), batch_text(plan)
    with (
        suite.own_workload(plan, directory, dram_bytes=suite.dram_bytes(plan)) as work,
        contextlib.closing(suite.workload(plan, work.address, direct_memory=True)) as own,
        contextlib.closing(suite.start_raw_pair(plan, work)) as raw,
        RegionWork(work, may_withhold=True) as rows,
    ):
        limit = f"{raw.name} READ"
        slots = measure(Comparison("arena", lambda: work.put_slots(Ack.STAGED), limit, raw.read), plan.pace)
        memory = measure(Comparison("memory", lambda: work.put(Ack.STAGED), limit, raw.read), plan.pace)
        own_slots = measure(
            Comparison("arena", lambda: own.put_slots(Ack.STAGED), limit, raw.read), plan.pace
        )
        own_memory = measure(Comparison("memory", lambda: own.put(Ack.STAGED), limit, raw.read), plan.pace)
        region = measure(
            Comparison("region", lambda: rows.put(Ack.STAGED), "arena", lambda: work.put_slots(Ack.STAGED)),
            plan.pace,
        )
    put = f"put {batch} staged, read by the agent"
    return [
        Figure("D3", f"put {batch} staged, from arena", "GB/s", slots, Target(ratio_at_least=0.60)),
        Figure("D3", f"put {batch} staged, from memory", "GB/s", memory, Target(ratio_at_least=0.50)),
        Figure("D3m", f"{put}, from arena", "GB/s", own_slots, Target(ratio_at_least=0.60)),
        Figure("D3m", f"{put}, from memory", "GB/s", own_memory, Target(ratio_at_least=0.50)),
        Figure("D3n", f"put {batch} staged, region beside arena", "GB/s", region, Target(ratio_at_least=1.0)),
    ]


def _put_of_one(conditions: Conditions) -> Figure:
    plan, directory = conditions.one_plan(), conditions.new_directory()
    with (
        suite.own_workload(plan, directory, dram_bytes=suite.dram_bytes(plan)) as work,
        contextlib.closing(suite.workload(plan, work.address, direct_memory=True)) as own,
        contextlib.closing(Memcpy(blocks=plan.blocks, block_bytes=plan.block_bytes)) as memcpy,
    ):
        numbers = itertools.cycle(range(plan.blocks))
        for _ in range(_EARLIER_PUTS):
            own.put_one_s(next(numbers))
        found = measure(
            Comparison(
                "one block",
                lambda: own.put_one_s(next(numbers)) * MS,
                "memcpy of a block",
                lambda: plan.block_bytes / GB / memcpy.turn_of_one() * MS,
            ),
            plan.pace,
        )
    return Figure("D6p", "put 1 block staged, read by the agent, p50", "ms", found, Target(ratio_at_most=7))
