"""Run scripts, print a table, keep JSON and plots."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

from benchmarks.support.conditions import Conditions
from benchmarks.support.plot import draw
from ostraca_cli.tools.bench.series import machine
from ostraca_fabric.errors import OstracaError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from benchmarks.support.figure import Figure

_FOLDERS = {
    "get_from_dram": "data_path",
    "get_from_flash": "data_path",
    "get_from_fast_flash": "data_path",
    "put_staged": "data_path",
    "put_committed": "data_path",
    "lookup": "data_path",
    "small_get": "data_path",
    "processor_time": "data_path",
    "event_loop_time": "data_path",
    "many_workers": "fabric",
    "busy_process": "fabric",
    "long_chain": "data_path",
    "tag_checks": "data_path",
    "get_over_tcp": "data_path",
    "get_inline": "data_path",
    "full_fabric": "data_path",
    "agent_failure": "fabric",
    "index_memory": "shards",
    "index_lookup": "shards",
    "shard_recovery": "shards",
    "placement": "fabric",
    "shard_takeover_time": "fabric",
    "write_amplification": "shards",
    "hit_rate": "shards",
    "idle_agent": "fabric",
    "garbage_collections": "fabric",
    "import_time": "fabric",
    "many_drives": "fabric",
}
"""Folder of each script."""

NAMES = tuple(_FOLDERS)
TABLE_WIDTH = 140
RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run scripts, print a table, write JSON and plots; return the exit code.

    A failed script does not affect the results of other scripts.
    """
    options = _options(argv)
    out: Path | None = options.out or (None if options.short else RESULTS)
    figures: dict[str, list[Figure]] = {}
    names = options.names or NAMES
    for name in names:
        print(f"{name}: {_summary(name)}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="ostraca-bench-", dir=options.dir) as directory:
            conditions = Conditions(Path(directory), is_short=options.short)
            try:
                figures[name] = _script(name).run(conditions)
            except (OstracaError, OSError) as error:
                print(f"{name} failed: {error}", file=sys.stderr, flush=True)
    everything = [figure for found in figures.values() for figure in found]
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width that the table should be squeezed into
        console = Console(width=TABLE_WIDTH)
    console.print(_table(everything, is_short=options.short))
    if out is not None:
        _write(figures, out)
    return 0 if len(figures) == len(names) else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure Ostraca beside limits."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--short", action="store_true", help="only show that everything runs")
    parser.add_argument("--out", type=Path, help="where JSON and plots go (default: benchmarks/results)")
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure (default: temporary)")
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}: name any of {', '.join(NAMES)}")
    return options


def _script(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{_FOLDERS[name]}.{name}")


def _summary(name: str) -> str:
    """Return the first sentence of a script's docstring, without the row's name."""
    words = (_script(name).__doc__ or "").partition("\n")[0]
    return words.partition(": ")[2]


def _table(figures: Sequence[Figure], *, is_short: bool) -> Table:
    right = [Column(name, justify="right") for name in ("figure", "beside", "ratio", "target")]
    title = "A short run: these figures mean nothing" if is_short else "Figures of this run"
    table = Table(
        "row", "quantity", *right[:1], "limit", *right[1:], "", title=title, title_justify="left", box=None
    )
    for figure in figures:
        verdict = "" if is_short else "met" if figure.is_met else "missed"
        table.add_row(
            figure.row,
            figure.name,
            f"{figure.value:.3g} {figure.unit}",
            figure.finding.limit_name,
            f"{figure.limit:.3g} {figure.unit}",
            f"{figure.ratio:.2f}" if math.isfinite(figure.ratio) else "–",
            figure.target.text(figure.unit),
            verdict,
        )
    return table


def _write(figures: dict[str, list[Figure]], out: Path) -> None:
    """Write every value and a plot for each script, and a summary of this run."""
    out.mkdir(parents=True, exist_ok=True)
    for name, found in figures.items():
        values = [figure.with_values() for figure in found]
        (out / f"{name}.json").write_text(json.dumps(values) + "\n")
        draw(found, out / f"{name}.svg")
    rows = [figure.summary() for found in figures.values() for figure in found]
    (out / "results.json").write_text(json.dumps({"machine": machine(), "figures": rows}, indent=1) + "\n")
