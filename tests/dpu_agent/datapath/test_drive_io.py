"""Plans of reads, and the order of a request's parts over its drives."""

from __future__ import annotations

from collections import deque

import numpy as np

from ostraca_dpu_agent.datapath.drive_io import ReadPlan, interleave_drives
from ostraca_dpu_agent.datapath.location.routing import BlockLocations, BlockSource
from ostraca_fabric.model.ids import AgentId, DriveId, ShardId


def test_parts_are_read_in_the_order_of_the_request_and_their_blocks_in_that_of_the_drive() -> None:
    located = BlockLocations.empty(7)
    located.sources = [
        BlockSource(AgentId("a"), ShardId(shard), DriveId(drive), base)
        for shard, drive, base in (("s0", "one", 0), ("s1", "two", 1 << 20), ("s2", "one", 1 << 30))
    ]
    located.source[:] = [2, 0, 1, 0, 2, 0, 1]
    located.lengths[:] = 5000
    located.offsets[:] = np.array([9, 8, 1, 7, 3, 2, 0]) * 8192
    located.tags[:, 0] = np.arange(7)
    plan = ReadPlan.of(located, np.arange(7, dtype=np.uint64), np.array([0, 1, 2, 3, 4, 6]), per_part=2)
    assert plan.positions.tolist() == [1, 0, 3, 4, 6, 2]
    assert plan.queues == [
        (DriveId("one"), deque([slice(0, 2), slice(2, 4)])),
        (DriveId("two"), deque([slice(4, 6)])),
    ]
    assert plan.drive_offsets.tolist() == [
        8 * 8192,
        (1 << 30) + 9 * 8192,
        7 * 8192,
        (1 << 30) + 3 * 8192,
        1 << 20,
        (1 << 20) + 8192,
    ]
    assert plan.page_lengths.tolist() == [8192] * 6
    assert plan.seeds.tolist() == plan.tags[:, 0].tolist() == plan.positions.tolist()


def test_the_first_of_several_parts_of_a_drive_may_be_short() -> None:
    located = BlockLocations.empty(12)
    located.sources = [
        BlockSource(AgentId("a"), ShardId(shard), DriveId(drive), 0)
        for shard, drive in (("s0", "one"), ("s1", "two"))
    ]
    located.source[:] = [0] * 9 + [1] * 3
    located.lengths[:] = 5000
    located.offsets[:] = np.arange(12)[::-1] * 8192
    seeds, positions = np.arange(12, dtype=np.uint64), np.arange(12)
    plan = ReadPlan.of(located, seeds, positions, per_part=3, per_first=2)
    assert plan.queues == [
        (DriveId("one"), deque([slice(0, 2), slice(2, 5), slice(5, 8), slice(8, 9)])),
        (DriveId("two"), deque([slice(9, 12)])),
    ]
    assert plan.positions.tolist() == [1, 0, 4, 3, 2, 7, 6, 5, 8, 11, 10, 9]


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


def test_any_number_of_lanes_is_answered_at_once() -> None:
    queues = [queue("one", 2), queue("two", 1)]
    assert [drive for drive, _ in interleave_drives(queues, lanes=10**18)] == ["one", "two", "one"]
