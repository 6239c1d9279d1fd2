"""S8: cost of an idle agent.

The agent has moved a batch before, and a worker stays connected. Memory is the process's memory beyond the
DRAM cache, including staging not borrowed from the cache. The comparison is an idle Python process with
numpy.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
from benchmarks.support.figure import Figure, Target

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.series import Measurement, Series

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

MB = 1e6
_CACHE_BYTES = 512 << 20
SAMPLES = 5
_IDLE = "import numpy, sys; print('ready', flush=True); sys.stdin.read()"


def run(conditions: Conditions) -> list[Figure]:
    """Measure processor time and resident memory."""
    plan = conditions.one_plan()
    sample_s = 0.2 if conditions.is_short else 3.0
    options = ("--dram", str(_CACHE_BYTES), "--capacity", str(plan.capacity_bytes))
    with running_fabric(conditions.new_directory(), *options) as fabric:
        work = suite.workload(plan, fabric.address)
        work.get_views(work.stored_chain())
        with subprocess.Popen(
            [sys.executable, "-c", _IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as idle:
            assert idle.stdout is not None
            idle.stdout.readline()
            processes = psutil.Process(fabric.pid), psutil.Process(idle.pid)
            samples = [_busy_percent(processes, sample_s) for _ in range(SAMPLES)]
            held = [process.memory_info().rss for process in processes]
        work.close()
    cpu = Measurement("cpu", _series(samples, 0), "idle Python", _series(samples, 1))
    rss = Measurement("rss", Series(((held[0] - _CACHE_BYTES) / MB,)), "idle Python", Series((held[1] / MB,)))
    return [
        Figure("S8", "idle agent, of a core", "%", cpu, Target(value_at_most=2.0)),
        Figure("S8", "idle agent, memory beyond its DRAM cache", "MB", rss, Target(value_at_most=200.0)),
    ]


def _busy_percent(processes: tuple[psutil.Process, psutil.Process], sample_s: float) -> list[float]:
    before = [sum(process.cpu_times()[:2]) for process in processes]
    started_s = time.perf_counter()
    time.sleep(sample_s)
    spent_s = time.perf_counter() - started_s
    after = [sum(process.cpu_times()[:2]) for process in processes]
    return [100 * (end - begin) / spent_s for begin, end in zip(before, after, strict=True)]


def _series(samples: list[list[float]], process: int) -> Series:
    return Series(tuple(sample[process] for sample in samples))
