"""What was found, for people and for programs."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ostraca.cli.bench.series import Finding, Series


def as_table(findings: Sequence[Finding], title: str) -> Table:
    """Return medians in GB/s (1e9 bytes per second), and the ratio taken turn by turn. Needs rich."""
    from rich.table import Column, Table

    table = Table(
        "what",
        Column("GB/s", justify="right"),
        "limit on this machine",
        Column("GB/s", justify="right"),
        Column("ratio", justify="right"),
        title=title,
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for finding in findings:
        table.add_row(
            finding.what,
            f"{finding.measured.median:.2f}",
            finding.limit_name,
            f"{finding.limit.median:.2f}",
            f"{finding.ratio:.2f}",
        )
    return table


def as_json(findings: Sequence[Finding], **conditions: object) -> str:
    """Return medians, extremes and ratios, with the conditions they were found under."""
    listed = [
        {
            "what": finding.what,
            "gb_per_s": spread(finding.measured),
            "limit": finding.limit_name,
            "limit_gb_per_s": spread(finding.limit),
            "ratio": finding.ratio,
            "rounds": len(finding.measured.values),
        }
        for finding in findings
    ]
    return json.dumps({"machine": machine(), "conditions": conditions, "findings": listed}, indent=2)


def spread(series: Series) -> dict[str, float]:
    """Return the median and the extremes."""
    return {"median": series.median, "min": min(series.values), "max": max(series.values)}


def machine() -> dict[str, Any]:
    """Describe the machine as far as figures depend on it."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / (1 << 30), 1),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
