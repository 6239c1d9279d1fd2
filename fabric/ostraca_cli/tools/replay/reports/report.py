"""Results of a replay: tables, JSON and plots."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ostraca_cli.terminal.tables import right, table
from ostraca_cli.terminal.units import size_text
from ostraca_cli.tools.replay.loss import Loss
from ostraca_cli.tools.replay.outcome import ReplayOutcome
from ostraca_cli.tools.replay.plan import ReplayPlan
from ostraca_cli.tools.replay.reports.statistics import TraceStatistics
from ostraca_fabric.policies.endurance import DAYS_OF_YEAR, YEARS_MAX

_LEAST_WIDTH = 140
_WHOLE_FROM = 100


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """All results of a replay."""

    plan: ReplayPlan
    statistics: TraceStatistics
    outcomes: Sequence[ReplayOutcome]
    losses: Sequence[Loss]

    def as_json(self) -> str:
        """Return all results as JSON."""
        conditions = asdict(self.plan)
        found = [outcome.as_dict() for outcome in self.outcomes]
        everything = {
            "trace": asdict(self.statistics),
            "conditions": conditions,
            "outcomes": found,
            "losses": [asdict(loss) for loss in self.losses],
        }
        return json.dumps(everything, indent=2)

    def print(self) -> None:
        """Print tables."""
        console = Console()
        if not console.is_terminal:  # a file or a pipe has no width, so tables stay whole
            console = Console(width=_LEAST_WIDTH)
        console.print(_statistics_text(self.statistics), highlight=False)
        console.print(_outcomes_table(self.outcomes, self.statistics))
        if self.losses:
            console.print(
                f"\nHits lost in the second half, after the failure of 1 of {self.losses[0].enclosures} "
                "enclosures half-way: unbroken prefixes / all blocks"
            )
            console.print(_losses_table(self.losses))

    def write(self, directory: Path) -> None:
        """Write ``outcomes.json``, and plots if matplotlib is installed."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "outcomes.json").write_text(self.as_json() + "\n")
        if find_spec("matplotlib") is None:
            sys.stderr.write(
                "ostraca: no pictures without matplotlib: install it with: pip install matplotlib\n"
            )
            return
        try:
            from ostraca_cli.tools.replay.reports.pictures import draw
        except ImportError as error:
            sys.stderr.write(f"ostraca: no pictures, as matplotlib can't be loaded: {error}\n")
            return
        draw(self.outcomes, self.statistics, directory)


def _statistics_text(found: TraceStatistics) -> str:
    return (
        f"{found.requests:,} requests in {found.span_s:,.0f} s ({found.requests_per_s:.2f} per "
        f"second); mean {found.input_tokens_mean:,.0f} tokens in and {found.output_tokens_mean:,.0f} "
        f"out\n{found.blocks:,} blocks requested, {found.unique_blocks:,} distinct; blocks per request: "
        f"mean {found.blocks_per_request_mean:.1f}, p99 {found.blocks_per_request_p99:.0f}, maximum "
        f"{found.blocks_per_request_max}\n{found.reusable_share:.1%} were requested before ("
        f"{found.reusable_prefix_share:.1%} within unbroken prefixes), 50 % within "
        f"{found.reuse_gap_s_p50:,.0f} s and 90 % within {found.reuse_gap_s_p90:,.0f} s; "
        f"{found.requested_once_share:.1%} are requested only once\n"
    )


def _outcomes_table(outcomes: Sequence[ReplayOutcome], statistics: TraceStatistics) -> Table:
    names = (
        "hits",
        "prefix hits",
        "blocks written",
        "bytes written",
        "per new byte",
        "writes a day",
        "flash lasts",
    )
    shown = table((), "policy", *right(*names))
    before = None
    for outcome in outcomes:
        if outcome.capacity_blocks != before:
            before = outcome.capacity_blocks
            share = before / statistics.unique_blocks
            shown.add_row(f"[bold]{size_text(outcome.capacity_bytes)}, {share:.1%} of all blocks", style=None)
        shown.add_row(
            f"  {outcome.policy}",
            f"{outcome.hit_rate:.3f}",
            f"{outcome.prefix_hit_rate:.3f}",
            f"{outcome.written.blocks:,}",
            size_text(outcome.written.all_bytes),
            f"{outcome.write_amplification:.3f}",
            _short(outcome.drive_writes_per_day),
            _lifetime(outcome.years_left),
        )
    return shown


def _losses_table(losses: Sequence[Loss]) -> Table:
    rows = (
        (
            *(f"{loss.unit_blocks} hash ids", f"{loss.load_max_over_mean:.2f}"),
            *(
                f"{share.prefix:.1%} / {share.tolerant:.1%}"
                for share in (loss.immediate_mean, loss.immediate_worst, loss.final)
            ),
        )
        for loss in losses
    )
    return table(rows, "stripe unit", *right("load max/mean", "immediate loss", "worst loss", "final loss"))


def _short(number: float) -> str:
    """Write three significant digits, without an exponent."""
    return f"{number:,.0f}" if number >= _WHOLE_FROM else f"{number:.3g}"


def _lifetime(years: float) -> str:
    if years >= YEARS_MAX:
        return f"> {YEARS_MAX:,.0f} years"
    return f"{_short(years)} years" if years >= 1 else f"{_short(years * DAYS_OF_YEAR)} days"
