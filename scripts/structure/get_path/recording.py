"""A recording of executed modules, shared by several processes through files in one folder.

A *window* is a numbered interval during which tracers record; window 0 means no recording. Each traced
process owns a memory-mapped table of windows and modules, so a killed process loses no record.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

WINDOWS_MAX = 63


class Recording:
    """Executed modules per window.

    Call ``create`` once, then ``Recording(folder)`` in each process.
    """

    def __init__(self, folder: Path) -> None:
        """Attach to the recording in *folder*."""
        self._folder = folder
        self._modules = (folder / "modules").read_text("utf-8").splitlines()
        self._window = _mapped(folder / "window", 1)

    @classmethod
    def create(cls, folder: Path, modules: Sequence[Path]) -> Self:
        """Create a recording of *modules*, given as absolute paths."""
        (folder / "modules").write_text("\n".join(map(str, modules)), "utf-8")
        return cls(folder)

    def open_window(self, number: int) -> None:
        """Record under *number*, 1 to ``WINDOWS_MAX``, until ``close_window``."""
        assert 0 < number <= WINDOWS_MAX
        self._window[0] = number

    def close_window(self) -> None:
        """Stop to record until the next ``open_window``."""
        self._window[0] = 0

    def trace(self) -> None:
        """Trace the calling thread and all later threads of this process.

        Call ``trace`` before other threads start: a loop entered untraced stays untraced.
        """
        window, count = self._window, len(self._modules)
        table = _mapped(self._folder / f"{os.getpid()}.table", (WINDOWS_MAX + 1) * count)

        def tracer_of(index: int) -> Callable[[FrameType, str, Any], object]:
            def on_event(_frame: FrameType, event: str, _argument: object) -> object:
                if event == "line" and (number := window[0]):
                    table[number * count + index] = 1
                return on_event

            return on_event

        tracers = {file: tracer_of(index) for index, file in enumerate(self._modules)}

        def on_call(frame: FrameType, _event: str, _argument: object) -> Any:  # noqa: ANN401 - as sys.settrace
            return tracers.get(frame.f_code.co_filename)

        threading.settrace(on_call)
        sys.settrace(on_call)

    def executed(self, window: int) -> frozenset[Path]:
        """Return the modules with an executed line in *window*, in any process."""
        begin, count = window * len(self._modules), len(self._modules)
        rows = [path.read_bytes()[begin : begin + count] for path in self._folder.glob("*.table")]
        return frozenset(
            Path(module) for index, module in enumerate(self._modules) if any(row[index] for row in rows)
        )

    def executed_in_all(self, windows: Iterable[int]) -> frozenset[Path]:
        """Return the modules with an executed line in every window of *windows*, at least one."""
        return frozenset.intersection(*map(self.executed, windows))


def _mapped(path: Path, size_bytes: int) -> mmap.mmap:
    """Map *path* into memory; create a file of zeros if none exists."""
    with path.open("a+b") as file:
        file.truncate(size_bytes)
        return mmap.mmap(file.fileno(), size_bytes)
