"""How long a load would take, from what drives and transfers have lately done and what is queued for them.

Pure. A *line* is anything that loads wait for: a drive, or the way to one worker's arena. Each line is
measured while it is busy, and described by two numbers: the time before the first byte, and the time for
each byte after it. Two, because small loads alone say little of how fast large ones are, and taking their
speed for it would decline what would have won.

Unknown is fast. A line that has never been measured costs no time, and old measurements fade: a load that is
declined measures nothing, so a line that was slow once has to be tried again.

Not seen here: writes, which slow reads down only once that is measured; and the loads of other workers on
their way to them, which show in a way's own speed alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import exp2
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from ostraca_fabric.status import EstimateCounters

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from ostraca_fabric.ids import DriveId

_MIB: Final = 1 << 20
_KEPT: Final = 63 / 64
"""What of the past is kept with each new measurement; a burst of reads that end together is one of many."""

_FADE_S: Final = 5.0
"""Time in which a line that nothing ends on is taken to be twice as fast as it was."""

_PULL: Final = 0.01
"""How much each load that began on an idle line pulls both numbers to zero, where a start weighs as much as
one MiB. Loads of one size leave open which of the two took the time: up to about one MiB it was the start."""

_TINY: Final = 1e-12
"""Keeps what was never measured from being divided by zero."""


class Line:
    """One thing that loads queue for."""

    def __init__(self) -> None:
        """Begin unmeasured and idle."""
        self.waiting_bytes = 0
        """Of loads that were admitted and have not begun here."""

        self.under_way_bytes = 0
        self._since_s = 0.0
        self._ended_s = 0.0
        self._is_start = False
        # Sums over measurements (starts, MiB, seconds) of products of two of them.
        self._starts = self._cross = self._squares = 0.0
        self._starts_s = self._squares_s = 0.0

    def begin(self, now_s: float, load_bytes: int) -> None:
        """Count what begins now."""
        if not self.under_way_bytes:
            self._since_s, self._is_start = now_s, True
        self.under_way_bytes += load_bytes

    def end(self, now_s: float, load_bytes: int) -> None:
        """Count the end of the same, and measure."""
        took_s = max(0.0, now_s - self._since_s)
        start, size = float(self._is_start), load_bytes / _MIB
        self._starts = self._starts * _KEPT + start
        self._cross = self._cross * _KEPT + start * size
        self._squares = self._squares * _KEPT + size * size
        self._starts_s = self._starts_s * _KEPT + start * took_s
        self._squares_s = self._squares_s * _KEPT + size * took_s
        self.under_way_bytes -= load_bytes
        self._since_s, self._ended_s, self._is_start = now_s, now_s, False

    def abandon(self, load_bytes: int) -> None:
        """Count what began no more: nobody waits for it, and when it ends it says nothing of this line."""
        self.under_way_bytes -= load_bytes

    def wait_s(self, now_s: float) -> float:
        """Return how long until a load that comes now is begun, and its first byte is there."""
        first_s, byte_s = self._costs(now_s)
        # What has been silent for a while will be so for as long again.
        silent_s = now_s - self._since_s if self.under_way_bytes else 0.0
        return max(first_s + byte_s * (self.waiting_bytes + self.under_way_bytes), silent_s)

    def serve_s(self, now_s: float, load_bytes: int) -> float:
        """Return how long a load takes once its turn has come."""
        return self._costs(now_s)[1] * load_bytes

    def _costs(self, now_s: float) -> tuple[float, float]:
        """Return the seconds before the first byte and for each one, by least squares; none is negative."""
        starts = self._starts * (1 + _PULL) + _TINY
        squares = self._squares + self._starts * _PULL + _TINY
        first = (self._starts_s * squares - self._squares_s * self._cross) / (
            starts * squares - self._cross * self._cross
        )
        each = (self._squares_s - self._cross * first) / squares
        if first < 0:
            first, each = 0.0, self._squares_s / squares
        elif each < 0:
            first, each = self._starts_s / starts, 0.0
        faded = exp2(-max(0.0, now_s - self._ended_s) / _FADE_S)
        return first * faded, each * faded / _MIB


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks that a request would bring."""

    by_drive: Mapping[DriveId, int]
    """Bytes to read from each drive; those that the DRAM cache has are read from none."""

    load_bytes: int
    """Bytes to move to the worker."""


class Pace:
    """The lines of one agent."""

    def __init__(self, wave_bytes: int) -> None:
        """Begin with nothing measured; a load is read in waves of about *wave_bytes*, moved as they come."""
        self._wave_bytes = wave_bytes
        self.drives: defaultdict[DriveId, Line] = defaultdict(Line)
        self._ways: WeakKeyDictionary[Hashable, Line] = WeakKeyDictionary()
        self.estimates = EstimateCounters()

    def way(self, worker: Hashable) -> Line:
        """Return the line of transfers to a worker, for as long as there is that worker."""
        return self._ways.setdefault(worker, Line())

    def estimate_s(self, now_s: float, load: Load, way: Line, *, own_bytes: int = 0) -> float:
        """Return how long a load would take that is admitted now.

        Reading and moving overlap but for one wave. *own_bytes* of what is queued for *way* belong to the
        same request and are not waited for.
        """
        move_s = way.serve_s(now_s, load.load_bytes)
        own_s = way.serve_s(now_s, own_bytes)
        alone = min(1.0, self._wave_bytes / load.load_bytes) if load.load_bytes else 1.0
        takes_s = max(0.0, way.wait_s(now_s) - own_s) + move_s
        for drive, read_bytes in load.by_drive.items():
            line = self.drives[drive]
            read_s = line.serve_s(now_s, read_bytes)
            longer_s, shorter_s = max(read_s, move_s), min(read_s, move_s)
            takes_s = max(takes_s, line.wait_s(now_s) + longer_s + alone * shorter_s)
        return takes_s

    def slowest(self, now_s: float, load: Load) -> DriveId:
        """Return the drive that a load would wait for longest."""

        def takes_s(drive: DriveId) -> float:
            line = self.drives[drive]
            return line.wait_s(now_s) + line.serve_s(now_s, load.by_drive[drive])

        return max(load.by_drive, key=takes_s)

    def compare(self, estimate_s: float, took_s: float) -> None:
        """Count how long an admitted load took that was expected to take *estimate_s*."""
        counters = self.estimates
        counters.loads += 1
        counters.estimated_s += estimate_s
        counters.took_s += took_s
        counters.error_s += abs(took_s - estimate_s)


class Booking:
    """What an admitted request is still to begin: others wait for it too."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._left: defaultdict[Line, int] = defaultdict(int)

    def __bool__(self) -> bool:
        """Tell whether anything was booked."""
        return bool(self._left)

    def add(self, line: Line, load_bytes: int) -> None:
        """Book what was admitted."""
        self._left[line] += load_bytes
        line.waiting_bytes += load_bytes

    def of(self, line: Line) -> int:
        """Return what is booked of a line."""
        return self._left.get(line, 0)

    def take(self, line: Line, load_bytes: int) -> None:
        """Take off what begins now; at most what is left."""
        taken = min(load_bytes, self._left[line])
        self._left[line] -= taken
        line.waiting_bytes -= taken

    def close(self) -> None:
        """Take off everything that is left."""
        for line, left in self._left.items():
            line.waiting_bytes -= left
        self._left.clear()
