"""D7l: processor time of the agent's event loop per GiB got from flash, beside the time on the clock.

An agent has one event loop. Its time per GiB limits the rate of an agent, whatever the number of cores.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target
from benchmarks.thread_time import NS_PER_MS, cpu_ns

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.series import Measurement, Series

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

_TURNS = 4


def run(conditions: Conditions) -> list[Figure]:
    """Measure gets as views, without a DRAM cache."""
    plan = conditions.one_plan()
    options = ("--capacity", str(plan.capacity_bytes), "--dram", "0")
    loop_ms: list[float] = []
    wall_ms: list[float] = []
    with (
        running_fabric(conditions.new_directory(), *options) as fabric,
        contextlib.closing(suite.workload(plan, fabric.address)) as work,
    ):
        chains = itertools.cycle([work.stored_chain() for _ in range(suite.FLASH_BATCHES)])
        per_gib = suite.GIB / (_TURNS * plan.batch_bytes)
        for turn in range(plan.pace.warm_ups + plan.pace.rounds_min):
            before, begun_s = cpu_ns(fabric.pid)["loop"], time.perf_counter()
            for _ in range(_TURNS):
                work.get_views(next(chains))
            if turn >= plan.pace.warm_ups:
                wall_ms.append((time.perf_counter() - begun_s) * 1e3 * per_gib)
                loop_ms.append((cpu_ns(fabric.pid)["loop"] - before) / NS_PER_MS * per_gib)
    found = Measurement("loop", Series(tuple(loop_ms)), "on the clock", Series(tuple(wall_ms)))
    name = f"event loop per GiB got from flash, {batch_text(plan)}"
    return [Figure("D7l", name, "ms", found, Target(value_at_most=15.0))]
