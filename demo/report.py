"""Results of the demo as tables for a terminal."""

from statistics import median_low

from rich import box
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from demo.messages import AnswersReport
from demo.results import DemoResults, totals_s

_MEANING = """\
The time to first token runs from a question to the first token of its answer, in a process with a warm model
and an empty KV cache. Loaded: naming the pages, lookup, get ("load"), and computing the question itself; the
first Q1 also pays for memory that worker and agent touch for the first time. Recomputed: the document,
computed once in the same process, and the question itself.
"""


def tables(measured: DemoResults) -> Group:
    """Return tables of all results, with the meaning of the times."""
    return Group(_loaded(measured), _damaged(measured), Text(" ".join(_MEANING.split()), style="dim"))


def _loaded(measured: DemoResults) -> Table:
    table = Table(
        "",
        *_right("tokens", "bytes", "recomputed", "loaded", "ratio", "load", "load GB/s"),
        title="Time to first token",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    loaded = measured.loaded
    rows = list(
        zip(
            measured.recomputed_s,
            totals_s(loaded),
            measured.ratios(loaded),
            [question.load_s for question in loaded.questions],
            measured.load_gbps(loaded),
            strict=True,
        )
    )
    middle = [median_low(column) for column in zip(*rows, strict=True)]
    middle[2] = measured.ratio(loaded)
    names = [f"Q{number}" for number in range(1, len(rows) + 1)]
    for name, row in zip([*names, "median"], [*rows, middle], strict=True):
        recomputed_s, loaded_s, ratio, load_s, gbps = row
        table.add_row(
            name,
            f"{measured.tokens:,}",
            f"{measured.document_bytes / 1e6:,.0f} MB",
            seconds(recomputed_s),
            seconds(loaded_s),
            f"{ratio:.1f}×",
            seconds(load_s),
            f"{gbps:.2f}",
            style="bold" if name == "median" else None,
            end_section=name == names[-1],
        )
    return table


def _damaged(measured: DemoResults) -> Table:
    table = Table(
        "",
        *_right("listed", "loaded", "recomputed", "put back", "first token", "ratio"),
        title="Blocks, and first tokens, after half of the flash was destroyed",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    _add_rows(table, measured, measured.damaged)
    table.add_section()
    _add_rows(table, measured, measured.mended)
    return table


def _add_rows(table: Table, measured: DemoResults, asked: AnswersReport) -> None:
    pairs = zip(asked.questions, measured.ratios(asked), strict=True)
    for number, (question, ratio) in enumerate(pairs, 1):
        table.add_row(
            f"Q{number}",
            str(question.listed),
            str(question.loaded),
            str(question.recomputed),
            str(question.put_back),
            seconds(question.total_s),
            f"{ratio:.1f}×",
        )


def seconds(time_s: float) -> str:
    """Write a time for people, in about three digits."""
    return f"{time_s * 1e3:.0f} ms" if time_s < 1 else f"{time_s:.2f} s"


def _right(*names: str) -> tuple[Column, ...]:
    """Return columns of numbers."""
    return tuple(Column(name, justify="right") for name in names)
