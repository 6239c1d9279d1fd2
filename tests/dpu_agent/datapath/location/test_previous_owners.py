"""Owners before are asked while the next one reads what there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ostraca_dpu_agent.datapath.location.routing import PreviousOwners
from ostraca_fabric.model.fabric_map import AgentRecord, Claim, FabricMap
from ostraca_fabric.model.ids import AgentId, FabricId, OwnerEpoch, PlacementEpoch, ShardId, StartId

A, B, C, SHARD = AgentId("a"), AgentId("b"), AgentId("c"), ShardId("e/d/0")
START = StartId(b"s" * 16)
EMPTY = FabricMap(
    FabricId(bytes(16)),
    1,
    PlacementEpoch(1),
    {agent: AgentRecord(agent, START, ()) for agent in (A, B)},
)


def owned_by(agent: AgentId | None, *, without: AgentId | None = None) -> FabricMap:
    agents = {name: record for name, record in EMPTY.agents.items() if name != without}
    claims = {} if agent is None else {SHARD: Claim(agent, START, OwnerEpoch(1))}
    return replace(EMPTY, agents=agents, claims=claims)


def after(*maps: FabricMap, now_s: list[float] | None = None, own: AgentId = C) -> PreviousOwners:
    clock = now_s or [0.0]
    known = PreviousOwners(own, lambda: clock[0], lasts_s=10.0)
    for before, newer in pairwise(maps):
        known.on_map(before, newer)
    return known


def test_who_gave_a_shard_back_is_asked_until_another_has_had_it_for_a_while() -> None:
    now_s = [0.0]
    known = after(owned_by(A), owned_by(None), now_s=now_s)
    now_s[0] = 99.0
    assert known.owners == {SHARD: A}
    known.on_map(owned_by(None), owned_by(B))
    assert known.owners == {SHARD: A}
    now_s[0] = 108.9
    known.on_map(owned_by(B), owned_by(B))
    assert known.owners == {SHARD: A}
    now_s[0] = 109.0
    assert known.owners == {}


def test_who_has_left_the_fabric_is_not_asked() -> None:
    assert after(owned_by(A), owned_by(None, without=A)).owners == {}
    assert after(owned_by(A), owned_by(B, without=A)).owners == {}


def test_an_agent_that_has_lost_its_own_lease_goes_on_until_another_has_had_the_shard_for_a_while() -> None:
    now_s = [0.0]
    known = after(owned_by(A), owned_by(None, without=A), now_s=now_s, own=A)
    now_s[0] = 99.0
    assert known.owners == {SHARD: A}
    known.on_map(owned_by(None, without=A), owned_by(B, without=A))
    now_s[0] = 109.0
    assert known.owners == {}


def test_who_has_the_shard_again_is_its_owner_and_nothing_else() -> None:
    assert after(owned_by(A), owned_by(None), owned_by(A)).owners == {}
    assert after(owned_by(A), owned_by(B), owned_by(A)).owners == {SHARD: B}
