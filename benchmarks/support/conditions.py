"""Conditions of all measurements: for figures, or for a smoke test."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from ostraca_cli.tools.bench.series import SHORT, Pacing
from ostraca_cli.tools.bench.suite import BenchPlan

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Conditions:
    """Length of measurements, and place of fabrics and files."""

    directory: Path
    is_short: bool = False

    @property
    def pace(self) -> Pacing:
        """Length of a case."""
        return SHORT if self.is_short else Pacing(seconds=6.0, rounds_min=20, warm_ups=5)

    def plans(self) -> list[BenchPlan]:
        """Return the batches of the data path's measurements."""
        if self.is_short:
            return [self._plan(8, 64 * KIB)]
        return [self._plan(64, MIB), self._plan(64, 2 * MIB)]

    def one_plan(self) -> BenchPlan:
        """Return the batch of measurements with a single size."""
        return self.plans()[0]

    def new_directory(self) -> Path:
        """Return an empty directory on the measured disk."""
        return Path(tempfile.mkdtemp(dir=self.directory))

    def _plan(self, blocks: int, block_bytes: int) -> BenchPlan:
        return BenchPlan(blocks, block_bytes, self.pace, self.directory)


def batch_text(plan: BenchPlan) -> str:
    """Name the batch in a figure."""
    size = f"{plan.block_bytes // MIB} MiB" if plan.block_bytes >= MIB else f"{plan.block_bytes // KIB} KiB"
    return f"{plan.blocks} × {size}"
