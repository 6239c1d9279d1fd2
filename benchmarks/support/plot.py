"""Plot of every measured value of a script, with a panel for each figure."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.support.figure import Figure
    from matplotlib.axes import Axes

DOTS_MAX = 200
OURS, LIMITS = "#0b6e99", "#9a9a9a"
_PANEL_INCHES = (3.0, 3.2)
_COLUMNS_MAX = 5
_TITLE_CHARACTERS = 38


def draw(figures: Sequence[Figure], path: Path) -> None:
    """Write an SVG, with equal bytes for equal values."""
    width, height = _PANEL_INCHES
    with mpl.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.size": 8}):
        columns = min(len(figures), _COLUMNS_MAX)
        rows = math.ceil(len(figures) / columns)
        canvas, panels = plt.subplots(
            rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False
        )
        for panel, figure in zip(panels.flat, figures, strict=False):
            _panel(panel, figure)
        for panel in panels.flat[len(figures) :]:
            panel.set_visible(False)
        canvas.savefig(path, format="svg", metadata={"Date": None}, dpi=200)
        plt.close(canvas)


def _panel(panel: Axes, figure: Figure) -> None:
    """Draw each round's value as a dot, the figure and the limit's median as lines."""
    found = figure.finding
    columns = (
        (0, "Ostraca", found.measured.values, figure.value, OURS),
        (1, found.limit_name, found.limit.values, figure.limit, LIMITS),
    )
    for place, _, values, line, colour in columns:
        # Rounds from left to right within the column: drift of the machine shows as a slope of both.
        steps = max(1, len(values) - 1)
        across = [place - 0.3 + 0.6 * number / steps for number in range(len(values))]
        # So many dots would make megabytes of vectors; as pixels they are some kilobytes.
        is_many = len(values) > DOTS_MAX
        panel.plot(across, values, ".", color=colour, markersize=3, rasterized=is_many)
        panel.hlines(line, place - 0.35, place + 0.35, color=colour, linewidth=2)
    panel.set_xticks([0, 1], [name for _, name, *_ in columns])
    panel.set_xlim(-0.5, 1.5)
    panel.set_ylim(bottom=0)
    panel.set_ylabel(figure.unit)
    wanted = figure.target.text(figure.unit)
    is_ratio = figure.target.value_at_most is None
    of_limit = f"{figure.ratio:.2f} of the limit, " if is_ratio else ""
    name = textwrap.fill(figure.name, _TITLE_CHARACTERS)
    panel.set_title(f"{figure.row}\n{name}\n{of_limit}target {wanted}", fontsize="medium")
    panel.spines[["top", "right"]].set_visible(False)
