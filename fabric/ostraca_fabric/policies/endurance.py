"""Endurance: what a drive may be written in its life, what has been written, and how long it lasts at that.

Makers rate a drive in whole writes of its size per day (DWPD) for its warranty's years, so it may take
``DWPD x size x 365 x years`` bytes in all. Shards of one drive may have several owners; each accounts for its
own share of the drive, which is its size: what a shard may take is its size's DWPD, and the shards of a drive
add up to no more than the drive's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ostraca_fabric.errors import UsageError

DAY_S = 86_400.0
DAYS_OF_YEAR = 365
"""As in makers' own formula."""

YEARS_MAX = 1000.0
"""The longest time that is told; a shard that is hardly written lasts longer than anything around it."""

_MARK_EVERY_S = 3600.0
_GHOST_BYTES_LEAST = 4096


@dataclass(frozen=True, slots=True)
class EnduranceSettings:
    """How much is written to flash, and which blocks first when not all may be.

    Without a rating everything is admitted while there is room, and none of the other settings but
    ``rated_years`` matters.
    """

    rated_dwpd: float = 0.0
    """Drive writes per day that the drives are rated for, from their data sheet; 0 for not known. Makers
    count random writes of 4 KiB, which wear a drive more than segments written in order do."""

    rated_years: float = 5.0
    """The years that the rating is given for."""

    budget_share: float = 1.0
    """The part of the rating that may be spent; above 1 wears drives out before their years are over. Lower
    it where others write to the same drives."""

    burst_s: float = 6 * 3600.0
    """How much of the budget can be saved up, as the time in which it comes in: quiet nights pay for busy
    mornings. A drive is never written more in a day than a day's budget and this."""

    first_touch_reserve: float = 0.25
    """The part of what can be saved up that only blocks seen for the second time may spend."""

    half_way_blocks: int = 64
    """How deep in its chain a block seen for the first time may lie when the level is half-way between the
    reserve and enough for everything. The level settles where as much is admitted as the budget pays for,
    whatever this is; it matters for how fast."""

    retry_s: float = 10.0
    """Two touches of a block within this time count as one. Longer than an engine goes on trying to put what
    it was just declined, shorter than the next request for the same prompt takes to come."""

    ghost_bytes: int = 4 << 20
    """Memory, for each shard, that remembers blocks it has seen. 4 MiB remember the last 1 to 2 million."""

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        if self.rated_dwpd < 0 or self.rated_years <= 0 or self.budget_share <= 0 or self.burst_s <= 0:
            raise UsageError(
                f"endurance settings {self}: rated_dwpd is 0 or more; rated_years, budget_share and burst_s "
                "are above 0"
            )
        if not 0 <= self.first_touch_reserve < 1:
            raise UsageError(
                f"first_touch_reserve is {self.first_touch_reserve}: it is a part of what can be saved up, "
                "from 0 to below 1"
            )
        if self.half_way_blocks < 1 or self.retry_s < 0 or self.ghost_bytes < _GHOST_BYTES_LEAST:
            raise UsageError(
                f"endurance settings {self}: half_way_blocks is at least 1, retry_s not negative, "
                f"ghost_bytes at least {_GHOST_BYTES_LEAST}"
            )

    @property
    def has_budget(self) -> bool:
        """Whether writes are limited at all."""
        return self.rated_dwpd > 0

    def budget_bytes_per_day(self, size_bytes: int) -> float:
        """Return what may be written a day to so many bytes of flash."""
        return self.rated_dwpd * self.budget_share * size_bytes

    def rated_bytes(self, size_bytes: int) -> float:
        """Return what so many bytes of flash may take in their life."""
        return self.rated_dwpd * size_bytes * DAYS_OF_YEAR * self.rated_years


def years_left(rated_bytes: float, written_bytes: int, bytes_per_day: float) -> float:
    """Return how long the rest of a rating lasts at a rate: 0 to ``YEARS_MAX``."""
    left_bytes = max(0.0, rated_bytes - written_bytes)
    if not left_bytes:
        return 0.0
    if left_bytes >= bytes_per_day * DAYS_OF_YEAR * YEARS_MAX:
        return YEARS_MAX
    return left_bytes / bytes_per_day / DAYS_OF_YEAR


class WriteMeter:
    """Bytes written, and how fast over the last day.

    Before a day has passed the rate is that since the beginning, which counts as an hour ago at least: the
    first minutes say nothing about a life.
    """

    def __init__(self, now_s: float) -> None:
        """Begin with nothing written."""
        self.bytes = 0
        self._now_s = now_s
        self._marks = deque([(now_s, 0)])
        """When so many bytes had been written: about every hour of the last day, and once before it."""

    def add(self, written_bytes: int) -> None:
        """Count a write."""
        self.bytes += written_bytes

    def advance(self, now_s: float) -> None:
        """Say what time it is; call it more often than once an hour."""
        self._now_s = now_s
        marks = self._marks
        if now_s - marks[-1][0] >= _MARK_EVERY_S:
            marks.append((now_s, self.bytes))
        while len(marks) > 1 and now_s - marks[1][0] >= DAY_S:
            marks.popleft()

    @property
    def bytes_per_day(self) -> float:
        """How fast, over the last day, as of the last ``advance``."""
        since_s, before_bytes = self._marks[0]
        return (self.bytes - before_bytes) / max(self._now_s - since_s, _MARK_EVERY_S) * DAY_S
