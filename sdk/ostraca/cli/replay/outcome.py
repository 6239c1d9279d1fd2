"""What a replay counted, and what follows from it for hit rates and endurance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ostraca_fabric.policies.endurance import DAY_S, YEARS_MAX


@dataclass(slots=True)
class Written:
    """What a store has written so far. Bytes are those of the store replayed, not of its model in memory."""

    blocks: int = 0
    """New ones."""

    block_bytes: int = 0
    carried_blocks: int = 0
    """Written once more, because they were worth keeping when their segment was evicted."""

    carried_bytes: int = 0
    summary_bytes: int = 0
    declined: dict[str, int] = field(default_factory=dict)
    """New blocks that were not written, by reason."""

    @property
    def all_bytes(self) -> int:
        """Return what reaches the flash."""
        return self.block_bytes + self.carried_bytes + self.summary_bytes


@dataclass(frozen=True, slots=True)
class Flash:
    """What is written to, and what it stands."""

    drive_bytes: int
    rated_dwpd: float
    """Drive-writes per day that the drive's maker allows."""

    rated_years: float
    """... for so many years."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy at one capacity."""

    policy: str
    capacity_blocks: int
    capacity_bytes: int
    requests: int
    blocks_asked: int
    hits: int
    """Blocks found, wherever in their request: what a reader gets that can use blocks behind a hole."""

    prefix_hits: int
    """Blocks found before the first of their request that was not."""

    span_s: float
    written: Written
    flash: Flash
    seconds: float
    """How long the replay took."""

    @property
    def block_bytes(self) -> int:
        """Return what one block takes."""
        return self.capacity_bytes // self.capacity_blocks

    @property
    def hit_rate(self) -> float:
        """Return the share of blocks found."""
        return self.hits / self.blocks_asked

    @property
    def prefix_hit_rate(self) -> float:
        """Return the share of blocks found before a hole."""
        return self.prefix_hits / self.blocks_asked

    @property
    def write_amplification(self) -> float:
        """Return bytes written for each byte of a new block; 1 where nothing was written."""
        new = self.written.block_bytes
        return self.written.all_bytes / new if new else 1.0

    @property
    def bytes_per_day(self) -> float:
        """Return bytes written in a day, were every day like the trace; 0 where the trace takes no time."""
        return self.written.all_bytes / self.span_s * DAY_S if self.span_s else 0.0

    @property
    def drive_writes_per_day(self) -> float:
        """Return how often the drive is written in a day."""
        return self.bytes_per_day / self.flash.drive_bytes

    @property
    def years_left(self) -> float:
        """Return how long a new drive lasts at this rate, at most ``YEARS_MAX``."""
        rated, daily = self.flash.rated_dwpd * self.flash.rated_years, self.drive_writes_per_day
        return rated / daily if daily * YEARS_MAX > rated else YEARS_MAX

    def as_dict(self) -> Mapping[str, object]:
        """Return everything, for JSON."""
        return {
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "capacity_bytes": self.capacity_bytes,
            "hit_rate": self.hit_rate,
            "prefix_hit_rate": self.prefix_hit_rate,
            "hits": self.hits,
            "prefix_hits": self.prefix_hits,
            "blocks_written": self.written.blocks,
            "blocks_carried": self.written.carried_blocks,
            "blocks_declined": self.written.declined,
            "bytes_written": self.written.all_bytes,
            "block_bytes_written": self.written.block_bytes,
            "carried_bytes_written": self.written.carried_bytes,
            "summary_bytes_written": self.written.summary_bytes,
            "write_amplification": self.write_amplification,
            "drive_writes_per_day": self.drive_writes_per_day,
            "years_left": self.years_left,
            "seconds": self.seconds,
        }
