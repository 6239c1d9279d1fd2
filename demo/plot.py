"""Picture of the demo: waiting time of a question with, without and after a loss of flash.

The picture is a light card with a margin, for pages of any colour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch

from demo.messages import Question
from demo.results import DemoResults, middle, totals_s

INK, GREY, PALE = "#1f2933", "#616e7c", "#e4e7eb"
LOAD, COMPUTE, ANSWER = "#2b6cb0", "#b7562b", "#9aa5b1"
_LOOK: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture everywhere
    "svg.hashsalt": "ostraca",
    "text.color": INK,
}
_WIDTH_IN, _HEIGHT_IN = 8.96, 4.5
_BAR = 0.52
_FIGURE: dict[str, Any] = {
    "textcoords": "offset points",
    "va": "center_baseline",
    "fontsize": 11,
    "fontweight": "bold",
}
_DOT: dict[str, Any] = {"marker": "o", "ms": 3.6, "mfc": "white", "mec": INK, "mew": 0.8, "ls": ""}


@dataclass(frozen=True, slots=True)
class Bar:
    """Way to a first token: parts as (colour, seconds), and the waiting time of each question."""

    name: str
    note: str
    parts: tuple[tuple[str, float], ...]
    waits_s: tuple[float, ...]
    remark: str = ""

    @property
    def total_s(self) -> float:
        """Whole waiting time."""
        return sum(part_s for _, part_s in self.parts)


def draw(measured: DemoResults, pictures: Sequence[Path]) -> None:
    """Draw the picture and write these files, in the formats of their suffixes."""
    with mpl.rc_context(_LOOK):
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN))
        FigureCanvasAgg(figure)
        _card(figure)
        axes = figure.add_axes((0.285, 0.185, 0.60, 0.60))
        _bars(axes, _waits(measured))
        _words(figure, measured)
        for picture in pictures:
            picture.parent.mkdir(parents=True, exist_ok=True)
            # No date: the same measurements give the same file.
            metadata = {"Date": None, "Title": "Time to first token"} if picture.suffix == ".svg" else {}
            figure.savefig(picture, dpi=200, facecolor="none", metadata=metadata)


def _waits(measured: DemoResults) -> tuple[Bar, ...]:
    first_s = median_low(measured.recomputed.first_token_s)
    loaded, mended = middle(measured.loaded), middle(measured.mended)
    damaged = measured.damaged.questions[0]
    blocks = measured.ready.blocks
    return (
        Bar(
            "recomputed",
            "without Ostraca",
            ((COMPUTE, measured.recomputed.prefill_s), (ANSWER, first_s)),
            (),
        ),
        Bar(
            "loaded",
            "by a fresh process",
            _parts(loaded),
            totals_s(measured.loaded),
            _sooner(measured.ratio(measured.loaded)),
        ),
        Bar(
            "half of the flash destroyed",
            f"{measured.lost_blocks} of {blocks} blocks lost, recomputed",
            _parts(damaged),
            (),
        ),
        Bar(
            "asked again",
            "lost blocks were put back",
            _parts(mended),
            totals_s(measured.mended),
            _sooner(measured.ratio(measured.mended)),
        ),
    )


def _parts(question: Question) -> tuple[tuple[str, float], ...]:
    computed_s = question.recompute_s if question.recomputed else 0.0
    load_s = question.total_s - computed_s - question.first_token_s
    return ((LOAD, load_s), (COMPUTE, computed_s), (ANSWER, question.first_token_s))


def _bars(axes: Axes, bars: Sequence[Bar]) -> None:
    for row, bar in enumerate(bars):
        start_s = 0.0
        for colour, part_s in bar.parts:
            axes.barh(row, part_s, _BAR, left=start_s, color=colour, linewidth=0)
            start_s += part_s
        axes.plot(bar.waits_s, [row] * len(bar.waits_s), **_DOT, zorder=3)
        end_s = max(start_s, *bar.waits_s, 0)
        total = axes.annotate(f"{bar.total_s:.2f} s", (end_s, row), (9, 0), **_FIGURE)
        axes.annotate(bar.remark, (1, row), (9, 0), xycoords=(total, "data"), color=LOAD, **_FIGURE)
        label: dict[str, Any] = {
            "xycoords": ("axes fraction", "data"),
            "textcoords": "offset points",
            "ha": "right",
        }
        axes.annotate(bar.name, (0, row), (-10, 2), fontsize=11, va="bottom", **label)
        axes.annotate(bar.note, (0, row), (-10, -2), fontsize=8.5, va="top", color=GREY, **label)
    axes.set_xlim(0, max(bar.total_s for bar in bars) * 1.02)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_yticks([])
    axes.tick_params(axis="x", colors=GREY, labelsize=9, length=0, pad=5)
    axes.xaxis.set_major_formatter("{x:g} s")
    axes.grid(axis="x", color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(INK)


def _words(figure: Figure, measured: DemoResults) -> None:
    ready = measured.ready
    title = f"Time to first token over a document of {measured.tokens:,} tokens"
    figure.text(0.03, 0.915, title, fontsize=14, fontweight="bold")
    _legend(figure)
    way = {"nixl": "through NIXL", "inline": "inline"}[ready.transport]
    figure.text(
        0.03,
        0.04,
        f"Llama of {ready.parameters / 1e6:.0f} M parameters on {ready.threads} CPU threads; "
        f"{measured.document_bytes / 1e6:.0f} MB of KV cache in {ready.blocks} blocks, {way}, "
        "from drives that are files.\nEvery answer equals the recomputed one, bit for bit.",
        fontsize=8.5,
        color=GREY,
        linespacing=1.45,
    )


def _legend(figure: Figure) -> None:
    """Name the colours, from left to right."""
    row = figure.add_axes((0.03, 0.825, 0.94, 0.06))
    row.set_axis_off()
    square = {"marker": "s", "ms": 8, "mew": 0, "ls": ""}
    signs = (
        ({**square, "color": LOAD}, "load"),
        ({**square, "color": COMPUTE}, "recompute"),
        ({**square, "color": ANSWER}, "first token of the answer"),
        (_DOT, "each question"),
    )
    handles = [Line2D([], [], **look) for look, _ in signs]
    row.legend(
        handles,
        [word for _, word in signs],
        loc="center left",
        ncols=len(signs),
        frameon=False,
        fontsize=10,
        borderpad=0,
        borderaxespad=0,
        handlelength=0.8,
        handletextpad=0.6,
        columnspacing=2,
    )


def _sooner(ratio: float) -> str:
    return f"{ratio:.1f}× sooner" if ratio >= 1 else f"{1 / ratio:.1f}× later"


def _card(figure: Figure) -> None:
    figure.add_artist(
        FancyBboxPatch(
            (0, 0),
            1,
            1,
            boxstyle="round,pad=0,rounding_size=0.018",
            mutation_aspect=_WIDTH_IN / _HEIGHT_IN,
            facecolor="white",
            edgecolor="none",
            transform=figure.transFigure,
            zorder=-1,
        )
    )
