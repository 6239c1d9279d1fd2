"""Picture of an outcome: a panel for each operation, a bar for each store, its transport beside the bar."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.peers.outcome import Operation, Outcome, figure_text
from benchmarks.support.plot import LIMITS, OURS

_ROOM = 1.75
"""Width of a panel, in lengths of the longest bar: the transport stands behind the bar."""


def draw(outcome: Outcome, path: Path) -> None:
    """Write an SVG, with equal bytes for equal values."""
    batches = [each for each in outcome.operations if each.batch_bytes]
    calls = [each for each in outcome.operations if not each.batch_bytes]
    with mpl.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.size": 8}):
        canvas = plt.figure(figsize=(10, 1.2 + 0.5 * len(outcome.runs)), layout="constrained")
        for row, listed in zip(canvas.subfigures(2, 1, squeeze=False), (batches, calls), strict=True):
            panels = row[0].subplots(1, len(listed), sharey=True, squeeze=False)
            for panel, operation in zip(panels[0], listed, strict=True):
                _panel(panel, operation, outcome)
        canvas.savefig(path, format="svg", metadata={"Date": None})
        plt.close(canvas)


def _panel(panel: Axes, operation: Operation, outcome: Outcome) -> None:
    figures = [run.median_of(operation) for run in outcome.runs]
    places = range(len(figures))
    bars = panel.barh(places, figures, color=[OURS if run.is_ours else LIMITS for run in outcome.runs])
    texts = [
        f"{figure_text(figure)} · {run.transport}" for figure, run in zip(figures, outcome.runs, strict=True)
    ]
    panel.bar_label(bars, texts, padding=3, fontsize="small")
    panel.set_yticks(places, [run.title for run in outcome.runs])
    panel.set_ylim(len(figures) - 0.5, -0.5)
    panel.set_xlim(0, _ROOM * max(figures))
    better = "more" if operation.batch_bytes else "less"
    panel.set_title(f"{operation.title}, {operation.unit} ({better} is better)", fontsize="medium")
    panel.set_xticks([])
    panel.spines[["top", "right", "bottom"]].set_visible(False)
