from __future__ import annotations

from dataclasses import replace

from ostraca_dpu_agent.steward.plan import Attach, Observed, Serve, Stop, plan
from ostraca_fabric.fabric_map import AgentRecord, Claim, DriveRecord, EnclosureRecord, FabricMap, ShardRecord
from ostraca_fabric.ids import (
    AgentId,
    EnclosureId,
    FabricId,
    OwnerEpoch,
    PlacementEpoch,
    StartId,
    drive_id,
    shard_id,
)

ME, OTHER = AgentId("agent-0"), AgentId("agent-1")
START, OTHER_START = StartId(b"0" * 16), StartId(b"1" * 16)


def enclosure(shards: int) -> EnclosureRecord:
    name = EnclosureId("enclosure-0")
    drives = tuple(DriveRecord(drive_id(name, f"drive-{n}"), f"/{n}") for n in range(shards))
    return EnclosureRecord(
        name,
        drives,
        tuple(ShardRecord(shard_id(drive.id, 0), drive.id, 0, 1 << 30, 1 << 30) for drive in drives),
    )


def observed(shards: int = 3) -> Observed:
    box = enclosure(shards)
    agents = {ME: AgentRecord(ME, START, ()), OTHER: AgentRecord(OTHER, OTHER_START, ())}
    fabric_map = FabricMap(FabricId(b"f" * 16), 1, PlacementEpoch(1), agents, {box.id: box})
    return Observed(fabric_map, ME, START, frozenset(), frozenset(), frozenset())


def alone(state: Observed) -> Observed:
    return replace(state, map=replace(state.map, agents={ME: state.map.agents[ME]}))


def test_an_agent_alone_attaches_every_drive_and_claims_every_shard() -> None:
    state = alone(observed())
    box = enclosure(3)
    assert plan(state).steps == (
        *(Attach(drive) for drive in box.drives),
        *(Serve(shard) for shard in box.shards),
    )


def test_shards_of_a_failed_drive_are_given_back_and_not_claimed_again() -> None:
    box = enclosure(3)
    claims = {shard.id: Claim(ME, START, OwnerEpoch(1)) for shard in box.shards}
    state = alone(observed())
    drives, shards = frozenset(drive.id for drive in box.drives), frozenset(each.id for each in box.shards)
    state = replace(state, map=replace(state.map, claims=claims), attached=drives, served=shards)
    state = replace(state, broken=frozenset({box.drives[1].id}))
    made = plan(state)
    assert made.steps == (Stop(box.shards[1].id, gives_back=True),)
    assert "stop serving 1 shards whose drives have failed" in made.sentence
    after = replace(state, served=shards - {box.shards[1].id})
    assert plan(after).steps == ()
    assert "I leave 1 drives alone that have failed" in plan(after).sentence
    unclaimed = replace(
        after.map,
        claims={box.shards[0].id: claims[box.shards[0].id], box.shards[2].id: claims[box.shards[2].id]},
    )
    assert plan(replace(after, map=unclaimed)).steps == ()


def test_two_agents_divide_the_shards_between_them() -> None:
    mine = {step.shard.id for step in plan(observed(16)).steps if isinstance(step, Serve)}
    state = observed(16)
    theirs_steps = plan(replace(state, agent=OTHER, start=OTHER_START)).steps
    theirs = {step.shard.id for step in theirs_steps if isinstance(step, Serve)}
    assert mine | theirs == {shard.id for shard in state.map.shards()}
    assert not mine & theirs
    assert mine
    assert theirs


def test_a_claimed_shard_is_left_to_its_owner() -> None:
    state = observed(1)
    shard = state.map.shards()[0]
    claimed = replace(state.map, claims={shard.id: Claim(OTHER, OTHER_START, OwnerEpoch(1))})
    assert not [step for step in plan(replace(state, map=claimed)).steps if isinstance(step, Serve)]


def test_a_shard_that_was_lost_is_no_longer_served() -> None:
    state = observed(1)
    shard = state.map.shards()[0]
    claimed = replace(state.map, claims={shard.id: Claim(OTHER, OTHER_START, OwnerEpoch(2))})
    attached = frozenset(drive.id for drive in enclosure(1).drives)
    lost = replace(state, map=claimed, attached=attached, served=frozenset({shard.id}))
    assert plan(lost).steps == (Stop(shard.id),)


def test_a_shard_that_could_not_be_opened_is_not_tried_again_and_again() -> None:
    state = alone(observed(1))
    shard = state.map.shards()[0]
    failed = replace(state, attached=frozenset({shard.drive}), failed=frozenset({shard.id}))
    decided = plan(failed)
    assert decided.steps == ()
    assert "1 could not be opened" in decided.sentence


def test_with_nothing_to_do_the_sentence_says_so() -> None:
    state = alone(observed(2))
    shards = state.map.shards()
    claims = {shard.id: Claim(ME, START, OwnerEpoch(1)) for shard in shards}
    settled = replace(
        state,
        map=replace(state.map, claims=claims),
        attached=frozenset(shard.drive for shard in shards),
        served=frozenset(shard.id for shard in shards),
    )
    assert plan(settled).sentence == "I serve 2 of the fabric's 2 shards and have nothing to change."
