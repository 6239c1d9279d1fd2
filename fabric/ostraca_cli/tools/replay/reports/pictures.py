"""Plots of a replay: hits by capacity, and hits by writes. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ostraca_cli.tools.replay.outcome import ReplayOutcome
from ostraca_cli.tools.replay.plan import OURS
from ostraca_cli.tools.replay.reports.statistics import TraceStatistics

_COLOURS = {
    OURS: "#0b6e99",
    "lru": "#c4622d",
    "s3-fifo": "#5b8c3a",
    "sieve": "#8a5fa8",
    "belady": "#777777",
}
_INCHES = (6.4, 4.0)
_LABELS_TICKS_MAX = 8


def draw(outcomes: Sequence[ReplayOutcome], statistics: TraceStatistics, directory: Path) -> None:
    """Write ``hits.svg`` and ``writes.svg``, with equal bytes for equal outcomes."""
    for name, fill in (("hits", _fill_hits), ("writes", _fill_writes)):
        with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}):
            picture = Figure(figsize=_INCHES, layout="constrained")
            axes = picture.add_subplot()
            fill(axes, outcomes, statistics)
            axes.spines[["top", "right"]].set_visible(False)
            picture.savefig(directory / f"{name}.svg", format="svg", metadata={"Date": None})


def _fill_hits(axes: Axes, outcomes: Sequence[ReplayOutcome], statistics: TraceStatistics) -> None:
    """Draw a line for each policy over capacities: hits in unbroken prefixes."""
    budget_styles = cycle(("--", "-.", ":"))
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.policy == policy]
        shares = [100 * outcome.capacity_blocks / statistics.unique_blocks for outcome in own]
        rates = [100 * outcome.prefix_hit_rate for outcome in own]
        base = policy.partition(",")[0]
        style = "-" if policy == base else next(budget_styles)
        weight = 2.2 if policy == OURS else 1.3
        axes.plot(shares, rates, style, marker=".", color=_COLOURS[base], linewidth=weight, label=policy)
    ticks = sorted({100 * outcome.capacity_blocks / statistics.unique_blocks for outcome in outcomes})
    axes.axhline(100 * statistics.reusable_prefix_share, color="#bbbbbb", linewidth=1, zorder=0)
    axes.annotate(
        "limit: blocks requested before",
        (ticks[0], 100 * statistics.reusable_prefix_share),
        xytext=(0, 3),
        textcoords="offset points",
        color="#777777",
    )
    axes.set_xscale("log")
    if len(ticks) <= _LABELS_TICKS_MAX:
        axes.set_xticks(ticks, [_two_digits(tick) for tick in ticks])
        axes.minorticks_off()
    axes.set_xlabel("capacity, % of the trace's unique blocks")
    axes.set_ylabel("blocks found in an unbroken prefix, %")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")


def _fill_writes(axes: Axes, outcomes: Sequence[ReplayOutcome], statistics: TraceStatistics) -> None:
    """Draw a point for each outcome, and a line through own outcomes of a capacity.

    The line runs from no budget to the smallest budget.
    """
    for capacity in dict.fromkeys(outcome.capacity_blocks for outcome in outcomes):
        own = [
            outcome
            for outcome in outcomes
            if outcome.capacity_blocks == capacity and outcome.policy.partition(",")[0] == OURS
        ]
        own.sort(key=lambda outcome: outcome.written.all_bytes)
        axes.plot(*_points(own), "-", color=_COLOURS[OURS], linewidth=1, alpha=0.5, zorder=1)
        if own:
            across, up = (values[-1] for values in _points(own))
            text = f"{_two_digits(100 * capacity / statistics.unique_blocks)} %"
            axes.annotate(text, (across, up), xytext=(5, 5), textcoords="offset points")
    for base, colour in _COLOURS.items():
        found = [outcome for outcome in outcomes if outcome.policy.partition(",")[0] == base]
        if found:
            axes.plot(*_points(found), "o", color=colour, markersize=4, label=base, zorder=2)
    axes.set_xlabel("bytes written, per byte of requested blocks, %")
    axes.set_ylabel("blocks found in an unbroken prefix, %")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower left")


def _two_digits(percent: float) -> str:
    """Write two significant digits, without an exponent."""
    return f"{float(f'{percent:.2g}'):g}"


def _points(outcomes: Sequence[ReplayOutcome]) -> tuple[list[float], list[float]]:
    asked = [outcome.blocks_requested * outcome.block_bytes for outcome in outcomes]
    written = [
        100 * outcome.written.all_bytes / asked_bytes
        for outcome, asked_bytes in zip(outcomes, asked, strict=True)
    ]
    return written, [100 * outcome.prefix_hit_rate for outcome in outcomes]
