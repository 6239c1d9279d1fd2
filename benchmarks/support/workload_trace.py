"""Workload of S6 and S7: a public trace if a copy lies beside the repository, else a generated trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ostraca_cli.tools.replay.generate import Recipe, generate
from ostraca_cli.tools.replay.trace import Trace, read_trace

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

PUBLIC = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_fast25" / "conversation_trace.jsonl"


def workload(conditions: Conditions) -> tuple[str, Trace]:
    """Return the trace and its name."""
    if conditions.is_short:
        return "made up", Trace.of(generate(Recipe(sessions=100)))
    if PUBLIC.exists():
        return "Mooncake's conversations", read_trace(PUBLIC)
    return "made up", Trace.of(generate(Recipe()))
