"""D2f: D2 on flash as fast as memory: a loop device over a file in memory, O_DIRECT."""

from __future__ import annotations

import secrets
import sys
from typing import TYPE_CHECKING

from benchmarks.data_path import get_from_flash
from benchmarks.support.conditions import batch_text
from benchmarks.support.fast_flash import fast_directory, unavailable_reason
from benchmarks.support.figure import Figure, Target

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

    from ostraca_cli.tools.bench.suite import BenchPlan


def run(conditions: Conditions) -> list[Figure]:
    """Measure on a loop device; without such a device, print the reason and return no figure."""
    reason = unavailable_reason()
    if reason:
        print(f"d2f is left out: {reason}", file=sys.stderr)
        return []
    return [_figure(plan, conditions) for plan in conditions.plans()]


def _figure(plan: BenchPlan, conditions: Conditions) -> Figure:
    name = f"ostraca-{secrets.token_hex(4)}"
    with fast_directory(name, size_bytes=plan.capacity_bytes + plan.flash_bytes) as directory:
        finding = get_from_flash.measure_gets(plan, directory, has_fio=not conditions.is_short)
    what = f"get {batch_text(plan)} from fast flash, views"
    return Figure("D2f", what, "GB/s", finding, Target(ratio_at_least=0.55))
