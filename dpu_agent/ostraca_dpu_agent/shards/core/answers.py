"""Settings, answers and counters of ``ShardCore``.

Columns hold a value per block, in the order of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core.ring.pools import SegmentState
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import Extents, Generation
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.policies.endurance import EnduranceSettings
from ostraca_fabric.wire.codec import filled

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
    """Limit of concurrent pins. At the limit gets find nothing."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Resolution(Extents):
    """Extents of blocks."""

    found: NDArray[np.bool_]
    pin: int
    """Number for an early release; 0 without a pin."""


@dataclass(frozen=True, slots=True, eq=False)
class Allocations:
    """Space reserved for blocks."""

    states: NDArray[np.uint8]
    """A PutState each: STAGED stands for "reserved"; EXISTS; DECLINED."""

    reasons: NDArray[np.uint8]
    """A Reason each where declined: IN_FLIGHT, ADMISSION, BUDGET, NO_SPACE, OVERLOADED, BAD_LENGTH,
    RECOVERING, DRIVE_ERROR, INDEX_FULL, FENCED; BUSY where the caller waits."""

    reservations: NDArray[np.uint64]
    """Zero where nothing was reserved."""

    offsets: NDArray[np.uint64]
    """In the shard, in bytes; zero where nothing was reserved."""

    @classmethod
    def none(cls, exists: NDArray[np.bool_], reasons: NDArray[np.uint8] | Reason) -> Allocations:
        """Reserve nothing: blocks either EXIST, or are declined for one reason or a Reason each."""
        count = len(exists)
        states, why = filled(count, PutState.DECLINED), np.empty(count, np.uint8)
        why[:] = reasons
        states[exists], why[exists] = PutState.EXISTS, Reason.NONE
        return cls(states, why, np.zeros(count, np.uint64), np.zeros(count, np.uint64))


@dataclass(frozen=True, slots=True)
class SummaryWrite:
    """Summary pages to write: all pieces before ``ShardCore.written`` is called, in any order."""

    number: int
    segment: int
    generation: Generation
    pieces: tuple[tuple[int, bytes], ...]
    """Offset in the shard and whole pages, each."""


@dataclass(frozen=True, slots=True, eq=False)
class CommitResults:
    """Final results of commits."""

    reservations: NDArray[np.uint64]
    states: NDArray[np.uint8]
    """COMMITTED, or DECLINED if the summary could not be written, or may not be written any more."""

    reasons: NDArray[np.uint8]


@dataclass(slots=True, kw_only=True)
class ShardCounters:
    """Events in a shard since its owner began."""

    keys_asked: int = 0
    keys_found: int = 0
    blocks_reserved: int = 0
    blocks_committed: int = 0
    bytes_committed: int = 0
    """Bytes on flash: whole pages."""

    blocks_reinserted: int = 0
    bytes_reinserted: int = 0
    summary_bytes: int = 0
    """Bytes of summary pages written."""

    blocks_evicted: int = 0
    blocks_evicted_unread: int = 0
    """Evicted without a read in the later part of the round, or since the end of the session."""

    blocks_beyond_limit: int = 0
    """Found on flash by recovery, and left out of a full index."""

    blocks_adopted: int = 0
    """Found and listed when summaries of withheld segments were read again."""

    blocks_dropped: int = 0
    """Found damaged, and confirmed so."""

    segments_evicted: int = 0
    segments_kept: int = 0
    """Segments that stayed in place for another round."""

    summary_writes: int = 0
    summary_write_failures: int = 0


@dataclass(slots=True, kw_only=True)
class ShardCounts(ShardCounters):
    """Content of a shard, and events since its owner began."""

    blocks: int
    blocks_max: int
    is_index_full: bool
    """Whether the last eviction was for room in the index, and no room has come otherwise since."""

    block_bytes: int
    """Bytes of all readable blocks."""

    capacity_bytes: int
    """Bytes of all data areas."""

    segments: Mapping[SegmentState, int]
    pools: Mapping[int, int]
    """Bytes allocated in the segments of each pool; whole data areas of recovered segments."""

    pins: int
    reservations: int
    """Reservations and commits under way."""

    segments_unreadable: int
    """Segments with unreadable summary pages, not written anew since recovery."""
