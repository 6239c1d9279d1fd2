"""Under which conditions everything is measured: to mean something, or only to run."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from ostraca.cli.bench.series import SHORT, Pace
from ostraca.cli.bench.suite import Plan

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Conditions:
    """How long to measure, and where fabrics and files may lie while it lasts."""

    directory: Path
    is_short: bool = False

    @property
    def pace(self) -> Pace:
        """How long one case is measured."""
        return SHORT if self.is_short else Pace(seconds=6.0, rounds_min=20, warm_ups=5)

    def plans(self) -> list[Plan]:
        """Return the batches that the data path is measured with."""
        if self.is_short:
            return [self._plan(8, 64 * KIB)]
        return [self._plan(64, MIB), self._plan(64, 2 * MIB)]

    def one_plan(self) -> Plan:
        """Return the batch for what is measured with one size alone."""
        return self.plans()[0]

    def new_directory(self) -> Path:
        """Return an empty directory on the disk that is measured."""
        return Path(tempfile.mkdtemp(dir=self.directory))

    def _plan(self, blocks: int, block_bytes: int) -> Plan:
        return Plan(blocks, block_bytes, self.pace, self.directory)


def batch_text(plan: Plan) -> str:
    """Name the batch in a figure."""
    size = f"{plan.block_bytes // MIB} MiB" if plan.block_bytes >= MIB else f"{plan.block_bytes // KIB} KiB"
    return f"{plan.blocks} × {size}"
