"""Rows of the report: a measured value against a goal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice


class Verdict(Enum):
    """Result of one measure."""

    OK = "ok"
    OVER = "over"
    INFO = "info"
    """No goal exists."""
    ABSENT = "absent"
    """The machine lacks a tool of the measure."""

    FAILED = "failed"
    """The measure ended with an error."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report."""

    measure: str
    value: str
    goal: str
    verdict: Verdict
    offenders: tuple[str, ...] = ()
    """Places over the goal, the worst first."""


def limited(measure: str, value: float, most: float, offenders: Iterable[str] = (), *, note: str = "") -> Row:
    """Build the row of a value with an upper limit; *note* follows the value."""
    verdict = Verdict.OVER if value > most else Verdict.OK
    return Row(measure, number_text(value) + note, f"<= {number_text(most)}", verdict, tuple(offenders))


def informative(measure: str, value: str, offenders: Iterable[str] = ()) -> Row:
    """Build the row of a value without a goal."""
    return Row(measure, value, "", Verdict.INFO, tuple(offenders))


def number_text(value: float) -> str:
    """Format a count with separators, a fraction with two decimals."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def is_met(rows: Iterable[Row]) -> bool:
    """Return whether all measures succeeded within the goals."""
    return all(row.verdict not in (Verdict.OVER, Verdict.FAILED) for row in rows)


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Format rows as aligned columns below a heading."""
    cells = [("measure", "today", "goal", ""), *((r.measure, r.value, r.goal, r.verdict.value) for r in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        f"{measure:{widths[0]}}  {value:>{widths[1]}}  {goal:>{widths[2]}}  {verdict}".rstrip()
        for measure, value, goal, verdict in cells
    ]


def offender_lines(rows: Iterable[Row], *, most: int) -> list[str]:
    """List at most *most* offenders per row; skip rows within the goal."""
    lines: list[str] = []
    for row in rows:
        if most and row.offenders and row.verdict is not Verdict.OK:
            lines += ["", f"{row.measure}:", *(f"  {each}" for each in islice(row.offenders, most))]
            if len(row.offenders) > most:
                lines.append(f"  ... and {len(row.offenders) - most} more")
    return lines
