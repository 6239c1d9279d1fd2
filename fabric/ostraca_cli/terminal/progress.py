"""Progress bars on stderr; need rich while shown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(*, is_shown: bool) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar for each name, at the reported part from 0 to 1."""
    if not is_shown:
        yield lambda _name, _part: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown:
        bars: dict[str, object] = {}

        def show(name: str, part: float) -> None:
            task = bars.setdefault(name, None)
            if task is None:
                task = bars[name] = shown.add_task(name, total=1.0)
            shown.update(task, completed=part)  # type: ignore[arg-type]  # rich's TaskID, without importing it

        yield show
