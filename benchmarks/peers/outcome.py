"""Outcome of a run: seconds of each turn of each store; medians, ratios, tables and JSON of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.table import Column, Table

from ostraca_cli.tools.bench.series import GB, Series, spread

_US = 1e6


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation of all stores; the figure is a rate for a batch, else the time of one call."""

    name: str
    title: str
    batch_bytes: int = 0

    @property
    def unit(self) -> str:
        """Unit of the figure."""
        return "GB/s" if self.batch_bytes else "µs"

    def figure(self, spent_s: float) -> float:
        """Convert seconds to the unit."""
        return self.batch_bytes / GB / spent_s if self.batch_bytes else spent_s * _US


def operations(*, blocks: int, block_bytes: int, keys: int) -> tuple[Operation, ...]:
    """Return all operations, in the order of a round: a get follows the put of its blocks."""
    size = f"{block_bytes >> 20} MiB" if block_bytes >> 20 else f"{block_bytes >> 10} KiB"
    return (
        Operation("put_batch", f"put {blocks} × {size}", blocks * block_bytes),
        Operation("get_batch", f"get {blocks} × {size}", blocks * block_bytes),
        Operation("put_one", f"put 1 × {size}"),
        Operation("get_one", f"get 1 × {size}"),
        Operation("look_up", f"look-up of {keys} keys"),
    )


@dataclass(frozen=True, slots=True)
class StoreRun:
    """Measured store."""

    name: str
    label: str
    transport: str
    version: str
    is_ours: bool
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Median of each turn, by operation and round."""

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.label} {self.version}".strip()

    def median_of(self, operation: Operation) -> float:
        """Return the figure: the median over all rounds."""
        return operation.figure(median(self.seconds[operation.name]))

    def times_as_fast_as(self, other: StoreRun, operation: Operation) -> float:
        """Return the median over all rounds of the other's seconds divided by this store's."""
        pairs = zip(self.seconds[operation.name], other.seconds[operation.name], strict=True)
        return median(other_s / own_s for own_s, other_s in pairs)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run."""

    operations: tuple[Operation, ...]
    runs: tuple[StoreRun, ...]
    missing: dict[str, str] = field(default_factory=dict)
    """Reason for each store that did not start."""

    failures: dict[str, str] = field(default_factory=dict)
    """Reason for each store that failed later."""

    @property
    def pairs(self) -> list[tuple[StoreRun, StoreRun]]:
        """Our runs, each with each peer's."""
        ours = [run for run in self.runs if run.is_ours]
        return [(our, peer) for our in ours for peer in self.runs if not peer.is_ours]


def medians_table(outcome: Outcome, title: str) -> Table:
    """Return a table of medians, a row for each store."""
    columns = _columns([f"{each.title}\n{each.unit}" for each in outcome.operations])
    table = Table(
        "store", Column("transport", no_wrap=True), *columns, title=title, title_justify="left", box=None
    )
    for run in outcome.runs:
        figures = (figure_text(run.median_of(each)) for each in outcome.operations)
        table.add_row(run.title, run.transport, *figures)
    return table


def ratios_table(outcome: Outcome) -> Table:
    """Return a table of ratios, a row for each pair."""
    columns = _columns([each.title for each in outcome.operations])
    title = "Ostraca, times as fast as the peer"
    table = Table(
        "Ostraca over", "peer", "its transport", *columns, title=title, title_justify="left", box=None
    )
    for our, peer in outcome.pairs:
        ratios = (f"{our.times_as_fast_as(peer, each):.2f}" for each in outcome.operations)
        table.add_row(our.transport, peer.label, peer.transport, *ratios)
    return table


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Return figures, ratios and every turn's seconds, for JSON."""
    return {
        "operations": {each.name: {"title": each.title, "unit": each.unit} for each in outcome.operations},
        "stores": [_store(run, outcome.operations) for run in outcome.runs],
        "ratios": [
            {"ours": our.name, "peer": peer.name}
            | {each.name: round(our.times_as_fast_as(peer, each), 3) for each in outcome.operations}
            for our, peer in outcome.pairs
        ],
        "missing": outcome.missing,
        "failures": outcome.failures,
    }


def _store(run: StoreRun, operations: Sequence[Operation]) -> dict[str, Any]:
    figures = {
        each.name: spread(Series(tuple(map(each.figure, run.seconds[each.name])))) for each in operations
    }
    return {
        "name": run.name,
        "label": run.label,
        "transport": run.transport,
        "version": run.version,
        "figures": figures,
        "seconds": run.seconds,
    }


def _columns(names: Sequence[str]) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def figure_text(figure: float) -> str:
    """Write a figure for people."""
    return f"{figure:.2f}" if figure < 10 else f"{figure:,.0f}"
