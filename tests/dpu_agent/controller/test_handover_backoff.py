from __future__ import annotations

from dataclasses import replace

import pytest
from tests.dpu_agent.controller.test_plan import world

from ostraca_dpu_agent.controller.controller import HandoverBackoff
from ostraca_fabric.model.fabric_map import Claim, FabricMap
from ostraca_fabric.model.ids import AgentId, OwnerEpoch, ShardId, StartId

ME = AgentId("agent-0")


@pytest.fixture
def fabric_map() -> FabricMap:
    return world(4, 3)[0]


@pytest.fixture
def backoff(fabric_map: FabricMap) -> HandoverBackoff:
    """Of an agent that has seen the map."""
    made = HandoverBackoff(ME)
    assert not made.is_active(fabric_map, 0.0)
    return made


def shard(fabric_map: FabricMap, number: int = 0) -> ShardId:
    return fabric_map.shards()[number].id


def test_each_failed_handover_lengthens_the_pause(fabric_map: FabricMap, backoff: HandoverBackoff) -> None:
    waits = []
    now_s = 0.0
    for _ in range(8):
        backoff.note_handover(shard(fabric_map))
        assert not backoff.is_active(fabric_map, now_s)
        backoff.note_claim(shard(fabric_map), now_s)
        begun_s = now_s
        while backoff.is_active(fabric_map, now_s):
            now_s += 60.0
        waits.append(now_s - begun_s)
    assert waits == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]


def test_claim_without_a_handover_causes_no_pause(fabric_map: FabricMap, backoff: HandoverBackoff) -> None:
    backoff.note_handover(shard(fabric_map))
    backoff.note_claim(shard(fabric_map, 1), 0.0)
    assert not backoff.is_active(fabric_map, 0.0)


@pytest.mark.parametrize("change", ["an agent comes", "an agent starts anew", "one is taken"])
def test_handovers_resume_after_a_change(
    fabric_map: FabricMap, backoff: HandoverBackoff, change: str
) -> None:
    backoff.note_handover(shard(fabric_map))
    backoff.note_handover(shard(fabric_map, 1))
    backoff.note_claim(shard(fabric_map), 0.0)
    assert backoff.is_active(fabric_map, 1.0)
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
    assert not backoff.is_active(after, 1.0)
    backoff.note_handover(shard(fabric_map))
    backoff.note_claim(shard(fabric_map), 1.0)
    assert backoff.is_active(after, 60.0)
    assert not backoff.is_active(after, 61.0), "and begins with the shortest wait"
