"""Limits and times of the owner of one shard."""

from __future__ import annotations

from dataclasses import dataclass, field

from ostraca_fabric.errors import UsageError
from ostraca_fabric.policies.endurance import EnduranceSettings

_BLOCKS_MAX_MIN = 16


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """Limits and times of one shard. Small shards keep fewer segments free."""

    blocks_max: int = 1 << 24
    """Limit of blocks in the index, each with up to 48 bytes of memory. At the limit the oldest segment is
    evicted."""

    free_segments: int = 2
    """Segments kept free ahead of need, so that writers never wait for the end of pins: at most a sixteenth
    of the segments, or one of a few."""

    reinsertion_share: float = 0.12
    """Bytes that may be reinserted for each byte committed. Segments with many hot blocks may stay in place
    for another round at any share, as that writes nothing."""

    pin_max_s: float = 30.0
    """Longest lifetime of a pin."""

    hold_max_s: float = 30.0
    """Longest lifetime of a reservation."""

    late_write_s: float = 120.0
    """Longest time from the end of an abandoned reservation, or from the failure of a write, until the write
    reaches the drive. No segment is reused sooner."""

    pins_max: int = 1 << 16
    """Limit of concurrent pins. At the limit lookups with a pin find nothing."""

    reservations_max: int = 1 << 16
    """Limit of concurrent reservations and commits. At the limit puts are declined."""

    retry_s: float = 1.0
    """Pause in opening segments after the failure of an opening page."""

    endurance: EnduranceSettings = field(default_factory=EnduranceSettings)
    """Write budget, and admission of blocks to flash."""

    def __post_init__(self) -> None:
        """Refuse an index too small for more than one segment."""
        if self.blocks_max < _BLOCKS_MAX_MIN:
            raise UsageError(
                f"blocks_max is {self.blocks_max}: set at least {_BLOCKS_MAX_MIN} blocks per shard"
            )
