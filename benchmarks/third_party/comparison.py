"""Runs of another project's benchmark with several stores, in turns, and their table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Score = TypeVar("_Score", bound="DataclassInstance")


def add_options(parser: argparse.ArgumentParser, *, runs: int, capacity: str) -> None:
    """Add the options of every comparison, with the defaults of this one."""
    parser.add_argument("--runs", type=int, default=runs, help="of each store (default: %(default)s)")
    parser.add_argument("--capacity", default=capacity, help="of the fabric's flash (default: %(default)s)")
    parser.add_argument("--dram", default="0", help="of the fabric's cache (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="for files and drives (default: the system's)")
    parser.add_argument("--json", type=Path, help="write every score there")


def check_source(source: Path, member: str, *, url: str, commit: str) -> None:
    """Raise UsageError for a folder without the file *member*, and warn of another commit than *commit*."""
    if not (source / member).is_file():
        raise UsageError(
            f"{source} has no {member}: clone {url}, check {commit} out, and give the clone as --source"
        )
    told = subprocess.run(
        ["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if told.stdout.strip() != commit:
        print(f"the checkout is {told.stdout.strip() or 'no commit'}, not {commit}", file=sys.stderr)


def compare(
    stores: Mapping[str, Callable[[Path, int], _Score]], options: argparse.Namespace
) -> dict[str, list[_Score]]:
    """Measure the stores in turns.

    Each measurement gets an empty folder and the number of the run, from 0 on.
    """
    scores: dict[str, list[_Score]] = {store: [] for store in stores}
    for run in range(options.runs):
        for store, measure in stores.items():
            with tempfile.TemporaryDirectory(dir=options.directory) as folder:
                scores[store].append(measure(Path(folder), run))
        print(f"run {run + 1} of {options.runs}", file=sys.stderr)
    return scores


def table(scores: Mapping[str, Sequence[DataclassInstance]]) -> str:
    """Format the medians, and the median ratios of the last store to each of the others."""
    *peers, ours = scores.values()
    names = [field.name for field in dataclasses.fields(ours[0])]
    rows = [["", *names]]
    for store, each in scores.items():
        rows.append([store, *(f"{median(getattr(score, name) for score in each):.4g}" for name in names)])
    for store, theirs in zip(scores, peers, strict=False):
        ratios = [
            median(
                getattr(our, name) / max(getattr(their, name), 1e-9)
                for our, their in zip(ours, theirs, strict=True)
            )
            for name in names
        ]
        rows.append([f"ratio to {store}", *(f"{ratio:.2f}" for ratio in ratios)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def report(scores: Mapping[str, Sequence[DataclassInstance]], options: argparse.Namespace) -> None:
    """Print the table, and write every score as JSON if wanted."""
    print(table(scores))
    if options.json:
        listed = {store: [dataclasses.asdict(score) for score in each] for store, each in scores.items()}
        options.json.write_text(json.dumps(listed, indent=2) + "\n")
