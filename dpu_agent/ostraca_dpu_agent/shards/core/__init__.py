"""Decisions of the owner of one shard: extents of blocks, allocation, eviction. Pure.

``ShardCore`` takes calls and the time, and returns decisions and summary pages to write; its caller does the
I/O and reports the results. Segments go through a cycle::

    FREE -> OPENING -> OPEN -> SEALED -> DRAINING -> FREE

An OPENING segment waits for an empty summary page of its new generation. An OPEN segment has space for new
blocks. A DRAINING segment has left the index, and waits for the end of reads and writes.
"""

from __future__ import annotations

from ostraca_dpu_agent.shards.core.answers import (
    Allocations,
    CommitResults,
    Resolution,
    ShardCounters,
    ShardCounts,
    ShardSettings,
    SummaryWrite,
)
from ostraca_dpu_agent.shards.core.eviction import ReinsertionBatch
from ostraca_dpu_agent.shards.core.grants import may_get_space, space_shortage
from ostraca_dpu_agent.shards.core.reservations import slots_in
from ostraca_dpu_agent.shards.core.ring.pools import SegmentState
from ostraca_dpu_agent.shards.core.shard_core import ShardCore, has_in_each

__all__ = [
    "Allocations",
    "CommitResults",
    "ReinsertionBatch",
    "Resolution",
    "SegmentState",
    "ShardCore",
    "ShardCounters",
    "ShardCounts",
    "ShardSettings",
    "SummaryWrite",
    "has_in_each",
    "may_get_space",
    "slots_in",
    "space_shortage",
]
