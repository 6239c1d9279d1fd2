"""Order and pace of a shard's scrub. Pure.

A *pass* visits every sealed segment once, in the order of their numbers; segments sealed behind it wait for
the next pass. The scrub reads only while the drive has been idle for a while, within its rate.
"""

from __future__ import annotations

from collections.abc import Sequence


class ScrubProgress:
    """Progress of one shard's scrub. Call ``wait_s`` before each read, and ``spend`` after it."""

    def __init__(self, now_s: float, *, bytes_s: float, idle_s: float, pause_s: float) -> None:
        """Begin with a drive that was busy until now. For the limits see ``ScrubSettings``."""
        self._bytes_s, self._idle_s, self._pause_s = bytes_s, idle_s, pause_s
        self._busy_s = self._next_s = now_s
        self._segment = -1
        self.read_bytes = 0
        self.blocks = 0
        """Blocks checked, damaged ones included."""

        self.passes = 0
        self.passed_s: float | None = None
        """End of the last pass."""

    def wait_s(self, now_s: float, *, is_idle: bool) -> float:
        """Return the wait before the next call; 0 if a read may begin now."""
        if not is_idle:
            self._busy_s = now_s
        return max(0.0, self._busy_s + self._idle_s - now_s, self._next_s - now_s)

    def spend(self, now_s: float, read_bytes: int, *, blocks: int = 0) -> None:
        """Count a read. The next read waits as the scrub's rate requires."""
        self.read_bytes += read_bytes
        self.blocks += blocks
        self._next_s = now_s + read_bytes / self._bytes_s

    def next_segment(self, now_s: float, sealed: Sequence[int]) -> int | None:
        """Return the next of the segments sealed now; None at the end of a pass, or without any."""
        later = [number for number in sealed if number > self._segment]
        if later:
            self._segment = min(later)
            return self._segment
        if self._segment >= 0:
            self._segment = -1
            self.passes += 1
            self.passed_s = now_s
        self._next_s = now_s + self._pause_s
        return None
