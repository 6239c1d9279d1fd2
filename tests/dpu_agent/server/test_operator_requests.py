"""What an operator asks an agent about blocks of a tenant, over a socket as the admin service does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.dpu_agent.controller.test_placement_epochs import add, new_drive
from tests.support.agent.assembly import (
    FAR_S,
    LAYOUT,
    SHARD,
    TENANT,
    Assembly,
    assembled,
    chain_of,
    put_states,
    with_cache,
)
from tests.support.invariants import evict_all

from ostraca_admin.remote_agents import RemoteAgents
from ostraca_dpu_agent.settings import MIB
from ostraca_fabric.connection import connect
from ostraca_fabric.errors import ConnectError, OlderAgentError, RefusedError
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.model.overrides import Overrides, Switch
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.wire.handshake import OPERATOR, WORKER, hello_for
from ostraca_fabric.wire.messages import Failure, PlacementQuery, PrefetchDone

AGENT = AgentId("agent-0")
NOBODYS = VolumeRecord(TENANT, "nobodys", LAYOUT, 4096)


@asynccontextmanager
async def asked(tmp_path: Path) -> AsyncIterator[tuple[Assembly, RemoteAgents]]:
    async with assembled(with_cache(4 * MIB), addresses=[f"unix://{tmp_path}/agent"]) as fabric:
        yield fabric, RemoteAgents(lambda: fabric.membership.map, name="test", token=str)


def outcomes(done: PrefetchDone) -> list[tuple[BlockState, Reason]]:
    return [(BlockState(state), Reason(why)) for state, why in zip(done.states, done.reasons, strict=True)]


async def test_a_block_is_placed_by_each_epoch_where_the_agent_itself_looks_for_it(tmp_path: Path) -> None:
    second = new_drive()
    async with assembled(
        with_cache(4 * MIB), addresses=[f"unix://{tmp_path}/agent"], later=[second]
    ) as fabric:
        hands = RemoteAgents(lambda: fabric.membership.map, name="test", token=str)
        record, volume = fabric.volume.record, fabric.volume
        (before,) = (await hands.place(AGENT, record, chain_of([0])[0])).places
        claim = fabric.membership.map.claims[SHARD]
        assert (before.shard, before.enclosure) == (SHARD, "e")
        assert (before.owner, before.owner_epoch) == (AGENT, claim.epoch)
        await add(fabric, second)
        places = [await hands.place(AGENT, record, chain_of([number])[0]) for number in range(32)]
        routes = fabric.context.routes()
        for number, found in enumerate(places):
            now, then = found.places
            assert now.shard == routes.places(volume.placement_secret, chain_of([number]))[0].shard
            assert (then.shard, then.placement_epoch) == (SHARD, before.placement_epoch)
            assert now.placement_epoch == fabric.membership.map.placement_epoch
        assert {found.places[0].shard for found in places} == {SHARD, second.shard}


async def test_where_a_block_belongs_does_not_tell_whether_it_is_there(tmp_path: Path) -> None:
    async with asked(tmp_path) as (fabric, hands):
        span, record = chain_of([0])[0], fabric.volume.record
        before = await hands.place(AGENT, record, span)
        assert put_states(await fabric.put(fabric.worker(), [0])) == [PutState.COMMITTED]
        fabric.owners.unregister(AGENT)
        assert await hands.place(AGENT, record, span) == before, "and no owner is asked"
        fabric.owners.register(AGENT, fabric.agent._dispatcher)


async def test_what_can_not_be_placed_is_refused(tmp_path: Path) -> None:
    async with asked(tmp_path) as (fabric, hands):
        with pytest.raises(RefusedError, match="no volume 'nobodys'"):
            await hands.place(AGENT, NOBODYS, chain_of([0])[0])
        with pytest.raises(RefusedError, match="2 blocks in one query"):
            await hands.place(AGENT, fabric.volume.record, chain_of([0, 1])[0])
        with pytest.raises(ConnectError, match="agent-9 is not in the fabric"):
            await hands.place(AgentId("agent-9"), fabric.volume.record, chain_of([0])[0])


async def test_an_operator_has_blocks_brought_into_the_cache_unless_the_volume_is_off(
    tmp_path: Path,
) -> None:
    async with asked(tmp_path) as (fabric, hands):
        await fabric.put(fabric.worker(), range(4))
        evict_all(fabric.agent._staging.cache)
        record, spans = fabric.volume.record, chain_of(range(5))
        fabric.membership.rule(Overrides(switches={(TENANT, "v"): Switch.OFF}))
        done = await hands.prefetch(AGENT, record, spans, FAR_S)
        assert outcomes(done) == [(BlockState.DECLINED, Reason.SWITCHED_OFF)] * 5
        fabric.membership.rule(Overrides())
        done = await hands.prefetch(AGENT, record, spans, FAR_S)
        missing = (BlockState.MISS, Reason.NOT_FOUND)
        assert outcomes(done) == [(BlockState.HIT, Reason.NONE)] * 4 + [missing]
        assert len(fabric.agent._staging.cache) == 4
        with pytest.raises(RefusedError, match="incarnation 1, not 2"):
            await hands.prefetch(AGENT, record.erased(), spans, FAR_S)


async def test_only_operators_are_told_where_blocks_belong(tmp_path: Path) -> None:
    async with asked(tmp_path) as (fabric, _):
        (address,) = fabric.agent.addresses
        asking = PlacementQuery(1, TENANT, "v", chain_of([0]))
        operator = await connect(address, hello_for(OPERATOR, "", "test"))
        assert not isinstance(await operator.ask(asking, FAR_S), Failure)
        operator.close()
        worker = await connect(address, hello_for(WORKER, TENANT, "test"))
        with pytest.raises(ConnectError, match="PlacementQuery is not accepted from a worker"):
            await worker.ask(asking, FAR_S)


async def test_an_agent_of_an_older_release_is_not_asked_what_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostraca_dpu_agent.agent.PLACING", "something else")
    async with asked(tmp_path) as (fabric, hands):
        with pytest.raises(OlderAgentError, match="agent-0 lacks placing: upgrade the agent"):
            await hands.place(AGENT, fabric.volume.record, chain_of([0])[0])
        with pytest.raises(OlderAgentError):
            await hands.prefetch(AGENT, fabric.volume.record, chain_of([0]), FAR_S)
