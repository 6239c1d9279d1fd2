"""D4: puts acknowledged when committed, beside the best O_DIRECT write of a file on that disk.

There are three measurements. The first puts a batch at a time, so that no concurrency hides latency. The
second has several batches under way, like an engine's offloading. The third repeats the second on a disk
throttled to the rate of two cores (ADR 0026), where the kernel supports throttling.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target
from benchmarks.support.operations import put_slots_ahead
from benchmarks.support.write_throttle import throttled_writers, unavailable_reason

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.series import Comparison, Measurement, Pacing, measure
from ostraca_fabric.model.outcome import Ack

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions
    from benchmarks.support.write_throttle import Writers

    from ostraca_cli.tools.bench.limits import DirectFile
    from ostraca_cli.tools.bench.suite import BenchPlan
    from ostraca_cli.tools.bench.workload import Workload

AHEAD = 3
_BATCHES = 12
"""Batches in a turn with several under way: enough to reduce the weight of the first and the last."""

_THROTTLE_BYTES_S = 2_000_000_000
"""Bytes per second: 1 GB/s for each of the two measured cores."""


def run(conditions: Conditions) -> list[Figure]:
    """Measure puts from arena slots."""
    if refused := unavailable_reason():
        print(f"d4: the disk can't be held back to {_THROTTLE_BYTES_S / 1e9:g} GB/s here: {refused}")
        return [figure for plan in conditions.plans() for figure in _figures(plan, conditions)]
    with throttled_writers(conditions.directory) as writers:
        return [figure for plan in conditions.plans() for figure in _figures(plan, conditions, writers)]


def _figures(plan: BenchPlan, conditions: Conditions, writers: Writers | None = None) -> list[Figure]:
    directory = conditions.new_directory()
    with (
        suite.own_workload(
            plan, directory, dram_bytes=0, batches=AHEAD, capacity_bytes=4 * plan.capacity_bytes
        ) as work,
        suite.direct_file(plan, directory) as file,
    ):
        # Once around every shard's ring: the file was written before, so shall the drives have been.
        for _ in range(1 if conditions.is_short else 4 * plan.capacity_bytes // plan.batch_bytes):
            work.stored_chain()
        file.tune_writes()
        single = Comparison("committed", lambda: work.put_slots(Ack.COMMITTED), "O_DIRECT write", file.write)
        what = f"put {batch_text(plan)} committed, from arena"
        ahead = f"{what}, {AHEAD} batches under way"
        free, throttled = Target(ratio_at_least=0.80), Target(ratio_at_least=0.90)
        found = [
            (what, measure(single, plan.pace), free),
            (ahead, _sustained(work, file, plan, conditions), free),
        ]
        if writers is not None:
            with writers.throttled(_THROTTLE_BYTES_S):
                held = _sustained(work, file, plan, conditions)
            found.append((f"{ahead}, drive of {_THROTTLE_BYTES_S / 1e9:g} GB/s", held, throttled))
    return [Figure("D4", text, "GB/s", each, target) for text, each, target in found]


def _sustained(work: Workload, file: DirectFile, plan: BenchPlan, conditions: Conditions) -> Measurement:
    batches = AHEAD if conditions.is_short else _BATCHES
    case = Comparison(
        "committed",
        lambda: put_slots_ahead(work, Ack.COMMITTED, batches=batches, ahead=AHEAD),
        "O_DIRECT write",
        lambda: batches / sum(1 / file.write() for _ in range(batches)),
    )
    pace: Pacing = replace(plan.pace, warm_ups=1)
    return measure(case, pace)
