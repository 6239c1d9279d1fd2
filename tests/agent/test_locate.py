"""Where blocks were found, and in which order that is read."""

from __future__ import annotations

import numpy as np

from ostraca_dpu_agent.mover.locate import Located, Source
from ostraca_fabric.ids import AgentId, DriveId, ShardId


def test_waves_that_begin_on_different_drives_take_turns_and_keep_their_order_on_each() -> None:
    located = Located.nothing(10)
    drives = ("one", "two", "one", "three")  # two shards lie on the first drive
    located.sources = [
        Source(AgentId("a"), ShardId(str(number)), DriveId(drive), 0) for number, drive in enumerate(drives)
    ]
    located.source[:] = [0, 0, 0, 0, 2, 2, 1, 1, 3, 3]
    waves = [np.arange(at, at + 2) for at in range(0, 10, 2)]
    ordered = located.in_turns(waves)
    assert [int(wave[0]) for wave in ordered] == [0, 6, 8, 2, 4]
