"""Command: start the harness, print tables, keep JSON and a picture."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.peers import outcome
from benchmarks.peers.environments import CACHE, MOONCAKE, REDIS
from benchmarks.peers.harness import STORES, Plan, measure
from benchmarks.peers.picture import draw
from benchmarks.program import RESULTS, TABLE_WIDTH
from ostraca_cli.command import count_argument
from ostraca_cli.terminal.progress import progress
from ostraca_cli.tools.bench.series import machine


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the stores, print tables, write JSON and a picture; return the exit code.

    A peer that can't be installed or started is left out. A store that fails later makes the exit code 1.
    """
    options = _options(argv)
    out: Path | None = options.out or (None if options.short else RESULTS)
    names = [name for name in STORES if not options.names or STORES[name].is_ours or name in options.names]
    console = Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)
    with (
        tempfile.TemporaryDirectory(prefix="ostraca-peers-", dir=options.dir) as directory,
        progress(is_shown=True) as on_progress,
    ):
        plan = Plan.short() if options.short else Plan(options.rounds)
        found = measure(names, plan, Path(directory), options.cache.absolute(), on_progress)
    title = "A short run: these figures mean nothing" if options.short else "Medians of this run"
    if found.runs:
        console.print(outcome.medians_table(found, title), "", outcome.ratios_table(found))
    for name, reason in found.missing.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    for name, reason in found.failures.items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    if out is not None and found.runs:
        out.mkdir(parents=True, exist_ok=True)
        conditions = {"machine": machine(), "plan": asdict(plan), "packages": [*MOONCAKE, *REDIS]}
        values = conditions | outcome.as_dict(found)
        (out / "peers.json").write_text(json.dumps(values, indent=1) + "\n")
        draw(found, out / "peers.svg")
    return 1 if found.failures or not any(run.is_ours for run in found.runs) else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="Measure Ostraca beside other stores, in turns."
    )
    peers = ", ".join(name for name, store in STORES.items() if not store.is_ours)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"peers, any of {peers} (default: all); ours run always"
    )
    parser.add_argument("--short", action="store_true", help="only show that everything runs")
    parser.add_argument("--out", type=Path, help="where JSON and picture go (default: benchmarks/results)")
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure (default: temporary)")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="environments of the peers (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=count_argument, default=15, help="turns of each store (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(STORES)
    if unknown:
        parser.error(f"no store is called {', '.join(sorted(unknown))}: name any of {', '.join(STORES)}")
    return options
