from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from ostraca_dpu_agent.controller.plan import (
    CLAIM_STAGGER_S,
    REJOIN_WITHIN_S,
    Attach,
    Detach,
    HandOver,
    Join,
    ObservedState,
    Reclaim,
    ReleaseClaim,
    RestartShard,
    Serve,
    Stop,
    plan,
    rejoin_wait_s,
)
from ostraca_fabric.model.fabric_map import (
    AgentRecord,
    Claim,
    DriveRecord,
    EnclosureRecord,
    FabricMap,
    ShardRecord,
)
from ostraca_fabric.model.ids import (
    AgentId,
    EnclosureId,
    FabricId,
    OwnerEpoch,
    PlacementEpoch,
    ShardId,
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


def observed(shards: int = 3) -> ObservedState:
    box = enclosure(shards)
    agents = {ME: AgentRecord(ME, START, ()), OTHER: AgentRecord(OTHER, OTHER_START, ())}
    fabric_map = FabricMap(FabricId(b"f" * 16), 1, PlacementEpoch(1), agents, {box.id: box})
    return ObservedState(fabric_map, ME, START, frozenset(), frozenset(), frozenset())


def alone(state: ObservedState) -> ObservedState:
    return replace(state, map=replace(state.map, agents={ME: state.map.agents[ME]}))


def test_an_agent_alone_attaches_every_drive_and_claims_every_shard() -> None:
    state = alone(observed())
    box = enclosure(3)
    assert plan(state).steps == (
        *(Attach(drive) for drive in box.drives),
        *(Serve(shard) for shard in box.shards),
    )


def test_own_earlier_start_is_awaited_and_not_reported_as_a_namesake() -> None:
    state = observed()
    at, elsewhere = ("tcp://me:7000",), ("tcp://other:7000",)
    for addresses, is_own in ((at, True), (elsewhere, False), ((), False)):
        agents = {ME: AgentRecord(ME, OTHER_START, addresses)}
        made = plan(replace(state, map=replace(state.map, agents=agents), addresses=at))
        assert made.steps == ()
        assert ("restored from a backup" in made.sentence) == is_own
        assert ("another process joined" in made.sentence) != is_own


def test_agents_rejoin_spread_over_a_second_after_losing_all_leases() -> None:
    state = observed()
    state = replace(state, map=replace(state.map, agents={}))
    assert plan(replace(state, rejoin_delay_s=0.4)).steps == ()
    assert plan(state).steps == (Join(),)
    dice = random.Random(4)
    waits = sorted(rejoin_wait_s(StartId(dice.randbytes(16))) for _ in range(1000))
    assert 0 <= waits[0] < 0.01
    assert 0.99 < waits[-1] < REJOIN_WITHIN_S < CLAIM_STAGGER_S
    in_tenths = Counter(int(wait_s * 10) for wait_s in waits)
    assert max(in_tenths.values()) < 150


def test_shards_of_a_failed_drive_are_released_and_not_claimed() -> None:
    box = enclosure(3)
    claims = {shard.id: Claim(ME, START, OwnerEpoch(1)) for shard in box.shards}
    state = alone(observed())
    drives, shards = frozenset(drive.id for drive in box.drives), frozenset(each.id for each in box.shards)
    state = replace(state, map=replace(state.map, claims=claims), attached=drives, served=shards)
    state = replace(state, failed_drives=frozenset({box.drives[1].id}))
    made = plan(state)
    assert made.steps == (Stop(box.shards[1].id, gives_back=True),)
    assert "stopping 1 shard: drive failed" in made.sentence
    after = replace(state, served=shards - {box.shards[1].id})
    assert plan(after).steps == (ReleaseClaim(box.shards[1].id),)
    assert "not using, after failures, 1 drive (enclosure-0/drive-1)" in plan(after).sentence
    unclaimed = replace(
        after.map,
        claims={box.shards[0].id: claims[box.shards[0].id], box.shards[2].id: claims[box.shards[2].id]},
    )
    assert plan(replace(after, map=unclaimed)).steps == ()


def test_drives_without_a_path_wait_and_so_do_their_shards() -> None:
    box = enclosure(3)
    made = plan(replace(alone(observed()), unattachable=frozenset({box.drives[1].id})))
    assert made.steps == (
        *(Attach(box.drives[number]) for number in (0, 2)),
        *(Serve(box.shards[number]) for number in (0, 2)),
    )
    assert made.sentence.endswith("; can't use 1 drive (enclosure-0/drive-1)")


def test_moved_drives_are_detached_and_attached_at_the_new_device() -> None:
    box = enclosure(2)
    claims = {shard.id: Claim(ME, START, OwnerEpoch(1)) for shard in box.shards}
    drives, shards = frozenset(drive.id for drive in box.drives), frozenset(each.id for each in box.shards)
    state = alone(observed(2))
    state = replace(state, map=replace(state.map, claims=claims), attached=drives, served=shards)
    state = replace(state, obsolete=frozenset({box.drives[1].id}))
    assert plan(state).steps == (Stop(box.shards[1].id, gives_back=True),)
    unclaimed = replace(state.map, claims={box.shards[0].id: claims[box.shards[0].id]})
    stopped = replace(state, map=unclaimed, served=frozenset({box.shards[0].id}))
    assert plan(stopped).steps == (Detach(box.drives[1].id),)
    let_go = replace(stopped, obsolete=frozenset(), attached=drives - {box.drives[1].id})
    assert plan(let_go).steps == (Attach(box.drives[1]), Serve(box.shards[1]))


def test_removed_drives_are_stopped_released_and_detached() -> None:
    box = enclosure(1)
    state = alone(observed(1))
    gone = replace(state.map, enclosures={}, claims={box.shards[0].id: Claim(ME, START, OwnerEpoch(1))})
    state = replace(
        state, map=gone, attached=frozenset({box.drives[0].id}), obsolete=frozenset({box.drives[0].id})
    )
    served = replace(state, served=frozenset({box.shards[0].id}))
    assert plan(served).steps == (Stop(box.shards[0].id, gives_back=True),)
    assert plan(replace(served, handing_over=served.served, served=frozenset())).steps == ()
    assert plan(state).steps == (Detach(box.drives[0].id),)


def test_shards_of_unresponsive_drives_wait_without_reserving_room() -> None:
    box = enclosure(4)
    state = observed(4)
    drives = frozenset(drive.id for drive in box.drives)
    unowned_s = {shard.id: 100.0 for shard in box.shards}
    state = replace(state, attached=drives, unowned_s=unowned_s)
    first = tuple(Serve(shard) for shard in box.shards[:3])
    assert plan(state).steps == first, "there is room for two of four, and one more may be taken in a turn"
    unresponsive = replace(state, unresponsive=frozenset({drive.id for drive in box.drives[:2]}))
    assert plan(unresponsive).steps == tuple(Serve(shard) for shard in box.shards[2:])


def test_two_agents_divide_the_shards() -> None:
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


def test_lost_shard_is_stopped() -> None:
    state = observed(1)
    shard = state.map.shards()[0]
    claimed = replace(state.map, claims={shard.id: Claim(OTHER, OTHER_START, OwnerEpoch(2))})
    attached = frozenset(drive.id for drive in enclosure(1).drives)
    lost = replace(state, map=claimed, attached=attached, served=frozenset({shard.id}))
    assert plan(lost).steps == (Stop(shard.id),)


def test_shard_that_failed_to_open_is_not_tried_repeatedly() -> None:
    state = alone(observed(1))
    shard = state.map.shards()[0]
    failed = replace(state, attached=frozenset({shard.drive}), failed=frozenset({shard.id}))
    decided = plan(failed)
    assert decided.steps == ()
    assert "can't open 1 shard (enclosure-0/drive-0/0)" in decided.sentence


def test_sentence_reports_no_changes() -> None:
    state = alone(observed(2))
    shards = state.map.shards()
    claims = {shard.id: Claim(ME, START, OwnerEpoch(1)) for shard in shards}
    settled = replace(
        state,
        map=replace(state.map, claims=claims),
        attached=frozenset(shard.drive for shard in shards),
        served=frozenset(shard.id for shard in shards),
    )
    assert plan(settled).sentence == "serving 2 of 2 shards; no changes"


def world(shards: int, agents: int) -> tuple[FabricMap, list[ObservedState]]:
    """One map, and how each agent of it sees it."""
    box = enclosure(shards)
    records = {
        AgentId(f"agent-{n}"): AgentRecord(AgentId(f"agent-{n}"), StartId(bytes([n]) * 16), ())
        for n in range(agents)
    }
    fabric_map = FabricMap(FabricId(b"f" * 16), 1, PlacementEpoch(1), records, {box.id: box})
    drives = frozenset(drive.id for drive in box.drives)
    return fabric_map, [
        ObservedState(fabric_map, record.id, record.start, drives, frozenset(), frozenset())
        for record in records.values()
    ]


@dataclass
class Settling:
    """Agents that take turns of a second, each with the claims of those before."""

    map: FabricMap
    agents: list[ObservedState]
    blind: frozenset[AgentId] = frozenset()
    """They have no path to any drive."""

    dead: frozenset[ShardId] = frozenset()
    """Nobody can open these."""

    unowned_since_s: dict[ShardId, float] = field(default_factory=dict)
    now_s: float = 0.0

    def second(self) -> int:
        """Let each take a turn; return how much they did."""
        return sum(self._turn(each) for each in self.agents)

    def settle(self) -> FabricMap:
        """Go on until nobody does anything, nor has anything to wait for."""
        quiet_s = 0.0
        for _ in range(20 * len(self.map.shards())):
            quiet_s = 0.0 if self.second() else quiet_s + 1
            self.now_s += 1
            if quiet_s > (len(self.agents) + 2) * CLAIM_STAGGER_S:
                return self.map
        raise AssertionError("agents pass shards to and fro")

    def unowned(self) -> set[ShardId]:
        return {shard.id for shard in self.map.shards() if self.map.owner(shard.id) is None}

    def _turn(self, observed: ObservedState) -> int:
        unowned = self.unowned()
        self.unowned_since_s = {shard: self.unowned_since_s.get(shard, self.now_s) for shard in unowned}
        drives = frozenset(shard.drive for shard in self.map.shards())
        is_blind = observed.agent in self.blind
        claims = dict(self.map.claims)
        now = replace(
            observed,
            map=self.map,
            served=frozenset(shard for shard, claim in claims.items() if claim.agent == observed.agent),
            unowned_s={shard: self.now_s - since_s for shard, since_s in self.unowned_since_s.items()},
            failed=self.dead,
            attached=frozenset() if is_blind else drives,
            unattachable=drives if is_blind else frozenset(),
        )
        steps = plan(now).steps
        for step in steps:
            match step:
                case Serve(record):
                    assert self.map.owner(record.id) is None
                    claims[record.id] = Claim(observed.agent, observed.start, OwnerEpoch(1))
                case HandOver(shard_id):
                    del claims[shard_id]
                case _:
                    raise AssertionError(step)
        self.map = replace(self.map, claims=claims)
        return len(steps)


def settle(fabric_map: FabricMap, agents: list[ObservedState]) -> FabricMap:
    """Let agents take turns until nobody does anything any more."""
    return Settling(fabric_map, agents).settle()


def shares(fabric_map: FabricMap) -> list[int]:
    owners = Counter(fabric_map.owner(shard.id) for shard in fabric_map.shards())
    return sorted(owners[agent] for agent in fabric_map.agents)


@pytest.mark.parametrize(("shards", "agents"), [(1, 3), (2, 2), (7, 3), (18, 9), (36, 9), (64, 64)])
def test_all_shards_are_owned_in_nearly_even_shares(shards: int, agents: int) -> None:
    fabric_map, seen = world(shards, agents)
    after = settle(fabric_map, seen)
    assert all(after.owner(shard.id) for shard in after.shards())
    even = shards / agents
    assert max(shares(after)) <= max(math.ceil(even), 1.25 * even)


@pytest.mark.parametrize(("agents", "blind"), [(2, 1), (3, 1), (4, 1), (9, 2), (36, 8)])
def test_agents_without_paths_do_not_block_shards(agents: int, blind: int) -> None:
    fabric_map, seen = world(72, agents)
    fabric = Settling(fabric_map, seen, frozenset(each.agent for each in seen[:blind]))
    longest_s = (agents + 1) * CLAIM_STAGGER_S + 72  # beyond its room, one takes a shard in each turn
    while fabric.unowned() and fabric.now_s <= longest_s:
        fabric.second()
        fabric.now_s += 1
    assert not fabric.unowned()


def test_shares_even_out_despite_an_unopenable_shard() -> None:
    fabric_map, seen = world(72, 3)
    dead = fabric_map.shards()[0].id
    claims = {
        shard.id: Claim(seen[number % 2].agent, seen[number % 2].start, OwnerEpoch(1))
        for number, shard in enumerate(fabric_map.shards())
        if shard.id != dead
    }
    after = Settling(replace(fabric_map, claims=claims), seen, dead=frozenset({dead})).settle()
    assert max(shares(after)) <= 30
    assert after.owner(dead) is None


def test_late_agent_receives_its_share_one_shard_at_a_time() -> None:
    fabric_map, seen = world(32, 4)
    alone_first = settle(
        replace(fabric_map, agents={seen[0].agent: fabric_map.agents[seen[0].agent]}), seen[:1]
    )
    crowded = replace(alone_first, agents=fabric_map.agents)
    mine = frozenset(shard.id for shard in crowded.shards())
    first = plan(replace(seen[0], map=crowded, served=mine))
    assert [type(step) for step in first.steps] == [HandOver]
    assert first.sentence.endswith("; handing over 1 shard: above the fair share")
    after = settle(crowded, seen)
    assert max(shares(after)) <= 10
    assert min(shares(after)) > 0


def test_shards_of_a_dead_agent_go_to_live_agents() -> None:
    fabric_map, seen = world(32, 4)
    whole = settle(fabric_map, seen)
    dead = seen[2].agent
    left = {agent: record for agent, record in whole.agents.items() if agent != dead}
    claims = {shard: claim for shard, claim in whole.claims.items() if claim.agent != dead}
    alive = [each for each in seen if each.agent != dead]
    after = settle(replace(whole, agents=left, claims=claims), alive)
    assert all(after.owner(shard.id) in left for shard in after.shards())
    kept = [shard for shard, claim in claims.items() if after.claims[shard] != claim]
    assert kept == [], "claims are sticky"


def test_unclaimed_shard_goes_to_the_next_preferred_agent() -> None:
    fabric_map, seen = world(1, 3)
    shard = fabric_map.shards()[0].id

    def who(waited_s: float) -> list[AgentId]:
        states = [replace(each, unowned_s={shard: waited_s}) for each in seen]
        return [each.agent for each in states if any(isinstance(step, Serve) for step in plan(each).steps)]

    assert [len(who(waited_s)) for waited_s in (0.0, CLAIM_STAGGER_S, 2 * CLAIM_STAGGER_S)] == [1, 2, 3]
    assert set(who(0.0)) <= set(who(CLAIM_STAGGER_S))


def test_unregistered_agent_joins_first() -> None:
    state = observed(2)
    gone = replace(state.map, agents={OTHER: state.map.agents[OTHER]})
    served = frozenset(shard.id for shard in state.map.shards())
    decided = plan(replace(state, map=gone, served=served))
    assert decided.steps == (Join(),)
    assert "joining the fabric again" in decided.sentence


def test_served_shards_with_expired_claims_are_reclaimed() -> None:
    state = alone(observed(2))
    drives = frozenset(drive.id for drive in enclosure(2).drives)
    served = frozenset(shard.id for shard in state.map.shards())
    decided = plan(replace(state, attached=drives, served=served))
    assert decided.steps == tuple(Reclaim(shard) for shard in sorted(served))


@pytest.mark.parametrize("why", ["is_busy", "is_backing_off"])
def test_no_handover_during_recovery_or_backoff(why: str) -> None:
    fabric_map, seen = world(8, 2)
    shards = fabric_map.shards()
    claims = {shard.id: Claim(seen[0].agent, seen[0].start, OwnerEpoch(1)) for shard in shards}
    state = replace(
        seen[0], map=replace(fabric_map, claims=claims), served=frozenset(shard.id for shard in shards)
    )
    assert [type(step) for step in plan(state).steps] == [HandOver]
    assert plan(replace(state, is_busy=why == "is_busy", is_backing_off=why == "is_backing_off")).steps == ()


def test_shards_of_a_leaving_agent_go_to_others_at_once() -> None:
    fabric_map, seen = world(6, 2)
    shards = fabric_map.shards()
    claims = {shard.id: Claim(seen[1].agent, seen[1].start, OwnerEpoch(1)) for shard in shards[:4]}
    claimed = replace(fabric_map, claims=claims)
    state = replace(seen[1], map=claimed, served=frozenset(claims))
    assert plan(state).steps == (), "it has all that it has room for, and the other one's turn is first"
    handing_over = replace(fabric_map.agents[seen[0].agent], is_leaving=True)
    alone_soon = replace(claimed, agents={**fabric_map.agents, handing_over.id: handing_over})
    assert plan(replace(state, map=alone_soon)).steps == (Serve(shards[4]), Serve(shards[5]))


def test_unservable_claim_is_released() -> None:
    state = alone(observed(1))
    shard = state.map.shards()[0]
    ours = replace(state.map, claims={shard.id: Claim(ME, START, OwnerEpoch(1))})
    failed = replace(state, map=ours, attached=frozenset({shard.drive}), failed=frozenset({shard.id}))
    decided = plan(failed)
    assert decided.steps == (ReleaseClaim(shard.id),)
    assert "releasing 1 shard: not servable here" in decided.sentence


def test_unconfirmed_claim_is_requested_again() -> None:
    state = alone(observed(1))
    shard = state.map.shards()[0]
    ours = replace(state.map, claims={shard.id: Claim(ME, START, OwnerEpoch(1))})
    served = replace(state, map=ours, attached=frozenset({shard.drive}), served=frozenset({shard.id}))
    assert plan(served).steps == ()
    assert plan(replace(served, unconfirmed=frozenset({shard.id}))).steps == (Reclaim(shard.id),)


def test_agent_yields_to_a_later_process_of_the_same_name() -> None:
    state = observed(1)
    shard = state.map.shards()[0]
    taken = {**state.map.agents, ME: AgentRecord(ME, OTHER_START, ("tcp://other:7000",))}
    theirs = {shard.id: Claim(ME, OTHER_START, OwnerEpoch(2))}
    decided = plan(replace(state, map=replace(state.map, agents=taken, claims=theirs)))
    assert decided.steps == ()
    assert "another process joined later as agent-0, at tcp://other:7000" in decided.sentence
    served = replace(state, map=replace(state.map, agents=taken, claims=theirs), served=frozenset({shard.id}))
    assert plan(served).steps == (Stop(shard.id),)


def test_stranded_shard_restarts_unless_another_agent_owns_the_shard() -> None:
    box = enclosure(3)
    shard = box.shards[0].id
    state = observed()
    state = replace(state, attached=frozenset(drive.id for drive in box.drives))
    state = replace(state, served=frozenset(each.id for each in box.shards), stranded=frozenset({shard}))
    claims = {each.id: Claim(ME, START, OwnerEpoch(1)) for each in box.shards}
    made = plan(replace(state, map=replace(state.map, claims=claims)))
    assert made.steps == (RestartShard(shard),)
    assert made.sentence.endswith("; restarting 1 shard: writes have ended here")
    taken = {**claims, shard: Claim(OTHER, OTHER_START, OwnerEpoch(2))}
    assert plan(replace(state, map=replace(state.map, claims=taken))).steps[0] == Stop(shard)
    nobody_s = {each: claim for each, claim in claims.items() if each != shard}
    assert plan(replace(state, map=replace(state.map, claims=nobody_s))).steps == (Reclaim(shard),)
