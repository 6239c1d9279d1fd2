"""How the segments of a shard, and the entries of its index, are dealt out to pools. Pure arithmetic.

A pool's part is whole segments: its share rounded down, but two at least, so that one can be emptied while
the other is written. Where the shares add up to more than there is beside what is kept free and the common
pool's least, all are scaled down. A shard of few segments can't give two to everybody: then the pools of the
largest shares have theirs, and the others lie in the common pool on this shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

COMMON = 0
"""The pool of everybody that has no share."""

POOLS_MAX = 256
"""Pools with a part of one shard: each keeps a segment open, whose summary page is written with each group
of commits, and is looked at whenever something must go."""

_LEAST = 2
"""Segments that a pool has at least."""

_COMMON_LEAST_SHARE = 32
"""One in so many segments is left to the common pool, whatever the shares add up to."""

_LOOKED_THROUGH_SHARE = 32
"""One in so many of a pool's segments has been looked through for what to keep before it is evicted."""

AGED_AT = 0.2
"""Where, on a sealed segment's way to being looked through, reads of its blocks begin to count."""

_HEADROOM_SHARE = 8
"""A pool's oldest segment goes when less than this share of its entries is left."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one pool has of a shard."""

    segments_max: int
    """It never takes more; the common pool does, while nobody else needs them."""

    entries_most: int
    """Of the index, counted in the same way."""

    entries_max: int
    """Blocks that one of its segments takes."""

    headroom: int
    """How many of its entries are to be free before it needs them."""

    look_ahead: int
    """How many segments are to be free, or looked through."""

    aged_behind: int
    """How many sealed segments are younger than those whose reads so far are forgotten."""


@dataclass(frozen=True, slots=True)
class Measures:
    """What there is to deal out."""

    segments: int
    kept: int
    """Segments that are kept free for whoever needs the next."""

    look_ahead: int
    """Of the common pool: beside the segments kept free."""

    blocks_max: int
    """Of the index."""

    entries_max: int
    """Blocks that one segment takes."""

    headroom: int
    """Entries to be free before anybody needs them."""


def dealt(shares: Mapping[int, float], measures: Measures) -> dict[int, Part]:
    """Return the part of every pool that has one here, and of the common pool, which has the rest.

    *shares*: of the shard, each above 0; the common pool's is not asked for.
    """
    there_are = measures.segments - max(1, measures.kept)
    least = max(_LEAST, measures.segments // _COMMON_LEAST_SHARE)
    chosen = _segments(
        {pool: share for pool, share in shares.items() if pool != COMMON and share > 0}, least, measures
    )
    entries = measures.blocks_max - measures.headroom
    parts = {
        pool: _part(segments, entries * segments // there_are, measures) for pool, segments in chosen.items()
    }
    rest = measures.segments - sum(chosen.values())
    parts[COMMON] = Part(
        segments_max=there_are - sum(chosen.values()),
        entries_most=entries - sum(part.entries_most for part in parts.values()),
        entries_max=measures.entries_max,
        headroom=measures.headroom,
        look_ahead=measures.look_ahead,
        aged_behind=int(AGED_AT * max(0, rest - max(1, measures.kept) - 1 - measures.look_ahead)),
    )
    return parts


def _segments(shares: Mapping[int, float], common_least: int, measures: Measures) -> dict[int, int]:
    room = measures.segments - max(1, measures.kept) - common_least
    largest_first = sorted(shares, key=lambda pool: (-shares[pool], pool))
    chosen = largest_first[: max(0, min(room // _LEAST, POOLS_MAX))]
    scale = min(1.0, room / measures.segments / max(sum(shares[pool] for pool in chosen), 1e-12))
    more = {
        pool: max(0, math.floor(shares[pool] * scale * measures.segments + 1e-9) - _LEAST) for pool in chosen
    }
    left, wanted = room - _LEAST * len(chosen), sum(more.values())
    if wanted > left:
        more = {pool: segments * left // wanted for pool, segments in more.items()}
    return {pool: _LEAST + segments for pool, segments in more.items()}


def _part(segments: int, entries_most: int, measures: Measures) -> Part:
    # Two segments at least hold a pool's entries, so that emptying one leaves some.
    entries_max = min(measures.entries_max, max(1, entries_most // _LEAST))
    look_ahead = 1 + max(1, segments // _LOOKED_THROUGH_SHARE)
    return Part(
        segments_max=segments,
        entries_most=entries_most,
        entries_max=entries_max,
        headroom=min(entries_max, entries_most // _HEADROOM_SHARE),
        look_ahead=look_ahead,
        aged_behind=int(AGED_AT * max(0, segments - 1 - look_ahead)),
    )
