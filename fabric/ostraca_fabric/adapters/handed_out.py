"""What an owner's answer hands out: pins and reservations, which somebody must give back.

An answer that comes when nobody waits for it any more would keep them until they run out by themselves.
"""

from __future__ import annotations

from ostraca_fabric.wire.messages import (
    Message,
    Release,
    Reserved,
    Resolved,
    ShardExtents,
    ShardRelease,
    ShardReservations,
)


def release_of(answer: Message) -> Release | None:
    """Return what gives everything back that an answer hands out; None when that is nothing."""
    if not isinstance(answer, Resolved | Reserved):
        return None
    releases = tuple(release for part in answer.shards if (release := _of_shard(part)) is not None)
    return Release(releases) if releases else None


def _of_shard(part: ShardExtents | ShardReservations) -> ShardRelease | None:
    if isinstance(part, ShardExtents):
        return ShardRelease(part.shard, (part.pin,)) if part.pin else None
    return ShardRelease(part.shard, (), part.reservations) if part.reservations else None
