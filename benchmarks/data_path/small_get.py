"""D6: get of one block in the agent's DRAM, beside a memcpy of as many bytes.

The agent delivers the block, or the worker copies it out of the agent's memory (D6m).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.support.figure import Figure, Target

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.limits import Memcpy
from ostraca_cli.tools.bench.series import GB, Comparison, Measurement, measure

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.workload import Workload

MS = 1e3


def run(conditions: Conditions) -> list[Figure]:
    """Measure gets of a block of the first size, into the caller's memory."""
    plan = conditions.one_plan()
    with (
        suite.own_workload(plan, conditions.new_directory(), dram_bytes=suite.dram_bytes(plan)) as work,
        contextlib.closing(suite.workload(plan, work.address, direct_memory=True)) as own,
        contextlib.closing(Memcpy(blocks=1, block_bytes=plan.block_bytes)) as memcpy,
    ):
        chain = suite.resident_chain(work)

        def beside_memcpy(worker: Workload) -> Measurement:
            return measure(
                Comparison(
                    "one block",
                    lambda: worker.get_s(chain[:1]) * MS,
                    "memcpy",
                    lambda: plan.block_bytes / GB / memcpy.turn() * MS,
                ),
                plan.pace,
            )

        found, copied = beside_memcpy(work), beside_memcpy(own)
    name = "get 1 block from DRAM"
    return [
        Figure("D6", f"{name}, p50", "ms", found, Target(value_at_most=0.3)),
        Figure("D6", f"{name}, p99", "ms", found, Target(value_at_most=1.0), quantile=0.99),
        Figure("D6m", f"{name}, by the worker, p50", "ms", copied, Target(value_at_most=0.3)),
    ]
