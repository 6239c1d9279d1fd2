"""Which owners are asked, by values: the current placement epoch's, and those of the ones before."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fabric.policies.test_placement import SECRET, TERABYTE, enclosure
from tests.support.agent.assembly import chain_of

from ostraca_dpu_agent.datapath.location.routing import BlockLocations, BlockSource, Routes, ShardPart
from ostraca_fabric.model.fabric_map import (
    AgentRecord,
    Claim,
    EnclosureRecord,
    FabricMap,
    PlacementRecord,
    weights_of,
)
from ostraca_fabric.model.ids import AgentId, DriveId, FabricId, OwnerEpoch, PlacementEpoch, ShardId, StartId
from ostraca_fabric.policies.placement import Placement

SPANS = chain_of(range(300))
START = StartId(bytes(16))
AGENTS = [AgentId("a"), AgentId("b")]
D, E, F, G = (enclosure(name, [TERABYTE] * 3) for name in "defg")


def fabric_map(*enclosures: EnclosureRecord, earlier: list[list[EnclosureRecord]] | None = None) -> FabricMap:
    """Every shard is owned by one of two agents in turns; *earlier* epochs' enclosures, the newest first."""
    before = earlier or []
    shards = [shard.id for each in enclosures for shard in each.shards]
    return FabricMap(
        FabricId(bytes(16)),
        1,
        PlacementEpoch(10),
        agents={agent: AgentRecord(agent, START, ()) for agent in AGENTS},
        enclosures={each.id: each for each in enclosures},
        claims={
            shard: Claim(AGENTS[number % 2], START, OwnerEpoch(1)) for number, shard in enumerate(shards)
        },
        earlier_placements=tuple(
            PlacementRecord(PlacementEpoch(9 - age), weights_of(each)) for age, each in enumerate(before)
        ),
    )


def asked_of(parts: dict[AgentId, list[ShardPart]]) -> Counter[tuple[ShardId, int, int]]:
    """Return the asked shards and positions, each with the age of its epoch."""
    return Counter(
        (part.shard, position, part.age)
        for its in parts.values()
        for part in its
        for position in part.positions.tolist()
    )


def expected(epochs: list[list[EnclosureRecord]], there: set[str]) -> Counter[tuple[ShardId, int, int]]:
    """Compute the same plainly: each block once per shard, by its newest epoch there."""
    asked: Counter[tuple[ShardId, int, int]] = Counter()
    seen = set()
    for age, enclosures in enumerate(epochs):
        placement = Placement.among(PlacementEpoch(1), enclosures)
        for position, index in enumerate(placement.shards(SECRET, SPANS).tolist()):
            shard = placement.shard_ids[index]
            if (shard, position) not in seen and shard in there:
                asked[shard, position, age] += 1
            seen.add((shard, position))
    return asked


@given(
    st.lists(st.sets(st.sampled_from("efgh"), min_size=1), min_size=1, max_size=4),
    st.sets(st.integers(0, 11)),
)
@settings(deadline=None, max_examples=25)
def test_each_live_epoch_s_owners_are_asked_for_what_no_newer_one_places_there(
    names: list[set[str]], unowned: set[int]
) -> None:
    epochs = [[enclosure(name, [TERABYTE] * 3) for name in sorted(each)] for each in names]
    known = fabric_map(*epochs[0], earlier=epochs[1:])
    claims = dict(known.claims)
    for number, shard in enumerate(known.shards()):
        if number in unowned:
            del claims[shard.id]
    known = replace(known, claims=claims)
    parts, lost = Routes(known).by_owner_of_all(SECRET, SPANS)
    assert asked_of(parts) == expected(epochs, set(claims))
    for owner, its in parts.items():
        assert {known.owner(part.shard) for part in its} == {owner}
        assert [part.age for part in its] == sorted(part.age for part in its)
        assert {part.epoch for part in its if part.age} <= {9 - age for age in range(3)}
    current, lost_now = Routes(known).by_owner(SECRET, SPANS)
    assert asked_of(current) == expected(epochs[:1], set(claims))
    ownerless = {shard.id for shard in known.shards()} - set(claims)
    without = []
    for each in epochs:
        placement = Placement.among(PlacementEpoch(1), each)
        chosen = enumerate(placement.shards(SECRET, SPANS).tolist())
        without.append({position for position, index in chosen if placement.shard_ids[index] in ownerless})
    assert set(lost.tolist()) == set().union(*without)
    assert set(lost_now.tolist()) == without[0]


def test_without_earlier_epochs_both_ways_of_asking_are_the_same() -> None:
    routes = Routes(fabric_map(E, F))
    assert not routes.has_earlier
    assert asked_of(routes.by_owner(SECRET, SPANS)[0]) == asked_of(routes.by_owner_of_all(SECRET, SPANS)[0])


def test_placements_are_used_again_while_only_claims_and_agents_change() -> None:
    first = fabric_map(E, F, earlier=[[E]])
    routes = Routes(first)
    routes.by_owner_of_all(SECRET, SPANS)
    rebuilt = {each.id: replace(each) for each in (E, F)}  # a store may make its records anew for each map
    for after in (
        replace(first, revision=2, claims={}),
        replace(first, revision=3, enclosures=rebuilt),
        replace(first, revision=4, earlier_placements=()),
    ):
        later = Routes(after, routes)
        for record in later.records:
            then, now = routes.live.get(record.epoch), later.live.get(record.epoch)
            assert then is not None
            assert now is not None
            assert now.placement is then.placement


def test_the_current_placement_is_used_again_as_an_earlier_one() -> None:
    before = fabric_map(E)
    routes = Routes(before)
    routes.by_owner(SECRET, SPANS)
    after = replace(
        fabric_map(D, E, earlier=[[E]]),
        placement_epoch=PlacementEpoch(11),
        earlier_placements=(PlacementRecord(before.placement_epoch, weights_of([E])),),
    )
    later = Routes(after, routes)
    then, now = routes.live.get(PlacementEpoch(10)), later.live.get(PlacementEpoch(10))
    assert then is not None
    assert now is not None
    assert now.placement is then.placement
    assert asked_of(later.by_owner_of_all(SECRET, SPANS)[0]) == expected([[D, E], [E]], set(after.claims))


def test_a_placement_whose_weights_are_others_is_made_anew() -> None:
    routes = Routes(fabric_map(E, F))
    routes.by_owner(SECRET, SPANS)
    other = Routes(fabric_map(E, G), routes)  # the same epoch's number: a store that began anew
    assert asked_of(other.by_owner(SECRET, SPANS)[0]) == expected(
        [[E, G]], {s.id for s in (*E.shards, *G.shards)}
    )


def test_a_shard_is_found_on_its_drive() -> None:
    shard = E.shards[1]
    assert Routes(fabric_map(E)).place(shard.id) == (shard.drive, shard.offset)


def test_blocks_are_sorted_out_by_drive_and_keep_their_order_on_each() -> None:
    located = BlockLocations.empty(10)
    drives = ("one", "two", "one", "three")  # two shards lie on the first drive
    located.sources = [
        BlockSource(AgentId("a"), ShardId(str(number)), DriveId(drive), 0)
        for number, drive in enumerate(drives)
    ]
    located.source[:] = [0, 0, 1, 0, 2, 2, 1, 1, 0, 2]
    sorted_out = {drive: its.tolist() for drive, its in located.by_drive(np.array([0, 1, 2, 4, 7, 9]))}
    assert sorted_out == {"one": [0, 1, 4, 9], "two": [2, 7]}
    assert located.by_drive(np.zeros(0, np.intp)) == []
