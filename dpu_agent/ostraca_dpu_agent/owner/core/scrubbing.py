"""What a shard's scrub looks at next, and how fast. Pure.

A *pass* visits every sealed segment once, in the order of their numbers; those sealed behind it wait for the
next one. It reads only while the drive has had nothing to do for a while, and then no faster than it may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.errors import UsageError
from ostraca_fabric.limits import check_above_zero

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class ScrubSettings:
    """How flash is read again to find what has rotted."""

    bytes_s: float = 20e6
    """How much of a shard is read in a second while its drive is idle; 0 turns the scrub off. The default
    takes a full shard of 1 TB in 14 hours, and 1 % of what a drive of 2 GB/s can read."""

    idle_s: float = 1.0
    """How long the drive must have had nothing to do: gets never queue behind more than one read of the
    scrub."""

    chunk_bytes: int = 1 << 20
    """About as much as is read at once; a longer block is read alone."""

    pause_s: float = 60.0
    """How long to wait where there is no sealed segment, and after a pass."""

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        check_above_zero(self, "pause_s")
        if self.bytes_s < 0 or self.chunk_bytes <= 0:
            message = "scrub.bytes_s is a rate, 0 for no scrub, and scrub.chunk_bytes above 0"
            raise UsageError(message)


class Scrub:
    """The progress of one shard's scrub. Ask ``wait_s`` before each read, and tell ``spend`` after it."""

    def __init__(self, settings: ScrubSettings, now_s: float) -> None:
        """Begin with a drive that was busy until now."""
        self._settings = settings
        self._busy_s = self._next_s = now_s
        self._segment = -1
        self.read_bytes = 0
        self.blocks = 0
        """Checked, and those found wrong among them."""

        self.passes = 0
        self.passed_s: float | None = None
        """When the last pass ended."""

    def wait_s(self, now_s: float, *, is_idle: bool) -> float:
        """Return how long to wait before asking again; 0 when something may be read now."""
        if not is_idle:
            self._busy_s = now_s
        return max(0.0, self._busy_s + self._settings.idle_s - now_s, self._next_s - now_s)

    def spend(self, now_s: float, read_bytes: int, *, blocks: int = 0) -> None:
        """Count what was read; the next read waits for as long as this may take."""
        self.read_bytes += read_bytes
        self.blocks += blocks
        self._next_s = now_s + read_bytes / self._settings.bytes_s

    def next_segment(self, now_s: float, sealed: Sequence[int]) -> int | None:
        """Return the segment to look at, of those that are sealed now; None when a pass has ended, or there
        is none.
        """
        later = [number for number in sealed if number > self._segment]
        if later:
            self._segment = min(later)
            return self._segment
        if self._segment >= 0:
            self._segment = -1
            self.passes += 1
            self.passed_s = now_s
        self._next_s = now_s + self._settings.pause_s
        return None
