"""Order of a request's waves over its drives."""

from __future__ import annotations

from collections import deque

from ostraca_dpu_agent.datapath.flash_io import interleave_drives
from ostraca_fabric.model.ids import DriveId


def queue(drive: str, waves: int) -> tuple[DriveId, deque[slice]]:
    return DriveId(drive), deque(slice(1) for _ in range(waves))


def test_drives_share_the_lanes_evenly_and_take_turns() -> None:
    queues = [queue("one", 5), queue("two", 1), queue("three", 5)]
    assert [drive for drive, _ in interleave_drives(queues, lanes=8)] == [
        "one",
        "two",
        "three",
        "one",
        "three",
    ]


def test_each_drive_has_a_lane_however_many_there_are() -> None:
    queues = [queue(str(number), 3) for number in range(20)]
    assert [drive for drive, _ in interleave_drives(queues, lanes=16)] == [
        str(number) for number in range(20)
    ]
    assert interleave_drives([], lanes=16) == []
