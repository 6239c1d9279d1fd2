"""Silence: whether an agent that lets deadlines pass is there at all.

An agent that has stopped keeps its connections, and whoever waits for it waits for nothing. One that is only
slow, or has long work to do, says something now and then, and answers a Ping whatever else it does::

    fine ---- misses_max operations in a row, and nothing was heard ----> asked: a Ping is sent
      ^                                                                    |     |
      +-------------------- anything at all is heard ----------------------+     +-- patience_s --> silent

Operations say when they were sent and that they have ended at their deadline, and whoever reads the
connection when anything was last heard. All times are of one clock, in seconds.
"""

from __future__ import annotations

import math


class Silence:
    """What is known of one connection's other end. Not thread-safe."""

    def __init__(self, *, misses_max: int, deadline_least_s: float, patience_s: float) -> None:
        """Begin as fine."""
        self._misses_max = misses_max
        self._deadline_least_s = deadline_least_s
        self._patience_s = patience_s
        self._misses = 0
        self._missed_s = -math.inf
        self._asked_s: float | None = None

    @property
    def is_asked(self) -> bool:
        """Whether a Ping was sent, and nothing is known to have been heard since."""
        return self._asked_s is not None

    def missed(self, *, sent_s: float, heard_s: float, now_s: float) -> bool:
        """Note an operation that has ended at its deadline; tell whether to send a Ping, which then counts as
        sent.

        One that had hardly any time says nothing, nor does one since which anything was heard.
        """
        if self.is_asked or heard_s >= sent_s or now_s - sent_s < self._deadline_least_s:
            return False
        self._misses = 1 if heard_s >= self._missed_s else self._misses + 1
        self._missed_s = now_s
        if self._misses < self._misses_max:
            return False
        self._misses, self._asked_s = 0, now_s
        return True

    def until_s(self, *, heard_s: float, taken_s: float) -> float | None:
        """Return when the other end is silent unless something is heard before; None while it is fine.

        The connection last took something to be sent at *taken_s*: what waits behind that was not said yet.
        """
        if self._asked_s is not None and heard_s >= self._asked_s:
            self._asked_s = None
        return None if self._asked_s is None else max(self._asked_s, taken_s) + self._patience_s


def pause_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Return how long to wait after so many attempts in a row that failed, one at least: each time twice as
    long.
    """
    return float(min(longest_s, first_s * 2 ** min(failures - 1, 32)))
