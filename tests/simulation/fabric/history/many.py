"""Some histories of a fabric in a process of their own, and what they were, counted."""

from __future__ import annotations

import traceback

from tests.simulation.fabric.history.history import FailedHistoryError, play
from tests.simulation.shard.many import Tally


def played(seeds: list[int], steps: int) -> Tally:
    tally = Tally()
    for seed in seeds:
        tally.histories += 1
        try:
            told = play(seed, steps)
        except FailedHistoryError as failed:
            tally.failures.append((seed, f"{failed}\n{''.join(traceback.format_exception(failed))}"))
            continue
        tally.happened += told.happened
        tally.excused += told.excused
    return tally
