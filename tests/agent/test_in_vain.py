from __future__ import annotations

from dataclasses import replace

import pytest
from tests.agent.test_plan import world

from ostraca_dpu_agent.steward.in_vain import InVain
from ostraca_fabric.fabric_map import Claim, FabricMap
from ostraca_fabric.ids import AgentId, OwnerEpoch, ShardId, StartId

ME = AgentId("agent-0")


@pytest.fixture
def fabric_map() -> FabricMap:
    return world(4, 3)[0]


@pytest.fixture
def in_vain(fabric_map: FabricMap) -> InVain:
    """Of an agent that has seen the map."""
    made = InVain(ME)
    assert not made.holds_back(fabric_map, 0.0)
    return made


def shard(fabric_map: FabricMap, number: int = 0) -> ShardId:
    return fabric_map.shards()[number].id


def test_what_comes_back_holds_the_next_back_for_longer_each_time(
    fabric_map: FabricMap, in_vain: InVain
) -> None:
    waits = []
    now_s = 0.0
    for _ in range(8):
        in_vain.handed_over(shard(fabric_map))
        assert not in_vain.holds_back(fabric_map, now_s)
        in_vain.taken_back(shard(fabric_map), now_s)
        begun_s = now_s
        while in_vain.holds_back(fabric_map, now_s):
            now_s += 60.0
        waits.append(now_s - begun_s)
    assert waits == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]


def test_a_shard_that_was_not_handed_over_does_not_come_back(fabric_map: FabricMap, in_vain: InVain) -> None:
    in_vain.handed_over(shard(fabric_map))
    in_vain.taken_back(shard(fabric_map, 1), 0.0)
    assert not in_vain.holds_back(fabric_map, 0.0)


@pytest.mark.parametrize("change", ["an agent comes", "an agent starts anew", "one is taken"])
def test_it_tries_again_when_things_have_changed(fabric_map: FabricMap, in_vain: InVain, change: str) -> None:
    in_vain.handed_over(shard(fabric_map))
    in_vain.handed_over(shard(fabric_map, 1))
    in_vain.taken_back(shard(fabric_map), 0.0)
    assert in_vain.holds_back(fabric_map, 1.0)
    other = AgentId("agent-1")
    agents = dict(fabric_map.agents)
    match change:
        case "an agent comes":
            agents[AgentId("agent-9")] = replace(agents[other], id=AgentId("agent-9"))
            after = replace(fabric_map, agents=agents)
        case "an agent starts anew":
            agents[other] = replace(agents[other], start=StartId(b"z" * 16))
            after = replace(fabric_map, agents=agents)
        case _:
            claim = Claim(other, agents[other].start, OwnerEpoch(1))
            after = replace(fabric_map, claims={shard(fabric_map, 1): claim})
    assert not in_vain.holds_back(after, 1.0)
    in_vain.handed_over(shard(fabric_map))
    in_vain.taken_back(shard(fabric_map), 1.0)
    assert in_vain.holds_back(after, 60.0)
    assert not in_vain.holds_back(after, 61.0), "and begins with the shortest wait"
