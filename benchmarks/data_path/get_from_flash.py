"""D2: gets from flash into arena views, without a DRAM cache, beside the best O_DIRECT read there.

The best read is the faster of two. The first is preadv into huge pages, with the fastest numbers of threads
and piece sizes, measured in turns with the gets. The second is a single run of fio, if installed.

A worker that reads drives itself is measured as well, also into rows of a region, with the processor time of
its agent.

Gets of one batch at a time are measured in both modes of the flash I/O engine, and gets of several batches
under way in the first.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target
from benchmarks.support.operations import RegionWork, get_views_ahead

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.series import GB, Comparison, Measurement, Series, measure
from ostraca_cli.tools.bench.workload import MeasureError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.limits import DirectFile
    from ostraca_cli.tools.bench.suite import BenchPlan
    from ostraca_cli.tools.bench.workload import Workload
    from ostraca_fabric.model.chain import Chain


AHEAD = 4
_BATCHES = 2 * suite.FLASH_BATCHES
"""Batches in a turn with several under way: enough to reduce the weight of the first and the last."""

_CPU_ROUNDS = 5
_CPU_BATCHES = 50
"""Batches between two readings of processor times."""

_THREADS = ("--set", "flash_io.io_uring=false")


def run(conditions: Conditions) -> list[Figure]:
    """Measure gets over more batches than any cache below the drives can hold."""
    return [figure for plan in conditions.plans() for figure in _figures(plan, conditions)]


def _figures(plan: BenchPlan, conditions: Conditions) -> list[Figure]:
    what, has_fio = f"get {batch_text(plan)} from flash, views", not conditions.is_short
    one, some = Target(ratio_at_least=0.80), Target(ratio_at_least=0.90)
    found = [
        (what, measure_gets(plan, conditions.new_directory(), has_fio=has_fio), one),
        (
            f"{what}, without io_uring",
            measure_gets(plan, conditions.new_directory(), has_fio=has_fio, options=_THREADS),
            one,
        ),
        (
            f"{what}, {AHEAD} batches under way",
            measure_gets(plan, conditions.new_directory(), has_fio=has_fio, is_ahead=True),
            some,
        ),
    ]
    figures = [Figure("D2", name, "GB/s", finding, target) for name, finding, target in found]
    return [*figures, *_direct_figures(plan, conditions)]


def _direct_figures(plan: BenchPlan, conditions: Conditions) -> list[Figure]:
    """Measure a worker that reads drives itself, and the processor time of its agent."""
    what = f"get {batch_text(plan)} from flash, read by the worker"
    directory = conditions.new_directory()
    with (
        suite.own_workload(plan, directory, dram_bytes=0, batches=AHEAD + 1, is_direct=True) as work,
        suite.direct_file(plan, directory) as file,
    ):
        chains = itertools.cycle([work.stored_chain() for _ in range(suite.FLASH_BATCHES)])
        file.tune_reads()
        case = Comparison("flash", lambda: work.get_views(next(chains)), "O_DIRECT read", file.read)
        finding = measure(case, plan.pace)
        several = measure(_ahead(work, chains, file), plan.pace)
        with RegionWork(work, may_withhold=True) as region:
            into = Comparison("flash", lambda: region.get(next(chains)), "O_DIRECT read", file.read)
            in_rows = measure(into, plan.pace)
        spent_ms = [_agent_ms(work, chains) for _ in range(2 if conditions.is_short else _CPU_ROUNDS)]
        _check_direct(work)
    batch_ms = 1e3 * plan.batch_bytes / GB / finding.limit.median
    reading = Series((batch_ms,) * len(spent_ms))
    spent = Measurement("agent", Series(tuple(spent_ms)), "reading a batch", reading)
    return [
        Figure("D2", what, "GB/s", finding, Target(ratio_at_least=0.95)),
        Figure("D2", f"{what}, {AHEAD} batches under way", "GB/s", several, Target(ratio_at_least=0.95)),
        Figure("D2", f"{what} into a region", "GB/s", in_rows, Target(ratio_at_least=0.95)),
        Figure("D2", f"agent's processor time, {what}", "ms", spent, Target(value_at_most=1.0)),
    ]


def _check_direct(work: Workload) -> None:
    """Raise MeasureError unless the worker read all blocks itself."""
    counters = work.client.status().counters
    by_agent = counters.get_hits - counters.get_hits_direct
    if by_agent:
        raise MeasureError(f"the agent delivered {by_agent} blocks itself")


def _agent_ms(work: Workload, chains: Iterator[Chain]) -> float:
    """Return the agent's processor time for a batch, beyond its background work in the same time."""
    clock = (~work.agent_pid << 3) | 2  # of the whole process: clock_getcpuclockid(3)
    before_s, before_ns = time.monotonic(), time.clock_gettime_ns(clock)
    for _ in range(_CPU_BATCHES):
        work.get_views(next(chains))
    took_s, spent_ns = time.monotonic() - before_s, time.clock_gettime_ns(clock) - before_ns
    time.sleep(took_s)  # as long again, without gets
    idle_ns = time.clock_gettime_ns(clock) - before_ns - spent_ns
    return (spent_ns - idle_ns) / 1e6 / _CPU_BATCHES


def measure_gets(
    plan: BenchPlan,
    directory: Path,
    *,
    has_fio: bool,
    is_ahead: bool = False,
    is_direct: bool = False,
    options: Sequence[str] = (),
) -> Measurement:
    """Measure gets from drives in *directory* beside the best read of a file there.

    With *is_ahead*, ``AHEAD`` batches are under way. With *is_direct*, the worker reads drives itself.
    *options* are those of the fabric.
    """
    batches = AHEAD + 1 if is_ahead else 2
    with (
        suite.own_workload(
            plan, directory, dram_bytes=0, batches=batches, is_direct=is_direct, options=options
        ) as work,
        suite.direct_file(plan, directory) as file,
    ):
        chains = itertools.cycle([work.stored_chain() for _ in range(suite.FLASH_BATCHES)])
        file.tune_reads()
        case = Comparison("flash", lambda: work.get_views(next(chains)), "O_DIRECT read", file.read)
        finding = measure(_ahead(work, chains, file) if is_ahead else case, plan.pace)
        if is_direct:
            _check_direct(work)
        if shutil.which("fio") and has_fio:
            finding = _beside_the_better(finding, fio_gb_per_s(file.path, seconds=plan.pace.seconds))
    return finding


def _ahead(work: Workload, chains: Iterator[Chain], file: DirectFile) -> Comparison:
    """Return gets of several batches under way, beside reads of as many one after another."""
    return Comparison(
        "flash",
        lambda: get_views_ahead(work, chains, batches=_BATCHES, ahead=AHEAD),
        "O_DIRECT read",
        lambda: _BATCHES / sum(1 / file.read() for _ in range(_BATCHES)),
    )


def fio_gb_per_s(path: Path, *, seconds: float) -> float:
    """Return the rate at which fio reads a file with O_DIRECT."""
    options = {
        "name": "best",
        "filename": str(path),
        "rw": "read",
        "bs": "4m",
        "iodepth": "8",
        "ioengine": "libaio",
        "direct": "1",
        "iomem": "mmap",
        "time_based": "1",
        "runtime": f"{seconds:.0f}",
        "output-format": "json",
    }
    command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(json.loads(said)["jobs"][0]["read"]["bw_bytes"]) / GB


def _beside_the_better(found: Measurement, fio: float) -> Measurement:
    if fio <= found.limit.median:
        return found
    limit = Series(tuple(max(value, fio) for value in found.limit.values))
    return Measurement(found.name, found.measured, "O_DIRECT read (fio)", limit)
