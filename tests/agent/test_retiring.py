"""When earlier placement epochs are asked no longer: by values, and on a running agent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.agent.assembly import (
    FABRIC,
    SETTINGS,
    HeldDrive,
    MemoryWorker,
    assembled,
    beside,
    put_states,
    until,
)
from tests.agent.owned_shard import OwnedShard, keys_of
from tests.agent.test_placements import add, new_drive
from tests.agent.test_routes import AGENTS, E, F, G, fabric_map

from ostraca_dpu_agent.owner.core import Passing, ShardSettings
from ostraca_dpu_agent.steward.placements import Retire, keeper, over_since, to_retire
from ostraca_dpu_agent.steward.retiring import Retiring
from ostraca_fabric.adapters.memory_membership import MemoryMembership
from ostraca_fabric.fabric_map import AgentRecord, EnclosureRecord
from ostraca_fabric.ids import AgentId, OwnerEpoch, PlacementEpoch, ShardId, StartId
from ostraca_fabric.outcome import PutState
from ostraca_fabric.wire.messages import (
    AgentRequest,
    AnswerToAgent,
    OwnerNotice,
    PassedOver,
    ShardPassed,
    ShardsPassed,
)

PER_SEGMENT = 15
NINE, EIGHT = PlacementEpoch(9), PlacementEpoch(8)
KNOWN = fabric_map(E, F, earlier=[[E], [E, G]])
SHARDS = [shard.id for each in (E, F) for shard in each.shards]
OVER = {NINE: 100.0, EIGHT: 50.0}


def retired(
    passed: dict[ShardId, int], *, now_s: float = 101.0, enclosures: tuple[EnclosureRecord, ...] = (E, F)
) -> list[PlacementEpoch]:
    known = replace(KNOWN, enclosures={each.id: each for each in enclosures})
    said = {shard: PlacementEpoch(epoch) for shard, epoch in passed.items()}
    return [each.epoch for each in to_retire(known, said, OVER, now_s=now_s, ttl_s=1000.0)]


@pytest.mark.parametrize(("since", "expected"), [(8, []), (9, [EIGHT]), (10, [NINE, EIGHT])])
def test_an_epoch_is_retired_when_all_shards_have_gone_round_since_it_ended(
    since: int, expected: list[PlacementEpoch]
) -> None:
    assert retired(dict.fromkeys(SHARDS, since)) == expected


def test_one_shard_that_has_not_gone_round_or_of_which_nobody_tells_keeps_an_epoch() -> None:
    everyone = dict.fromkeys(SHARDS, 10)
    assert retired({**everyone, SHARDS[0]: 9}) == [EIGHT]
    assert retired(dict.fromkeys(SHARDS[1:], 10)) == []


def test_a_shard_that_takes_no_blocks_is_not_waited_for_and_those_alone_decide_nothing() -> None:
    drained = replace(E, shards=tuple(replace(shard, weight=0) for shard in E.shards))
    assert retired({shard.id: 10 for shard in F.shards}, enclosures=(drained, F)) == [NINE, EIGHT]
    assert retired({shard.id: 10 for shard in E.shards}, enclosures=(drained,)) == []


def test_at_the_latest_an_epoch_ends_with_its_time_to_live() -> None:
    assert retired({}, now_s=1049.9) == []
    assert retired({}, now_s=1050.0) == [EIGHT]
    assert retired({}, now_s=1100.0) == [NINE, EIGHT]
    told = to_retire(KNOWN, {}, OVER, now_s=50.0 + 3600, ttl_s=3600.0)
    assert told == (Retire(EIGHT, "it has been over for 1.0 hours"),)


def test_the_time_counts_from_when_an_epoch_was_first_seen_to_be_over() -> None:
    assert over_since(KNOWN, {EIGHT: 5.0, PlacementEpoch(7): 1.0}, 20.0) == {NINE: 20.0, EIGHT: 5.0}


def test_one_agent_decides_and_all_agree_who() -> None:
    turned = replace(KNOWN, agents=dict(reversed(list(KNOWN.agents.items()))))
    assert keeper(KNOWN) == keeper(turned)
    assert keeper(KNOWN) in AGENTS
    assert keeper(replace(KNOWN, agents={})) is None


def test_a_shard_is_passed_over_when_its_ring_has_gone_round_and_nothing_older_is_left() -> None:
    shard, before = OwnedShard(segments=4), list(range(20))
    passing, ring = Passing(shard.core), shard.core.ring
    shard.put(before)
    assert passing.over() == 0
    passing.began(NINE)
    made, number = ring.generations_made, 20
    while passing.over() == 0:
        assert ring.generations_made - made < 4 or shard.found(before)
        shard.put([number])
        number += 1
    assert passing.over() == NINE
    assert shard.found(before) == []
    passing.began(PlacementEpoch(11))
    assert passing.over() == NINE, "the newest has only begun"


@pytest.mark.parametrize(("has_earlier", "stays"), [(True, False), (False, True)])
def test_no_segment_from_before_an_epoch_stays_while_earlier_ones_are_asked(
    has_earlier: bool, stays: bool
) -> None:
    shard, before = OwnedShard(8, settings=ShardSettings(carry_share=0.0)), list(range(PER_SEGMENT))
    passing = Passing(shard.core)
    shard.put(before)
    passing.began(NINE, has_earlier=has_earlier)
    shard.put(list(range(100, 100 + PER_SEGMENT)))  # where a segment was ready before
    after = list(range(200, 200 + PER_SEGMENT))
    for number in [*after, *range(300, 600)]:
        shard.found(before)
        if number >= 300:
            assert shard.found(after) == after, "it was opened since, and stays either way"
        shard.put([number])
    assert bool(shard.found(before)) == stays
    assert passing.over() == (0 if stays else NINE)
    passing.began(PlacementEpoch(10))
    while passing.over() < 10:
        shard.found([*before, *after])
        shard.put([number := number + 1])
    assert shard.found([*before, *after]) == []


def test_a_ring_that_holds_nothing_older_has_to_go_round_too_and_a_new_owner_begins_anew() -> None:
    shard = OwnedShard(segments=12, settings=ShardSettings(blocks_max=32))  # a small index evicts early
    passing = Passing(shard.core)
    passing.began(NINE)
    shard.put(list(range(40)))
    assert shard.found([0]) == []
    assert passing.over() == 0
    shard.put(list(range(40, 200)))
    assert passing.over() == NINE
    shard.restart()
    again = Passing(shard.core)
    again.began(NINE)
    assert again.over() == 0


def test_a_segment_that_readers_keep_from_eviction_keeps_its_shard_from_being_passed_over() -> None:
    shard = OwnedShard(segments=6)
    passing, ring = Passing(shard.core), shard.core.ring
    shard.put([0])
    passing.began(NINE)
    made = ring.generations_made
    shard.core.resolve(shard.now_s, keys_of([0]), pin_s=20.0, promises=True)
    shard.put(list(range(1, 200)))
    assert ring.generations_made - made > 6
    assert shard.found([0]) == [0]
    assert passing.over() == 0


async def test_only_the_agent_that_is_to_decide_retires_epochs() -> None:
    async with assembled() as fabric, beside(fabric, SETTINGS):
        await fabric.membership.put_enclosures([new_drive().record()])
        known = fabric.membership.map
        decides = keeper(known)
        for agent in sorted(known.agents, key=lambda agent: agent == decides):
            assert fabric.membership.map.earlier_placements
            retiring = Retiring(
                agent,
                membership=fabric.membership,
                owners=fabric.owners,
                clock=fabric.mover.clock,
                turn_s=60.0,
                ttl_s=0.0,
            )
            await retiring.turn()
        assert not fabric.membership.map.earlier_placements


class Said:
    """Owners that say how far round shards have gone, each what it likes."""

    def __init__(self, said: dict[AgentId, list[ShardId]]) -> None:
        self.said = said

    async def ask(self, agent: AgentId, request: AgentRequest) -> AnswerToAgent:
        assert isinstance(request, PassedOver)
        return ShardsPassed(0, tuple(ShardPassed(shard, 1 << 20) for shard in self.said[agent]))

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        raise AssertionError(notice)


@pytest.mark.parametrize("is_owner", [False, True])
async def test_how_far_a_shard_has_gone_round_is_believed_of_its_owner_alone(*, is_owner: bool) -> None:
    membership = MemoryMembership(FABRIC)
    drives = HeldDrive(), new_drive()
    agents = [AgentRecord(AgentId(f"agent-{each}"), StartId(bytes(16)), ()) for each in range(2)]
    for drive, agent in zip(drives, agents, strict=True):
        await membership.put_enclosures([drive.record()])
        await membership.join(agent)
        await membership.claim(drive.shard, agent.id, agent.start, epoch_at_least=OwnerEpoch(1))
    assert membership.map.earlier_placements
    mine, others = [[drive.shard] for drive in drives]
    said = {agents[0].id: mine if is_owner else mine + others, agents[1].id: others if is_owner else []}
    decides = keeper(membership.map)
    assert decides is not None
    retiring = Retiring(
        decides, membership=membership, owners=Said(said), clock=lambda: 0.0, turn_s=60.0, ttl_s=1e9
    )
    await retiring.turn()
    assert bool(membership.map.earlier_placements) == (not is_owner)


async def test_a_running_agent_retires_an_epoch_when_flash_has_been_written_over_since() -> None:
    settings = replace(SETTINGS, placement_turn_s=0.02)
    drive = new_drive()
    async with assembled(settings, later=[drive]) as fabric:
        worker: MemoryWorker = fabric.worker()
        await add(fabric, drive)
        assert fabric.mover.routes().has_earlier
        number = 0
        while fabric.membership.map.earlier_placements:
            states = put_states(await fabric.put(worker, range(number, number + 20)))
            assert PutState.COMMITTED in states
            number += 20
            assert number < 2000
        assert min(owned.core.ring.generations_made for owned in fabric.service.shards.values()) > 6
        await until(lambda: not fabric.mover.routes().has_earlier)


async def test_a_running_agent_retires_an_epoch_whose_time_is_over() -> None:
    drive = new_drive()
    settings = replace(SETTINGS, placement_turn_s=0.02, placement_ttl_s=0.1)
    async with assembled(settings, later=[drive]) as fabric:
        await fabric.membership.put_enclosures([drive.record()])
        assert fabric.membership.map.earlier_placements
        await until(lambda: not fabric.membership.map.earlier_placements)
