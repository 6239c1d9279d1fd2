"""D2: gets from flash into arena views, without a DRAM cache, beside the best O_DIRECT read there.

The best read is the faster of two. The first is preadv into huge pages, with the fastest numbers of threads
and piece sizes, measured in turns with the gets. The second is a single run of fio, if installed.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from typing import TYPE_CHECKING

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.series import GB, Comparison, Measurement, Series, measure

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.suite import BenchPlan


def run(conditions: Conditions) -> list[Figure]:
    """Measure gets over more batches than any cache below the drives can hold."""
    return [
        Figure(
            "D2",
            f"get {batch_text(plan)} from flash, views",
            "GB/s",
            measure_gets(plan, conditions.new_directory(), has_fio=not conditions.is_short),
            Target(ratio_at_least=0.95),
        )
        for plan in conditions.plans()
    ]


def measure_gets(plan: BenchPlan, directory: Path, *, has_fio: bool) -> Measurement:
    """Measure gets from drives in *directory* beside the best read of a file there."""
    with (
        suite.own_workload(plan, directory, dram_bytes=0) as work,
        suite.direct_file(plan, directory) as file,
    ):
        chains = itertools.cycle([work.stored_chain() for _ in range(suite.FLASH_BATCHES)])
        file.tune_reads()
        case = Comparison("flash", lambda: work.get_views(next(chains)), "O_DIRECT read", file.read)
        finding = measure(case, plan.pace)
        if shutil.which("fio") and has_fio:
            finding = _beside_the_better(finding, fio_gb_per_s(file.path, seconds=plan.pace.seconds))
    return finding


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
