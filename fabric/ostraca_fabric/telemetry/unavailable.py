"""Shards without an owner and unusable drives, as known at one agent."""

from __future__ import annotations

import msgspec

UNOWNED_S = 10.0
"""Longest usual time of a shard without an owner.

A claim ends with the lease of a dead agent. The preferred agent claims the shard at once, the next agent a
few seconds later.
"""

TOLD_MAX = 64
"""Most named entries of each kind, for a status within one message; the counts cover all."""


class UnownedShard(msgspec.Struct, frozen=True):
    """Shard without an owner: its blocks are misses, and puts are declined."""

    shard: str
    unowned_s: float
    """Time without an owner, as far as this agent has observed."""

    why: str = ""
    """Why this agent does not serve the shard, as a clause; empty if able but leaving the shard to another
    agent."""


class UnusedDrive(msgspec.Struct, frozen=True):
    """Drive of the map without a path from this agent: a miss for its workers."""

    drive: str
    why: str
    """The cause, as a clause."""


class Unavailable(msgspec.Struct, frozen=True):
    """Unowned shards of the fabric and drives unusable for one agent."""

    shard_count: int = 0
    shards: tuple[UnownedShard, ...] = ()
    """The shards without an owner for longest."""

    drive_count: int = 0
    drives: tuple[UnusedDrive, ...] = ()

    @property
    def longest_s(self) -> float:
        """Longest time of a shard without an owner; 0 while each has an owner."""
        return self.shards[0].unowned_s if self.shards else 0.0
