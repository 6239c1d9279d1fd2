"""Where blocks were found, and in which order that is read."""

from __future__ import annotations

from collections import deque

import numpy as np

from ostraca_dpu_agent.mover.located import Located, Source
from ostraca_dpu_agent.mover.request import Queue, in_turns
from ostraca_fabric.ids import AgentId, DriveId, ShardId


def test_blocks_are_sorted_out_by_drive_and_keep_their_order_on_each() -> None:
    located = Located.nothing(10)
    drives = ("one", "two", "one", "three")  # two shards lie on the first drive
    located.sources = [
        Source(AgentId("a"), ShardId(str(number)), DriveId(drive), 0) for number, drive in enumerate(drives)
    ]
    located.source[:] = [0, 0, 1, 0, 2, 2, 1, 1, 0, 2]
    sorted_out = {drive: its.tolist() for drive, its in located.by_drive(np.array([0, 1, 2, 4, 7, 9]))}
    assert sorted_out == {"one": [0, 1, 4, 9], "two": [2, 7]}
    assert located.by_drive(np.zeros(0, np.intp)) == []


def queue(drive: str, waves: int) -> Queue:
    return DriveId(drive), deque(np.arange(1) for _ in range(waves))


def test_drives_share_the_lanes_evenly_and_take_turns() -> None:
    queues = [queue("one", 5), queue("two", 1), queue("three", 5)]
    assert [drive for drive, _ in in_turns(queues, lanes=8)] == ["one", "two", "three", "one", "three"]


def test_each_drive_has_a_lane_however_many_there_are() -> None:
    queues = [queue(str(number), 3) for number in range(20)]
    assert [drive for drive, _ in in_turns(queues, lanes=16)] == [str(number) for number in range(20)]
    assert in_turns([], lanes=16) == []
