"""D2f: D2 on flash as fast as memory: a loop device over a file in memory, O_DIRECT.

The agent delivers the blocks, or the worker reads the device itself.
"""

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
    return [
        _figure(plan, conditions, is_direct=is_direct)
        for plan in conditions.plans()
        for is_direct in (False, True)
    ]


def _figure(plan: BenchPlan, conditions: Conditions, *, is_direct: bool) -> Figure:
    name = f"ostraca-{secrets.token_hex(4)}"
    with fast_directory(name, size_bytes=plan.capacity_bytes + plan.flash_bytes) as directory:
        finding = get_from_flash.measure_gets(
            plan, directory, has_fio=not conditions.is_short, is_direct=is_direct
        )
    what = f"get {batch_text(plan)} from fast flash, {'read by the worker' if is_direct else 'views'}"
    return Figure("D2f", what, "GB/s", finding, Target(ratio_at_least=0.55))
