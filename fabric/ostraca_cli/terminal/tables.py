"""Tables for people; need rich."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Column, Table

_PIPE_COLUMNS = 10_000
"""Width without a terminal: lines stay whole for ``grep`` and ``cut``."""


def print_view(view: RenderableType) -> None:
    """Print a view, unwrapped if stdout is not a terminal."""
    Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False).print(view)


def table(
    rows: Iterable[Iterable[RenderableType]], *columns: str | Column, title: str | None = None
) -> Table:
    """Return a table without lines."""
    made = Table(
        *columns, title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
    )
    for row in rows:
        made.add_row(*row)
    return made


def right(*names: str) -> tuple[Column, ...]:
    """Return right-aligned columns, for numbers."""
    return tuple(map(number, names))


def number(name: str) -> Column:
    """Return a right-aligned column."""
    return Column(name, justify="right")


def folded(name: str) -> Column:
    """Return a column that wraps names, because truncated names would look alike."""
    return Column(name, overflow="fold")
