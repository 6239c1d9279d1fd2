"""When earlier placement epochs are asked no longer: by values, and on a running agent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.dpu_agent.controller.test_placement_epochs import add, new_drive
from tests.dpu_agent.datapath.location.test_routing import AGENTS, E, F, G, fabric_map
from tests.support.agent.assembly import (
    FABRIC,
    SETTINGS,
    HeldDrive,
    MemoryWorker,
    assembled,
    beside,
    put_states,
    until,
)
from tests.support.agent.owned_shard import OwnedShard, keys_of

from ostraca_dpu_agent.controller.epoch_retirement import EpochRetirement
from ostraca_dpu_agent.controller.placement_epochs import (
    EpochRetirementDue,
    end_times,
    epochs_due,
    retiring_agent,
)
from ostraca_dpu_agent.shards.core import ShardSettings
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model.fabric_map import AgentRecord, EnclosureRecord
from ostraca_fabric.model.ids import AgentId, OwnerEpoch, PlacementEpoch, ShardId, StartId
from ostraca_fabric.model.outcome import PutState
from ostraca_fabric.wire.messages import (
    AgentRequest,
    AnswerToAgent,
    OwnerNotice,
    RingProgressAnswer,
    RingProgressQuery,
    ShardRingProgress,
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
    return [each.epoch for each in epochs_due(known, said, OVER, now_s=now_s, ttl_s=1000.0)]


@pytest.mark.parametrize(("since", "expected"), [(8, []), (9, [EIGHT]), (10, [NINE, EIGHT])])
def test_epoch_retires_after_all_rings_have_wrapped(since: int, expected: list[PlacementEpoch]) -> None:
    assert retired(dict.fromkeys(SHARDS, since)) == expected


def test_shard_without_a_wrap_or_an_answer_keeps_an_epoch() -> None:
    everyone = dict.fromkeys(SHARDS, 10)
    assert retired({**everyone, SHARDS[0]: 9}) == [EIGHT]
    assert retired(dict.fromkeys(SHARDS[1:], 10)) == []


def test_draining_shards_neither_delay_nor_decide_retirement() -> None:
    drained = replace(E, shards=tuple(replace(shard, weight=0) for shard in E.shards))
    assert retired({shard.id: 10 for shard in F.shards}, enclosures=(drained, F)) == [NINE, EIGHT]
    assert retired({shard.id: 10 for shard in E.shards}, enclosures=(drained,)) == []


def test_epoch_retires_at_its_time_to_live() -> None:
    assert retired({}, now_s=1049.9) == []
    assert retired({}, now_s=1050.0) == [EIGHT]
    assert retired({}, now_s=1100.0) == [NINE, EIGHT]
    told = epochs_due(KNOWN, {}, OVER, now_s=50.0 + 3600, ttl_s=3600.0)
    assert told == (EpochRetirementDue(EIGHT, "1.0 hours since its end"),)


def test_the_time_counts_from_when_an_epoch_was_first_seen_to_be_over() -> None:
    assert end_times(KNOWN, {EIGHT: 5.0, PlacementEpoch(7): 1.0}, 20.0) == {NINE: 20.0, EIGHT: 5.0}


def test_all_agents_agree_on_the_retiring_agent() -> None:
    turned = replace(KNOWN, agents=dict(reversed(list(KNOWN.agents.items()))))
    assert retiring_agent(KNOWN) == retiring_agent(turned)
    assert retiring_agent(KNOWN) in AGENTS
    assert retiring_agent(replace(KNOWN, agents={})) is None


def test_ring_progress_requires_a_wrap_without_older_segments() -> None:
    shard, before = OwnedShard(segments=4), list(range(20))
    core, ring = shard.core, shard.core.ring
    shard.put(before)
    assert core.progress.turned_over() == 0
    core.begin_placement_epoch(NINE, has_earlier=True)
    made, number = ring.generations_made, 20
    while core.progress.turned_over() == 0:
        assert ring.generations_made - made < 4 or shard.found(before)
        shard.put([number])
        number += 1
    assert core.progress.turned_over() == NINE
    assert shard.found(before) == []
    core.begin_placement_epoch(PlacementEpoch(11), has_earlier=True)
    assert core.progress.turned_over() == NINE, "the newest has only begun"


@pytest.mark.parametrize(("has_earlier", "stays"), [(True, False), (False, True)])
def test_no_segment_survives_from_before_a_queried_epoch(has_earlier: bool, stays: bool) -> None:
    shard, before = OwnedShard(8, settings=ShardSettings(reinsertion_share=0.0)), list(range(PER_SEGMENT))
    core = shard.core
    shard.put(before)
    core.begin_placement_epoch(NINE, has_earlier=has_earlier)
    shard.put(list(range(100, 100 + PER_SEGMENT)))  # where a segment was ready before
    after = list(range(200, 200 + PER_SEGMENT))
    for number in [*after, *range(300, 600)]:
        shard.found(before)
        if number >= 300:
            assert shard.found(after) == after, "it was opened since, and stays either way"
        shard.put([number])
    assert bool(shard.found(before)) == stays
    assert core.progress.turned_over() == (0 if stays else NINE)
    core.begin_placement_epoch(PlacementEpoch(10), has_earlier=True)
    while core.progress.turned_over() < 10:
        shard.found([*before, *after])
        shard.put([number := number + 1])
    assert shard.found([*before, *after]) == []


def test_empty_ring_must_wrap_too_and_a_new_owner_starts_over() -> None:
    shard = OwnedShard(segments=12, settings=ShardSettings(blocks_max=32))  # a small index evicts early
    core = shard.core
    core.begin_placement_epoch(NINE, has_earlier=True)
    shard.put(list(range(40)))
    assert shard.found([0]) == []
    assert core.progress.turned_over() == 0
    shard.put(list(range(40, 200)))
    assert core.progress.turned_over() == NINE
    shard.restart()
    again = shard.core
    again.begin_placement_epoch(NINE, has_earlier=True)
    assert again.progress.turned_over() == 0


def test_pinned_segment_delays_ring_progress() -> None:
    shard = OwnedShard(segments=6)
    core, ring = shard.core, shard.core.ring
    shard.put([0])
    core.begin_placement_epoch(NINE, has_earlier=True)
    made = ring.generations_made
    shard.core.resolve(shard.now_s, keys_of([0]), pin_s=20.0, promises=True)
    shard.put(list(range(1, 200)))
    assert ring.generations_made - made > 6
    assert shard.found([0]) == [0]
    assert core.progress.turned_over() == 0


async def test_only_the_agent_in_charge_retires_epochs() -> None:
    async with assembled() as fabric, beside(fabric, SETTINGS):
        await fabric.membership.put_enclosures([new_drive().record()])
        known = fabric.membership.map
        decides = retiring_agent(known)
        for agent in sorted(known.agents, key=lambda agent: agent == decides):
            assert fabric.membership.map.earlier_placements
            retiring = EpochRetirement(
                agent,
                membership=fabric.membership,
                owners=fabric.owners,
                clock=fabric.context.clock,
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
        assert isinstance(request, RingProgressQuery)
        return RingProgressAnswer(0, tuple(ShardRingProgress(shard, 1 << 20) for shard in self.said[agent]))

    def tell(self, agent: AgentId, notice: OwnerNotice) -> None:
        raise AssertionError(notice)


@pytest.mark.parametrize("is_owner", [False, True])
async def test_ring_progress_counts_only_from_the_owner(*, is_owner: bool) -> None:
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
    decides = retiring_agent(membership.map)
    assert decides is not None
    retiring = EpochRetirement(
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
        assert fabric.context.routes().has_earlier
        number = 0
        while fabric.membership.map.earlier_placements:
            states = put_states(await fabric.put(worker, range(number, number + 20)))
            assert PutState.COMMITTED in states
            number += 20
            assert number < 2000
        assert min(owned.core.ring.generations_made for owned in fabric.service.shards.values()) > 6
        await until(lambda: not fabric.context.routes().has_earlier)


async def test_running_agent_retires_an_epoch_at_its_time_to_live() -> None:
    drive = new_drive()
    settings = replace(SETTINGS, placement_turn_s=0.02, placement_ttl_s=0.1)
    async with assembled(settings, later=[drive]) as fabric:
        await fabric.membership.put_enclosures([drive.record()])
        assert fabric.membership.map.earlier_placements
        await until(lambda: not fabric.membership.map.earlier_placements)
