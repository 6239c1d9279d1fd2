"""D2f: D2 on flash as fast as memory: a loop device over a file in memory, O_DIRECT."""

from __future__ import annotations

import secrets
import sys
from typing import TYPE_CHECKING

from benchmarks import d2
from benchmarks.conditions import batch_text
from benchmarks.fast_flash import fast_directory, why_not
from benchmarks.figure import Figure, Target

if TYPE_CHECKING:
    from benchmarks.conditions import Conditions
    from ostraca.cli.bench.suite import Plan


def run(conditions: Conditions) -> list[Figure]:
    """Measure where such a device can be made; elsewhere say why not, and give no figure."""
    reason = why_not()
    if reason:
        print(f"d2f is left out: {reason}", file=sys.stderr)
        return []
    return [_figure(plan, conditions) for plan in conditions.plans()]


def _figure(plan: Plan, conditions: Conditions) -> Figure:
    name = f"ostraca-{secrets.token_hex(4)}"
    with fast_directory(name, size_bytes=plan.capacity_bytes + plan.flash_bytes) as directory:
        finding = d2.found(plan, directory, has_fio=not conditions.is_short)
    what = f"get {batch_text(plan)} from fast flash, views"
    return Figure("D2f", what, "GB/s", finding, Target(ratio_at_least=0.65))
