"""Limits and times of one shard's owner."""

from __future__ import annotations

from dataclasses import dataclass, field

from ostraca_fabric.errors import UsageError
from ostraca_fabric.policies.endurance import EnduranceSettings

_BLOCKS_MAX_LEAST = 16


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """How an owner runs one shard. Small shards keep less free by themselves."""

    blocks_max: int = 1 << 24
    """Blocks the index may hold; each takes up to 48 bytes of memory. At the limit the oldest segment is
    evicted. A shard whose summary areas list fewer never needs more."""

    free_segments: int = 2
    """Segments kept free ahead of need, so that writers never wait for readers' pins to run out. Raise it
    when puts are declined for lack of space while readers hold long pins. A shard gives up at most one in
    sixteen of its segments for it, or one of a few."""

    carry_share: float = 0.12
    """Bytes that eviction may copy forward for each byte committed, of blocks that were read of late. Flash
    wears by as much more. 0 copies nothing. Whatever this is, segments of which much was read may stay where
    they are for another round, which writes nothing."""

    pin_max_s: float = 30.0
    """The longest pin. A stopped reader can hold a segment back for this long."""

    hold_max_s: float = 30.0
    """The longest reservation."""

    late_write_s: float = 120.0
    """How long after an abandoned reservation's end, or after a write has failed, it may still reach the
    drive. The segment is not reused before that: covers the path's time-outs and the longest pause of an
    agent."""

    pins_max: int = 1 << 16
    """Pins held at once. Beyond it nothing is found, which readers take as misses."""

    reservations_max: int = 1 << 16
    """Reservations and commits under way at once. Beyond it puts are declined."""

    retry_s: float = 1.0
    """How long no segment is opened after writing an opening page has failed."""

    endurance: EnduranceSettings = field(default_factory=EnduranceSettings)
    """What may be written, and what is worth it."""

    def __post_init__(self) -> None:
        """Refuse an index too small to hold more than one segment."""
        if self.blocks_max < _BLOCKS_MAX_LEAST:
            raise UsageError(
                f"blocks_max is {self.blocks_max}: let a shard hold {_BLOCKS_MAX_LEAST} blocks at least"
            )
