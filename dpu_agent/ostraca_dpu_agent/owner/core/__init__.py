"""What an owner decides about one shard: where blocks lie, who may write where, what is evicted. Pure.

``ShardCore`` takes calls and the time, and returns decisions and summary pages to write; its caller does the
I/O and says how it ended. Segments go round::

    FREE -> OPENING -> OPEN -> SEALED -> DRAINING -> FREE

OPENING waits for an empty summary page of the new generation, OPEN hands out space, DRAINING has left the
index and waits until nobody reads or writes in it any more.
"""

from __future__ import annotations

from ostraca_dpu_agent.owner.core.answers import (
    CommitAnswer,
    CommitsDone,
    Reservations,
    Resolution,
    SummaryWrite,
)
from ostraca_dpu_agent.owner.core.counts import ShardCounts
from ostraca_dpu_agent.owner.core.evicting import Carry
from ostraca_dpu_agent.owner.core.holds import slots_in
from ostraca_dpu_agent.owner.core.lacking import lack_of_space
from ostraca_dpu_agent.owner.core.passing import Passing
from ostraca_dpu_agent.owner.core.recovering import recovered_share
from ostraca_dpu_agent.owner.core.scrubbing import Scrub, ScrubSettings
from ostraca_dpu_agent.owner.core.segments import SegmentState
from ostraca_dpu_agent.owner.core.settings import ShardSettings
from ostraca_dpu_agent.owner.core.shard import ShardCore

__all__ = [
    "Carry",
    "CommitAnswer",
    "CommitsDone",
    "Passing",
    "Reservations",
    "Resolution",
    "Scrub",
    "ScrubSettings",
    "SegmentState",
    "ShardCore",
    "ShardCounts",
    "ShardSettings",
    "SummaryWrite",
    "lack_of_space",
    "recovered_share",
    "slots_in",
]
