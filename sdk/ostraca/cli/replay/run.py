"""The replay itself: every request at its time, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ostraca.cli.replay.store import Store
from ostraca.cli.replay.trace import Trace

_SAY_EVERY = 128


@dataclass(frozen=True, slots=True)
class Counted:
    """What was found."""

    hits: int
    prefix_hits: int
    seconds: float
    """Of this machine's time."""


def replay(trace: Trace, store: Store, on_progress: Callable[[float], None] = lambda _part: None) -> Counted:
    """Ask for every request's blocks and put what is missing, on the trace's time.

    *on_progress* gets the part done, 0 to 1.
    """
    begun_s, hits, prefix_hits = time.perf_counter(), 0, 0
    for request, now_s in enumerate(trace.times_s.tolist()):
        if request % _SAY_EVERY == 0:
            on_progress(request / len(trace))
        found = store.request(now_s, trace.chain(request))
        hits += int(found.sum())
        prefix_hits += len(found) if found.all() else int(found.argmin())
    on_progress(1.0)
    return Counted(hits, prefix_hits, time.perf_counter() - begun_s)
