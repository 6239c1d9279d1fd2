"""Some histories in a process of their own, and what they were, counted."""

from __future__ import annotations

import ctypes
import traceback
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.shard.history import play

_PR_SET_THP_DISABLE = 41
_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 1 << 20


@dataclass(slots=True)
class Tally:
    """What some histories were."""

    histories: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    mishaps: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.histories += other.histories
        self.happened += other.happened
        self.mishaps += other.mishaps
        self.excused += other.excused
        self.failures += other.failures


def begin() -> None:
    # Each recovery maps a few huge pages and uses a corner of them; to zero small ones takes less time.
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    # Else what a history's drives hold lies between what lives on, and the process grows with each history.
    libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)


def played(seeds: list[int], steps: int) -> Tally:
    tally = Tally()
    for seed in seeds:
        tally.histories += 1
        try:
            told = play(seed, steps)
        except Exception:  # noqa: BLE001 (whatever a history ends with is what was looked for)
            tally.failures.append((seed, traceback.format_exc()))
            continue
        tally.happened += told.happened
        tally.mishaps += told.mishaps
        tally.excused += told.excused
    return tally
