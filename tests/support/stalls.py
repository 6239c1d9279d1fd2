"""What a busy machine adds to a duration: how long threads were ready to run, and did not.

A bound on how long something takes is a claim about us. It must hold on a machine that has other things to do
as well, so what the kernel says that it kept our threads waiting is not held against us; nor, in a virtual
machine, what its host kept from it: the kernel takes a thread for running all that time.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def stalls() -> dict[str, float]:
    """Return how long each thread of this process has been ready to run, and did not, since it began.

    And how long processors were kept from this machine, all together: a thread lost that much to it at
    most.
    """
    found = {"stolen": stolen_s(Path("/proc/stat").read_text())}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


def stolen_s(stat: str) -> float:
    """Return the time that proc(5) calls stolen, of all processors since the machine began."""
    _, *ticks = stat.splitlines()[0].split()
    return int(ticks[7]) / TICKS_PER_S


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
