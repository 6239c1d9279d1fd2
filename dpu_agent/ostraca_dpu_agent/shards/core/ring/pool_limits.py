"""Limits of each pool on one shard: segments and index entries. Pure arithmetic.

A pool has whole segments: the share rounded down, but at least two, so that a write and an eviction can
overlap. If the shares exceed the ring less the segments kept free and the common pool's minimum, all shares
are scaled down. If a shard has too few segments, the pools of the largest shares get two, and blocks of the
others lie in the common pool.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

COMMON = 0
"""Pool of all blocks without a share."""

POOLS_MAX = 256
"""Limit of pools with a share on one shard. Each pool keeps a segment open, writes a summary page with each
group of commits, and is examined by each eviction."""

_SEGMENTS_MIN = 2
"""Minimum of segments of a pool."""

_COMMON_SHARE_MIN = 32
"""The common pool keeps ``1 / _COMMON_SHARE_MIN`` of all segments at any sum of shares."""

_EXAMINED_SHARE = 32
"""A pool has ``1 / _EXAMINED_SHARE`` of the segments examined ahead of eviction."""

AGED_AT = 0.2
"""Position between sealing and examination of a segment after which reads of blocks count."""

_HEADROOM_SHARE = 8
"""A pool's oldest segment is evicted when less than ``1 / _HEADROOM_SHARE`` of the pool's entries is left."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of a pool on a shard."""

    segments_max: int
    """Segments of the pool. Only the common pool exceeds this limit, while no other pool needs the segments.
    """

    index_entries_max: int
    """Index entries of the pool."""

    entries_max: int
    """Blocks in one segment of the pool."""

    headroom: int
    """Index entries kept free ahead of need."""

    look_ahead: int
    """Segments that are free or examined ahead of need."""

    aged_behind: int
    """Sealed segments younger than the youngest segment whose early reads are forgotten."""


@dataclass(frozen=True, slots=True)
class RingDimensions:
    """Dimensions of a shard, to be divided among pools."""

    segments: int
    kept_free: int
    """Segments kept free for any pool."""

    look_ahead: int
    """Segments of the common pool that are free or examined ahead of need."""

    blocks_max: int
    """Blocks in the index."""

    entries_max: int
    """Blocks in one segment."""

    headroom: int
    """Index entries kept free ahead of need."""

    @property
    def usable_segments(self) -> int:
        """Segments less those kept free."""
        return self.segments - max(1, self.kept_free)


def pool_limits(shares: Mapping[int, float], ring: RingDimensions) -> dict[int, PoolLimits]:
    """Return the limits of each pool with a part of this shard, and of the common pool, which has the rest.

    *shares*: by pool, each above 0; the common pool's share is ignored.
    """
    chosen = _segments_of(
        {pool: share for pool, share in shares.items() if pool != COMMON and share > 0}, ring
    )
    entries = ring.blocks_max - ring.headroom
    limits = {
        pool: _limits(segments, entries * segments // ring.usable_segments, ring)
        for pool, segments in chosen.items()
    }
    common_segments = ring.usable_segments - sum(chosen.values())
    limits[COMMON] = PoolLimits(
        segments_max=common_segments,
        index_entries_max=entries - sum(each.index_entries_max for each in limits.values()),
        entries_max=ring.entries_max,
        headroom=ring.headroom,
        look_ahead=ring.look_ahead,
        aged_behind=int(AGED_AT * max(0, common_segments - 1 - ring.look_ahead)),
    )
    return limits


def _segments_of(shares: Mapping[int, float], ring: RingDimensions) -> dict[int, int]:
    room = ring.usable_segments - max(_SEGMENTS_MIN, ring.segments // _COMMON_SHARE_MIN)
    largest_first = sorted(shares, key=lambda pool: (-shares[pool], pool))
    chosen = largest_first[: max(0, min(room // _SEGMENTS_MIN, POOLS_MAX))]
    scale = min(1.0, room / ring.segments / max(sum(shares[pool] for pool in chosen), 1e-12))
    more = {
        pool: max(0, math.floor(shares[pool] * scale * ring.segments + 1e-9) - _SEGMENTS_MIN)
        for pool in chosen
    }
    left, wanted = room - _SEGMENTS_MIN * len(chosen), sum(more.values())
    if wanted > left:
        more = {pool: segments * left // wanted for pool, segments in more.items()}
    return {pool: _SEGMENTS_MIN + segments for pool, segments in more.items()}


def _limits(segments: int, index_entries_max: int, ring: RingDimensions) -> PoolLimits:
    # At least two segments hold a pool's entries, so that the eviction of one leaves some.
    entries_max = min(ring.entries_max, max(1, index_entries_max // _SEGMENTS_MIN))
    look_ahead = 1 + max(1, segments // _EXAMINED_SHARE)
    return PoolLimits(
        segments_max=segments,
        index_entries_max=index_entries_max,
        entries_max=entries_max,
        headroom=min(entries_max, index_entries_max // _HEADROOM_SHARE),
        look_ahead=look_ahead,
        aged_behind=int(AGED_AT * max(0, segments - 1 - look_ahead)),
    )
