"""What befalls the store and the way to it, on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace

import pytest
from tests.support.simulated.simulated_membership import SimulatedMembership, SimulatedStore, StoreFaults
from tests.support.simulated.virtual_hosts import HostsLoop, VirtualHost

from ostraca_fabric.errors import MembershipError
from ostraca_fabric.model.fabric_map import AgentRecord, EnclosureRecord
from ostraca_fabric.model.ids import AgentId, EnclosureId, FabricId, OwnerEpoch, ShardId, StartId

A, B = AgentId("a"), AgentId("b")
START = StartId(b"1" * 16)
SHARD = ShardId("e/d/0")
TTL_S = 5.0


class World:
    """A store, and two processes' ways to it."""

    def __init__(self, faults: StoreFaults) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HostsLoop)
        self.store = SimulatedStore(FabricId(b"f" * 16), lease_ttl_s=TTL_S)
        self.a, self.b = (SimulatedMembership(self.store, random.Random(n), faults) for n in range(2))
        self.host = VirtualHost("a", loop)

    async def joined(self, way: SimulatedMembership, agent: AgentId) -> None:
        await way.join(AgentRecord(agent, START, ()))

    async def claimed(self, way: SimulatedMembership, agent: AgentId) -> bool:
        return await way.claim(SHARD, agent, START, epoch_at_least=OwnerEpoch(1)) is not None


Scenario = Callable[[World], Coroutine[None, None, None]]


def play(scenario: Scenario, faults: StoreFaults | None = None) -> None:
    async def played() -> None:
        await scenario(World(faults or StoreFaults()))

    loop = HostsLoop()
    try:
        loop.run_until_complete(played())
    finally:
        loop.close()


async def fails(asked: Awaitable[object]) -> None:
    with pytest.raises(MembershipError, match="did not answer"):
        await asked


def test_a_lease_lasts_as_long_as_it_is_kept_alive() -> None:
    async def scenario(world: World) -> None:
        await world.joined(world.a, A)
        await asyncio.sleep(20 * TTL_S)
        assert await world.b.confirm(A, START)
        world.a.keeps_alive = False
        await asyncio.sleep(1.5 * TTL_S)
        assert not await world.b.confirm(A, START)
        assert A not in world.b.map.agents

    play(scenario)


def test_a_claim_ends_with_its_lease_and_the_next_has_a_higher_epoch() -> None:
    async def scenario(world: World) -> None:
        await world.joined(world.a, A)
        await world.joined(world.b, B)
        assert await world.claimed(world.a, A)
        assert not await world.claimed(world.b, B)
        world.a.close()
        await asyncio.sleep(1.5 * TTL_S)
        assert await world.claimed(world.b, B)
        assert world.store.memory.map.claims[SHARD].epoch == 2

    play(scenario)


def test_a_lease_is_kept_alive_while_the_process_is_paused() -> None:
    async def scenario(world: World) -> None:
        await world.host.spawn(world.joined(world.a, A))
        world.host.pause(10 * TTL_S)
        await asyncio.sleep(5 * TTL_S)
        assert await world.b.confirm(A, START)

    play(scenario)


def test_what_was_done_may_go_without_an_answer() -> None:
    async def scenario(world: World) -> None:
        await world.joined(world.a, A)
        world.a.cut(requests=False)
        await fails(world.claimed(world.a, A))
        assert world.store.memory.map.claims[SHARD].agent == A
        assert SHARD not in world.a.map.claims
        world.a.heal()
        await asyncio.sleep(0.1)
        assert SHARD in world.a.map.claims

    play(scenario)


def test_what_is_asked_for_over_a_cut_way_is_done_never_or_when_it_heals() -> None:
    done = []

    async def scenario(world: World) -> None:
        await world.joined(world.a, A)
        world.a.cut(answers=False)
        await fails(world.claimed(world.a, A))
        assert not world.store.memory.map.claims
        world.a.heal()
        await asyncio.sleep(0.1)
        done.append(SHARD in world.store.memory.map.claims)

    for _ in range(2):
        play(scenario)
    assert done[0] == done[1], "the same seed, the same fate"


def test_a_late_request_is_done_after_everybody_gave_up() -> None:
    async def scenario(world: World) -> None:
        await world.joined(world.a, A)
        world.a.faults = replace(world.a.faults, late_requests=1.0, late_s=60.0)
        await fails(world.claimed(world.a, A))
        await asyncio.sleep(60.0)
        assert world.store.memory.map.claims[SHARD].agent == A

    play(scenario)


def test_one_that_can_not_reach_the_store_loses_its_lease_and_sees_nothing() -> None:
    async def scenario(world: World) -> None:
        await world.joined(world.a, A)
        world.a.cut()
        await asyncio.sleep(1.5 * TTL_S)
        assert A in world.a.map.agents
        assert A not in world.store.memory.map.agents
        world.a.heal()
        await asyncio.sleep(0.1)
        assert A not in world.a.map.agents

    play(scenario)


def test_an_outage_answers_nothing_and_ends_no_lease() -> None:
    async def scenario(world: World) -> None:
        await world.joined(world.a, A)
        world.store.go_down()
        await fails(world.a.confirm(A, START))
        await asyncio.sleep(3 * TTL_S)
        world.store.go_up()
        assert await world.a.confirm(A, START)
        await asyncio.sleep(3 * TTL_S)
        assert await world.a.confirm(A, START)

    play(scenario)


def test_a_change_is_seen_late_and_never_an_older_one_after_it() -> None:
    async def scenario(world: World) -> None:
        world.b.faults = replace(world.b.faults, watch_s=(0.0, 3.0))
        revisions = []
        for number in range(20):
            await world.a.put_enclosures([EnclosureRecord(EnclosureId(f"e{number}"), (), ())])
            revisions.append(world.b.map.revision)
        assert revisions[-1] < world.a.map.revision
        await asyncio.sleep(3.0)
        assert world.b.map == world.a.map
        assert revisions == sorted(revisions)

    play(scenario)


def test_what_is_asked_again_is_done_twice_and_answered_once() -> None:
    async def scenario(world: World) -> None:
        done: list[float] = []

        def act(_: SimulatedStore) -> int:
            done.append(asyncio.get_running_loop().time())
            world.a.faults = StoreFaults()
            return len(done)

        assert await world.a._ask(act) == len(done) == 2
        assert done[1] - done[0] >= 0.05

    play(scenario, StoreFaults(twice=1.0))


def test_all_leases_may_be_lost_at_once() -> None:
    async def scenario(world: World) -> None:
        for way, agent in ((world.a, A), (world.b, B)):
            await world.joined(way, agent)
        world.store.lose_leases()
        assert not world.store.memory.map.agents
        assert not await world.a.confirm(A, START)

    play(scenario)


def test_a_store_that_begins_anew_knows_only_what_it_is_given() -> None:
    async def scenario(world: World) -> None:
        await world.joined(world.a, A)
        enclosure = EnclosureRecord(EnclosureId("e"), (), ())
        world.store.begin_anew([enclosure], [])
        await asyncio.sleep(2 * TTL_S)
        fabric_map = world.store.memory.map
        assert (dict(fabric_map.agents), dict(fabric_map.enclosures)) == ({}, {enclosure.id: enclosure})

    play(scenario)
