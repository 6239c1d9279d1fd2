"""S9: import time of the SDK in a worker, and of the client, beside numpy.

Each import runs in a fresh process. The script fails if the import loads any module forbidden in an inference
engine.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.support.figure import Figure, Target

from ostraca_cli.tools.bench.series import Comparison, measure
from ostraca_cli.tools.bench.workload import MeasureError

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

UNWANTED = ("torch", "fastapi", "uvicorn", "grpc", "rich", "uvloop", "nixl_cu12", "nixl_cu13", "nixl")
_TIMED = (
    "import sys, time; began = time.perf_counter(); {work}; print(time.perf_counter() - began, *sys.modules)"
)


def run(conditions: Conditions) -> list[Figure]:
    """Measure both imports in turns."""
    case = Comparison(
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
