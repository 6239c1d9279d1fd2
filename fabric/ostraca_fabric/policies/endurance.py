"""Endurance: rated writes of a drive, bytes written so far, and remaining life.

Manufacturers rate a drive in whole writes of its size per day (DWPD) over the years of warranty: in total
``DWPD x size x 365 x years`` bytes. Shards of one drive may have several owners, so each shard accounts for
its own size. The budgets of all shards add up to at most the drive's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ostraca_fabric.errors import UsageError

DAY_S = 86_400.0
DAYS_OF_YEAR = 365
"""As in the manufacturers' formula."""

YEARS_MAX = 1000.0
"""Longest time reported; rarely written shards outlast all other parts."""

_MARK_EVERY_S = 3600.0
_GHOST_BYTES_LEAST = 4096


@dataclass(frozen=True, slots=True)
class EnduranceSettings:
    """Flash write budget and admission under it.

    Without a rating every block is admitted while space lasts, and only ``rated_years`` has an effect.
    """

    rated_dwpd: float = 0.0
    """Drive writes per day from the drives' data sheet; 0: unknown. Manufacturers count random writes of 4
    KiB, which wear a drive more than segments written in order."""

    rated_years: float = 5.0
    """Years covered by the rating."""

    budget_share: float = 1.0
    """Share of the rating to spend; above 1 drives wear out early. Lower the share where others write to the
    same drives."""

    burst_s: float = 6 * 3600.0
    """Largest saved budget, as time in which the budget accrues. Writes to a drive in a day never exceed a
    day's budget plus this."""

    first_touch_reserve: float = 0.25
    """Share of the largest saved budget that only blocks seen for the second time may spend."""

    half_way_blocks: int = 64
    """Chain depth up to which new blocks are admitted with the budget half-way between the reserve and enough
    for every block. Affects how fast admission settles, not where."""

    retry_s: float = 10.0
    """Interval within which two touches of a block count as one. Longer than an engine's retries of a put,
    shorter than the pause between requests for a prompt."""

    ghost_bytes: int = 4 << 20
    """Memory of each shard for blocks seen before. 4 MiB hold the last 1 to 2 million."""

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        if self.rated_dwpd < 0 or self.rated_years <= 0 or self.budget_share <= 0 or self.burst_s <= 0:
            raise UsageError(
                f"endurance settings {self}: rated_dwpd is 0 or more; rated_years, budget_share and burst_s "
                "are above 0"
            )
        if not 0 <= self.first_touch_reserve < 1:
            raise UsageError(
                f"first_touch_reserve is {self.first_touch_reserve}: use a share of the largest saved "
                "budget, from 0 to below 1"
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
        """Return the daily write budget of *size_bytes* of flash."""
        return self.rated_dwpd * self.budget_share * size_bytes

    def rated_bytes(self, size_bytes: int) -> float:
        """Return the rated lifetime writes of *size_bytes* of flash."""
        return self.rated_dwpd * size_bytes * DAYS_OF_YEAR * self.rated_years


def years_left(rated_bytes: float, written_bytes: int, bytes_per_day: float) -> float:
    """Return the remaining life of a rating at a rate, in years: 0 to ``YEARS_MAX``."""
    left_bytes = max(0.0, rated_bytes - written_bytes)
    if not left_bytes:
        return 0.0
    if left_bytes >= bytes_per_day * DAYS_OF_YEAR * YEARS_MAX:
        return YEARS_MAX
    return left_bytes / bytes_per_day / DAYS_OF_YEAR


class WriteMeter:
    """Bytes written, and the rate over the last day.

    During the first day the rate covers the time since the beginning, but at least one hour: the first
    minutes are no measure of a life.
    """

    def __init__(self, now_s: float) -> None:
        """Begin with nothing written."""
        self.bytes = 0
        self._now_s = now_s
        self._marks = deque([(now_s, 0)])
        """Time and bytes written: about every hour of the last day, and once before."""

    def add(self, written_bytes: int) -> None:
        """Count a write."""
        self.bytes += written_bytes

    def advance(self, now_s: float) -> None:
        """Set the time; call more often than once an hour."""
        self._now_s = now_s
        marks = self._marks
        if now_s - marks[-1][0] >= _MARK_EVERY_S:
            marks.append((now_s, self.bytes))
        while len(marks) > 1 and now_s - marks[1][0] >= DAY_S:
            marks.popleft()

    @property
    def bytes_per_day(self) -> float:
        """Rate over the last day, as of the last ``advance``."""
        since_s, before_bytes = self._marks[0]
        return (self.bytes - before_bytes) / max(self._now_s - since_s, _MARK_EVERY_S) * DAY_S
