"""What a busy machine adds to a duration: how long threads were ready to run, and did not.

A bound on how long something takes is a claim about us. It must hold on a machine that has other things to do
as well, so what the kernel says that it kept our threads waiting is not held against us.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def stalls() -> dict[str, float]:
    """Return how long each thread of this process has been ready to run, and did not, since it began."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


class Stopwatch:
    """Runs from its making."""

    def __init__(self) -> None:
        self._stalls, self._begun_s = stalls(), time.monotonic()

    @property
    def passed_s(self) -> float:
        """How long it has been."""
        return time.monotonic() - self._begun_s

    @property
    def took_s(self) -> float:
        """How long it has been without what this process was kept waiting for a processor."""
        passed_s = self.passed_s
        return passed_s - sum(at_s - self._stalls.get(thread, 0.0) for thread, at_s in stalls().items())
