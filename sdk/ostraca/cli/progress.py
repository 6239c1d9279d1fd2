"""Bars for what takes a while, on stderr. Needs rich where they are shown."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(*, is_shown: bool) -> Iterator[Callable[[str, float], None]]:
    """Show a bar for each thing named, as far as it was told to be done, 0 to 1."""
    if not is_shown:
        yield lambda _what, _part: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown:
        bars: dict[str, object] = {}

        def show(what: str, part: float) -> None:
            task = bars.setdefault(what, None)
            if task is None:
                task = bars[what] = shown.add_task(what, total=1.0)
            shown.update(task, completed=part)  # type: ignore[arg-type]  # rich's TaskID, without importing it

        yield show
