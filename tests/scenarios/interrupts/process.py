"""A trial as a process of its own, beside a fabric: a worker that hangs must not take the suite along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.fabric.fabric_host import FabricProcess

TRANSPORTS = {"inline": "inline", "nixl": "nixl,inline"}

_SPARE_S = 60.0
"""For starting and ending, on a busy machine."""


def tried(
    directory: Path, *, transport: str, seed: int, seconds: float = 0.0, operations: int = 0
) -> tuple[bool, str]:
    """Do one trial; return whether all was well, and what it said.

    It lasts *seconds*, or *operations* rounds where these are given.
    """
    with FabricProcess(directory / "f", "--capacity", "256MiB", "--dram", "64MiB") as fabric:
        arguments = [fabric.address, TRANSPORTS[transport], str(seed), str(seconds), str(operations)]
        trial = subprocess.Popen(
            [sys.executable, "-m", "tests.scenarios.interrupts.trial", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        try:
            words, _ = trial.communicate(timeout=seconds + operations * 0.02 + _SPARE_S)
        except subprocess.TimeoutExpired:
            trial.kill()
            words, _ = trial.communicate()
            words += "\nhung, and was killed"
        return trial.returncode == 0, words.strip()
