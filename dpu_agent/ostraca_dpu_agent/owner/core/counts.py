"""What a shard holds and has done since its owner began."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_dpu_agent.owner.core.segments import SegmentState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ostraca_dpu_agent.owner.core.segments import Segment
    from ostraca_dpu_agent.owner.core.shard import ShardCore


_HOLDING = (SegmentState.OPEN, SegmentState.SEALED, SegmentState.WITHHELD)


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """What a shard holds and has done since its owner began."""

    blocks: int
    blocks_max: int
    block_bytes: int
    """Bytes of the blocks that can be got."""

    capacity_bytes: int
    """Data areas of all segments."""

    segments: Mapping[SegmentState, int]
    pools: Mapping[int, int]
    """Bytes handed out in the segments of each pool that has any; whole data areas of those that were
    recovered."""

    pins: int
    reservations: int
    """Reservations and commits under way."""

    keys_asked: int
    keys_found: int
    blocks_reserved: int
    blocks_committed: int
    bytes_committed: int
    """What these take on flash: whole pages."""

    blocks_carried: int
    """Copied forward from segments that were evicted."""

    bytes_carried: int
    summary_bytes: int
    """Of summary pages written."""

    blocks_evicted: int
    blocks_evicted_unread: int
    """Evicted without having been found in the later half of their round through the ring, or since whoever
    used them said that their session ended."""

    blocks_beyond_limit: int
    """Found on flash by recovery and not listed: the index may not hold so many."""

    segments_unreadable: int
    """Of whose summaries recovery could not read all, and that were not written anew since."""

    blocks_adopted: int
    """Found when summaries of withheld segments were read again, and listed."""

    blocks_dropped: int
    """Damaged, and confirmed so."""

    segments_evicted: int
    segments_kept: int
    """Times that one went round again where it was."""

    summary_writes: int
    summary_write_failures: int


def counts_of(core: ShardCore, *, by_segment: bool = True) -> ShardCounts:
    """Count. Looking at each of a large shard's segments takes milliseconds: unless *by_segment*, the counts
    of segments and pools are left out.
    """
    segments, counted = core.ring.segments if by_segment else (), core.counted
    by_state = Counter(segment.state for segment in segments)
    return ShardCounts(
        blocks=len(core.index),
        blocks_max=core.index.blocks_max,
        block_bytes=core.index.block_bytes,
        capacity_bytes=core.geometry.segments * core.geometry.data_bytes,
        segments={state: by_state[state] for state in SegmentState},
        pools=_bytes_by_pool(segments),
        pins=len(core.pins),
        reservations=len(core.reservations),
        keys_asked=counted["keys_asked"],
        keys_found=counted["keys_found"],
        blocks_reserved=counted["blocks_reserved"],
        blocks_committed=counted["blocks_committed"],
        bytes_committed=counted["bytes_committed"],
        blocks_carried=counted["blocks_carried"],
        bytes_carried=counted["bytes_carried"],
        summary_bytes=counted["summary_bytes"],
        blocks_evicted=counted["blocks_evicted"],
        blocks_evicted_unread=counted["blocks_evicted_unread"],
        blocks_beyond_limit=counted["blocks_beyond_limit"],
        segments_unreadable=len(core.ring.unreadable),
        blocks_adopted=counted["blocks_adopted"],
        blocks_dropped=counted["blocks_dropped"],
        segments_evicted=counted["segments_evicted"],
        segments_kept=counted["segments_kept"],
        summary_writes=counted["summary_writes"],
        summary_write_failures=counted["summary_write_failures"],
    )


def _bytes_by_pool(segments: Iterable[Segment]) -> Mapping[int, int]:
    by_pool: Counter[int] = Counter()
    for segment in segments:
        if segment.entries_used and segment.state in _HOLDING:
            by_pool[segment.pool] += segment.bytes_used
    return by_pool
