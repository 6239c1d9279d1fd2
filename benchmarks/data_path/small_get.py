"""D6: get of one block in the agent's DRAM, beside a memcpy of as many bytes.

The agent delivers the block, or the worker copies it out of the agent's memory (D6m). The same block each
time stays in the processor's caches. Another block each time comes from memory, in both columns (D6c).
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

from benchmarks.support.figure import Figure, Target

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.limits import Memcpy
from ostraca_cli.tools.bench.series import GB, Comparison, Measurement, measure

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.suite import BenchPlan
    from ostraca_cli.tools.bench.workload import Workload

MS = 1e3


def run(conditions: Conditions) -> list[Figure]:
    """Measure gets of a block of the first size, into the caller's memory."""
    plan = conditions.one_plan()
    with (
        suite.own_workload(plan, conditions.new_directory(), dram_bytes=suite.dram_bytes(plan)) as work,
        contextlib.closing(suite.workload(plan, work.address, direct_memory=True)) as own,
        contextlib.closing(Memcpy(blocks=1, block_bytes=plan.block_bytes)) as memcpy,
        contextlib.closing(Memcpy(blocks=plan.blocks, block_bytes=plan.block_bytes)) as memcpy_of_all,
    ):
        chain = suite.resident_chain(work)

        def beside_memcpy(worker: Workload) -> Measurement:
            return _beside(lambda: worker.get_s(chain[:1]), memcpy.turn, plan)

        def beside_memory(worker: Workload) -> Measurement:
            numbers = itertools.cycle(range(plan.blocks))
            return _beside(lambda: worker.get_one_s(chain, next(numbers)), memcpy_of_all.turn_of_one, plan)

        found, copied = beside_memcpy(work), beside_memcpy(own)
        from_memory, copied_from_memory = beside_memory(work), beside_memory(own)
    name, by_worker = "get 1 block from DRAM", "get 1 block from DRAM, by the worker"
    another, most = "another each time", Target(ratio_at_most=5)
    return [
        Figure("D6", f"{name}, p50", "ms", found, most),
        Figure("D6", f"{name}, p99", "ms", found, Target(ratio_at_most=15), quantile=0.99),
        Figure("D6m", f"{by_worker}, p50", "ms", copied, most),
        Figure("D6c", f"{name}, {another}, p50", "ms", from_memory, most),
        Figure("D6c", f"{by_worker}, {another}, p50", "ms", copied_from_memory, most),
    ]


def _beside(get_s: Callable[[], float], memcpy: Callable[[], float], plan: BenchPlan) -> Measurement:
    return measure(
        Comparison(
            "one block",
            lambda: get_s() * MS,
            "memcpy of a block",
            lambda: plan.block_bytes / GB / memcpy() * MS,
        ),
        plan.pace,
    )
