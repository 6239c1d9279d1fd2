"""S9: how long a worker waits for the SDK to be imported, and for the client, beside numpy.

Each time in a fresh process. Fails when the import loads any of what an inference engine must not be made
to load.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.figure import Figure, Target
from ostraca.cli.bench.series import Case, measure
from ostraca.cli.bench.workload import MeasureError

if TYPE_CHECKING:
    from benchmarks.conditions import Conditions

UNWANTED = ("torch", "fastapi", "uvicorn", "grpc", "rich", "uvloop", "nixl_cu12", "nixl_cu13", "nixl")
_TIMED = (
    "import sys, time; began = time.perf_counter(); {work}; print(time.perf_counter() - began, *sys.modules)"
)


def run(conditions: Conditions) -> list[Figure]:
    """Measure both imports in turns."""
    case = Case(
        "import",
        lambda: _seconds("import ostraca; ostraca.connect; ostraca.Volume"),
        "import numpy",
        lambda: _seconds("import numpy"),
    )
    found = measure(case, conditions.pace)
    return [Figure("S9", "import ostraca and its client", "s", found, Target(value_at_most=0.3))]


def _seconds(work: str) -> float:
    command = [sys.executable, "-c", _TIMED.format(work=work)]
    seconds, *modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    unwanted = set(UNWANTED) & set(modules)
    if unwanted:
        raise MeasureError(f"importing the SDK loads {', '.join(sorted(unwanted))}")
    return float(seconds)
