"""Diagnosis of a shard without space, though its owner may write.

Segments come back by themselves: grants of earlier owners are retired, readers and late writes end, the store
records a grant. Until then every put of a new block waits, or is declined at its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostraca_dpu_agent.shards.core.grants import Grants
from ostraca_dpu_agent.shards.core.ring.pools import Pool
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.runtime.sentences import counted


@dataclass(frozen=True, slots=True)
class SpaceShortage:
    """Cause of a lack of space, and its duration."""

    why: str
    """A clause."""

    ends_in_s: float | None
    """Longest time until there is space again; None if unknown."""


def space_shortage(
    ring: Ring, grants: Grants, now_s: float, *, retires_in_s: float | None
) -> SpaceShortage | None:
    """Return the cause if nothing could be allocated now for lack of space, or None.

    *retires_in_s*: time until the last grant of an earlier owner may be retired.
    """
    if grants.refusal(now_s) is not Reason.NONE or _has_space(ring, grants):
        return None
    if any(next(grants.oldest_sealed(pool), None) is not None for pool in ring.pools):
        return SpaceShortage("the segments that it may write are still being written or read", None)
    if ring.free or any(pool.sealed for pool in ring.pools):
        return SpaceShortage("the membership store has not recorded its grant of more segments yet", None)
    if ring.draining:
        left_s = max(0.0, min(segment.quiet_at_s for segment in ring.draining) - now_s)
        waits = f"{counted(len(ring.draining), 'evicted segment')} may still be read or written"
        return SpaceShortage(waits, left_s or None)
    return SpaceShortage(
        f"writes of an earlier owner may still land in {len(ring.withheld)} of its "
        f"{counted(len(ring.segments), 'segment')}",
        retires_in_s,
    )


def may_get_space(ring: Ring, grants: Grants, now_s: float, *, within_s: float) -> bool:
    """Return whether a shard without space may get some by itself within *within_s*.

    A shard of withheld segments only counts as full: only the end of a takeover helps there.
    """
    if grants.refusal(now_s) is not Reason.NONE:
        return False
    if ring.ready or ring.opening or ring.free or any(pool.sealed for pool in ring.pools):
        return True
    return any(segment.quiet_at_s < now_s + within_s for segment in ring.draining)


def _has_space(ring: Ring, grants: Grants) -> bool:
    if ring.ready or ring.opening is not None or grants.first_free() is not None:
        return True
    return any(_has_room(pool, ring.geometry.data_bytes) for pool in ring.pools)


def _has_room(pool: Pool, data_bytes: int) -> bool:
    """Return whether the current segment of a pool takes one more small block."""
    current = pool.current
    return (
        current is not None
        and not current.is_short
        and current.bytes_used + PAGE_BYTES <= data_bytes
        and current.entries_used < pool.limits.entries_max
    )
