"""SilenceDetector: detection of an agent that has stopped.

A stopped agent keeps its connections, so waiting for it is in vain. A slow or busy agent still sends messages
now and then, and answers a Ping at any time::

    fine ---- misses_max operations in a row, and nothing was heard ----> asked: a Ping is sent
      ^                                                                    |     |
      +-------------------- anything at all is heard ----------------------+     +-- patience_s --> silent

Operations report their start, and their end at the deadline. The reader of the connection reports the time of
the last bytes. All times are of one clock, in seconds.
"""

from __future__ import annotations

import math


class SilenceDetector:
    """State of a connection's other end. Not thread-safe."""

    def __init__(self, *, misses_max: int, deadline_min_s: float, patience_s: float) -> None:
        """Begin in state fine."""
        self._misses_max = misses_max
        self._deadline_least_s = deadline_min_s
        self._patience_s = patience_s
        self._misses = 0
        self._missed_s = -math.inf
        self.pinged_s: float | None = None
        """Time of the Ping, if one was sent without known bytes since."""

    def report_late(self, *, sent_s: float, received_s: float, now_s: float) -> bool:
        """Note an operation that ended at its deadline; tell whether to send a Ping.

        On True, the Ping counts as sent. An operation with hardly any time is ignored, and so is an operation
        with bytes received after its start.
        """
        if self.pinged_s is not None or received_s >= sent_s or now_s - sent_s < self._deadline_least_s:
            return False
        self._misses = 1 if received_s >= self._missed_s else self._misses + 1
        self._missed_s = now_s
        if self._misses < self._misses_max:
            return False
        self._misses, self.pinged_s = 0, now_s
        return True

    def until_s(self, *, received_s: float, accepted_s: float) -> float | None:
        """Return when the other end is silent without further bytes; None while fine.

        The socket last accepted bytes for sending at *accepted_s*: a Ping waiting behind was not sent yet.
        """
        if self.pinged_s is not None and received_s >= self.pinged_s:
            self.pinged_s = None
        return None if self.pinged_s is None else max(self.pinged_s, accepted_s) + self._patience_s
