"""Counts of a replay, with hit rates and endurance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ostraca_fabric.policies.endurance import DAY_S, YEARS_MAX


@dataclass(slots=True)
class WriteCounts:
    """Writes of a store so far, in bytes of the replayed store, not of its model."""

    blocks: int = 0
    """New blocks."""

    block_bytes: int = 0
    reinserted_blocks: int = 0
    """Blocks reinserted when their segment was evicted."""

    reinserted_bytes: int = 0
    summary_bytes: int = 0
    declined: dict[str, int] = field(default_factory=dict)
    """New blocks without a write, by reason."""

    @property
    def all_bytes(self) -> int:
        """Return all bytes written to flash."""
        return self.block_bytes + self.reinserted_bytes + self.summary_bytes


@dataclass(frozen=True, slots=True)
class FlashRating:
    """Size and endurance of the flash."""

    drive_bytes: int
    rated_dwpd: float
    """Rated drive writes per day."""

    rated_years: float
    """Years at the rated drive writes per day."""


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Result of a policy at a capacity."""

    policy: str
    capacity_blocks: int
    capacity_bytes: int
    requests: int
    blocks_requested: int
    hits: int
    """Blocks found, also behind a hole."""

    prefix_hits: int
    """Blocks found in the unbroken prefix of their request."""

    span_s: float
    written: WriteCounts
    flash: FlashRating
    seconds: float
    """Duration of the replay."""

    @property
    def block_bytes(self) -> int:
        """Return the size of a block."""
        return self.capacity_bytes // self.capacity_blocks

    @property
    def hit_rate(self) -> float:
        """Return the share of blocks found."""
        return self.hits / self.blocks_requested

    @property
    def prefix_hit_rate(self) -> float:
        """Return the share of blocks found before a hole."""
        return self.prefix_hits / self.blocks_requested

    @property
    def write_amplification(self) -> float:
        """Return bytes written per byte of a new block; 1 without writes."""
        new = self.written.block_bytes
        return self.written.all_bytes / new if new else 1.0

    @property
    def bytes_per_day(self) -> float:
        """Return bytes written per day at the trace's rate; 0 for an empty time span."""
        return self.written.all_bytes / self.span_s * DAY_S if self.span_s else 0.0

    @property
    def drive_writes_per_day(self) -> float:
        """Return the drive writes per day."""
        return self.bytes_per_day / self.flash.drive_bytes

    @property
    def years_left(self) -> float:
        """Return the lifetime of a new drive at this rate, at most ``YEARS_MAX``."""
        rated, daily = self.flash.rated_dwpd * self.flash.rated_years, self.drive_writes_per_day
        return rated / daily if daily * YEARS_MAX > rated else YEARS_MAX

    def as_dict(self) -> Mapping[str, object]:
        """Return all fields, for JSON."""
        return {
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "capacity_bytes": self.capacity_bytes,
            "hit_rate": self.hit_rate,
            "prefix_hit_rate": self.prefix_hit_rate,
            "hits": self.hits,
            "prefix_hits": self.prefix_hits,
            "blocks_written": self.written.blocks,
            "blocks_reinserted": self.written.reinserted_blocks,
            "blocks_declined": self.written.declined,
            "bytes_written": self.written.all_bytes,
            "block_bytes_written": self.written.block_bytes,
            "reinserted_bytes_written": self.written.reinserted_bytes,
            "summary_bytes_written": self.written.summary_bytes,
            "write_amplification": self.write_amplification,
            "drive_writes_per_day": self.drive_writes_per_day,
            "years_left": self.years_left,
            "seconds": self.seconds,
        }
