"""Why an owner has no space to hand out, though it may write.

Segments come back by themselves: grants of earlier owners are retired, readers and late writes end, the store
records a grant. Until one does every put of a new block is declined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.sentences import counted

if TYPE_CHECKING:
    from ostraca_dpu_agent.owner.core.pools import Pool
    from ostraca_dpu_agent.owner.core.shard import ShardCore


@dataclass(frozen=True, slots=True)
class Lack:
    """Why there is no space, and for how long."""

    why: str
    """As a clause."""

    ends_in_s: float | None
    """How long until there is some again, at most; None where nobody can say."""


def lack_of_space(core: ShardCore, now_s: float, *, retires_in_s: float | None) -> Lack | None:
    """Say why nothing could be handed out now; None where something could, and where it is not space that is
    lacking. *retires_in_s*: until the last grant of an earlier owner may be retired.
    """
    if core.is_recovering or not core.is_writable or not core.grants.may_write(now_s):
        return None
    return None if _has_space(core) else _lack(core, now_s, retires_in_s)


def _has_space(core: ShardCore) -> bool:
    ring = core.ring
    if ring.ready or ring.opening is not None or core.grants.first_free() is not None:
        return True
    return any(_has_room(core, pool) for pool in ring.all_pools())


def _lack(core: ShardCore, now_s: float, retires_in_s: float | None) -> Lack:
    ring, pools = core.ring, list(core.ring.all_pools())
    if any(next(core.grants.oldest_sealed(pool), None) is not None for pool in pools):
        return Lack("the segments that it may write are still being written or read", None)
    if ring.free or any(pool.sealed for pool in pools):
        return Lack("the membership store has not recorded its grant of more segments yet", None)
    if ring.draining:
        left_s = max(0.0, min(segment.quiet_at_s for segment in ring.draining) - now_s)
        waits = f"{counted(len(ring.draining), 'segment')} that it emptied may still be read or written"
        return Lack(waits, left_s or None)
    return Lack(
        f"writes of an earlier owner may still land in {len(ring.withheld)} of its "
        f"{counted(len(ring.segments), 'segment')}",
        retires_in_s,
    )


def _has_room(core: ShardCore, pool: Pool) -> bool:
    """Say whether the segment that a pool writes takes one more block, were it small."""
    current = pool.current
    return (
        current is not None
        and not current.is_short
        and current.bytes_used + PAGE_BYTES <= core.geometry.data_bytes
        and current.entries_used < pool.part.entries_max
    )
