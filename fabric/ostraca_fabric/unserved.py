"""What nobody serves, as one agent knows it: shards without an owner, and drives that it can't use."""

from __future__ import annotations

import msgspec

UNOWNED_S = 10.0
"""How long a shard is usually without an owner, at most. A claim goes with the lease of a dead agent, and is
made anew at once by the agent that is preferred, or a few seconds later by the next one."""

TOLD_MAX = 64
"""Of a kind so many are named, and all are counted: a status is one message."""


class UnservedShard(msgspec.Struct, frozen=True):
    """A shard that nobody owns: its blocks are misses, and puts of them are declined."""

    shard: str
    unowned_s: float
    """For how long, as far as this agent has watched."""

    why: str = ""
    """Why this agent does not serve it, as a clause; empty where it could, and leaves it to another one."""


class UnusedDrive(msgspec.Struct, frozen=True):
    """A drive of the map that this agent has not attached: what lies there are misses for its workers."""

    drive: str
    why: str
    """As a clause."""


class Unserved(msgspec.Struct, frozen=True):
    """What one agent knows of all that nobody serves, and of what it can't serve itself."""

    shard_count: int = 0
    shards: tuple[UnservedShard, ...] = ()
    """Those that have been without an owner longest."""

    drive_count: int = 0
    drives: tuple[UnusedDrive, ...] = ()

    @property
    def longest_s(self) -> float:
        """How long some shard has been without an owner; 0 while each has one."""
        return self.shards[0].unowned_s if self.shards else 0.0
