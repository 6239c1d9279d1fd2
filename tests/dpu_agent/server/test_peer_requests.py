"""What one agent brings into its DRAM cache for the workers of another."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    SETTINGS,
    TENANT,
    Assembly,
    MemoryWorker,
    assembled,
    beside,
    chain_of,
    until,
    with_cache,
)
from tests.support.stalls import Stopwatch

from ostraca_dpu_agent.agent import Agent
from ostraca_dpu_agent.datapath.staging.leases import Purpose
from ostraca_dpu_agent.server.dispatcher import RemoteWorkers
from ostraca_dpu_agent.settings import MIB, AgentSettings
from ostraca_fabric.connection import connect
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.model.outcome import BlockState, Reason
from ostraca_fabric.wire.messages import (
    Cancel,
    Failure,
    Hello,
    Prefetch,
    PrefetchDone,
    PrefetchFor,
    Resolve,
    Resolved,
)

FAR_S = 5.0
CACHED = with_cache(4 * MIB)


async def prefetch(
    fabric: Assembly, worker: MemoryWorker, blocks: int, *, at: str = "agent-1", deadline_s: float = FAR_S
) -> set[tuple[BlockState, Reason]]:
    """Ask the first agent; return what became of the blocks, each outcome once."""
    fabric.requests += 1
    request = Prefetch(fabric.requests, 0, deadline_s, chain_of(range(blocks)), at)
    done = await fabric.data_path.prefetch(worker, fabric.volume, request)
    assert done.request == request.request
    assert len(done.states) == len(done.reasons) == blocks
    return {(BlockState(state), Reason(why)) for state, why in zip(done.states, done.reasons, strict=True)}


def for_guests(blocks: int = 4, *, deadline_s: float = FAR_S, incarnation: int = 1) -> PrefetchFor:
    return PrefetchFor(7, deadline_s, TENANT, "v", incarnation, chain_of(range(blocks)))


def cached(agent: Agent) -> int:
    return len(agent._staging.cache)


async def test_blocks_are_brought_to_the_agent_that_is_named_and_to_no_other() -> None:
    async with assembled() as fabric, beside(fabric, CACHED) as other:
        worker = fabric.worker()
        await fabric.put(worker, range(8))
        assert await prefetch(fabric, worker, 8) == {(BlockState.HIT, Reason.NONE)}
        assert cached(other) == 8
        counters = other.status().counters.prefetched
        assert (counters.blocks, counters.bytes) == (8, 8 * BLOCK_BYTES)
        assert fabric.agent.status().counters.prefetched.blocks == 0
        await fabric.at_rest()


async def test_an_agent_that_is_asked_for_itself_asks_nobody() -> None:
    async with assembled(CACHED) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(4))
        assert await prefetch(fabric, worker, 4, at="agent-0") == {(BlockState.HIT, Reason.NONE)}
        assert cached(fabric.agent) == 4


@pytest.mark.parametrize(
    ("settings", "at", "reason"),
    [
        (CACHED, "agent-2", Reason.NO_AGENT),
        (CACHED, "agent/\x00", Reason.NO_AGENT),
        (SETTINGS, "agent-1", Reason.NO_SPACE),
        (replace(CACHED, requests=replace(CACHED.requests, blocks_max=3)), "agent-1", Reason.OVERLOADED),
    ],
    ids=["unknown", "no name", "no cache", "too many blocks"],
)
async def test_an_agent_that_cannot_do_it_leaves_every_block_declined(
    settings: AgentSettings, at: str, reason: Reason
) -> None:
    async with assembled() as fabric, beside(fabric, settings):
        worker = fabric.worker()
        await fabric.put(worker, range(4))
        assert await prefetch(fabric, worker, 4, at=at) == {(BlockState.DECLINED, reason)}


async def test_an_agent_that_has_as_many_requests_as_it_takes_declines_one_more() -> None:
    settings = replace(CACHED, flow=replace(CACHED.flow, requests_max=1))
    async with assembled() as fabric, beside(fabric, settings) as other:
        worker = fabric.worker()
        await fabric.put(worker, range(8))
        fabric.drive.holds_reads = True
        first = asyncio.create_task(prefetch(fabric, worker, 4))
        await until(lambda: bool(fabric.drive.held))
        assert await prefetch(fabric, worker, 4) == {(BlockState.DECLINED, Reason.OVERLOADED)}
        fabric.drive.let_go()
        assert await first == {(BlockState.HIT, Reason.NONE)}
        assert cached(other) == 4


async def test_an_agent_that_knows_another_incarnation_of_the_volume_brings_nothing() -> None:
    async with assembled() as fabric, beside(fabric, CACHED) as other:
        worker = fabric.worker()
        await fabric.put(worker, range(4))
        record = fabric.volume.record
        for known, code in (
            (replace(record, incarnation=2), "incarnation 2, not 1"),
            (replace(record, name="w"), "no volume"),
        ):
            fabric.membership.store.volumes = {(known.tenant, known.name): known}
            outcome = await prefetch(fabric, worker, 4)
            assert outcome == {(BlockState.DECLINED, Reason.UNKNOWN_VOLUME)}
            answer = await fabric.owners.ask(AgentId("agent-1"), for_guests())
            assert isinstance(answer, Failure)
            assert code in answer.message
        assert cached(other) == 0


async def test_an_agent_that_does_not_answer_leaves_every_block_late_by_the_deadline() -> None:
    async with assembled() as fabric, beside(fabric, CACHED):
        worker = fabric.worker()
        await fabric.put(worker, range(4))
        fabric.drive.holds_reads = True
        watch = Stopwatch()
        assert await prefetch(fabric, worker, 4, deadline_s=0.1) == {(BlockState.LATE, Reason.DEADLINE)}
        assert watch.took_s < 0.1 + 0.05
        fabric.drive.let_go()


async def test_a_worker_that_no_longer_waits_is_answered_at_once() -> None:
    async with assembled() as fabric, beside(fabric, CACHED):
        worker = fabric.worker()
        await fabric.put(worker, range(4))
        fabric.drive.holds_reads = True
        asking = asyncio.create_task(prefetch(fabric, worker, 4, deadline_s=60.0))
        await until(lambda: len(fabric.drive.held) > 0)
        worker.stopped(fabric.requests).set_result(None)
        assert await asking == {(BlockState.LATE, Reason.DEADLINE)}
        fabric.drive.let_go()
        await fabric.at_rest()


async def test_an_agent_that_stops_ends_what_it_does_for_others() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(6))
        async with beside(fabric, CACHED) as other:
            fabric.drive.holds_reads = True
            asking = asyncio.create_task(prefetch(fabric, worker, 6, deadline_s=60.0))
            await until(lambda: len(fabric.drive.held) > 0)
            draining = asyncio.create_task(other.drain())
            assert await asking == {(BlockState.LATE, Reason.DEADLINE)}
            fabric.drive.let_go()
            assert await draining
            assert await prefetch(fabric, worker, 6) == {(BlockState.DECLINED, Reason.OVERLOADED)}
        assert await prefetch(fabric, worker, 6) == {(BlockState.DECLINED, Reason.NO_AGENT)}


async def test_guests_of_one_tenant_together_hold_no_more_than_one_worker_may() -> None:
    async with assembled() as fabric, beside(fabric, CACHED) as other:
        worker = fabric.worker()
        await fabric.put(worker, range(8))
        fabric.drive.holds_reads = True
        share_bytes = int(CACHED.memory.worker_share * CACHED.memory.staging_bytes)
        asking = [asyncio.create_task(prefetch(fabric, fabric.worker(), 8)) for _ in range(24)]
        await until(lambda: len(fabric.drive.held) > 0)
        held = other._staging._held_by
        assert set(held) == {RemoteWorkers(TENANT)}
        lease = await other._staging.lease(
            share_bytes // 4096, 4096, Purpose.GET, holder=RemoteWorkers(TENANT), within_s=0.01
        )
        assert lease is Reason.DEADLINE
        assert max(held.values()) <= share_bytes
        fabric.drive.let_go()
        assert [await each for each in asking] == [{(BlockState.HIT, Reason.NONE)}] * 24


async def test_an_agent_asks_over_a_connection_of_its_own_and_may_cancel(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/agent.sock"
    async with assembled() as fabric, beside(fabric, CACHED, addresses=(address,)) as other:
        await fabric.put(fabric.worker(), range(8))
        connection = await connect(address, Hello(1, 1, "agent", "", "", "agent-0"))
        answer = await connection.ask(for_guests(), FAR_S)
        assert isinstance(answer, PrefetchDone)
        assert list(answer.states) == [BlockState.HIT] * 4
        assert cached(other) == 4
        refused = await connection.ask(for_guests(incarnation=2), FAR_S)
        assert isinstance(refused, Failure)
        assert refused.code == "unknown_volume"
        resolved = await connection.ask(Resolve(7, FAR_S, 0.0, ()), FAR_S)
        assert isinstance(resolved, Resolved)
        fabric.drive.holds_reads = True
        more = msgspec.structs.replace(for_guests(deadline_s=60.0), spans=chain_of(range(4, 8)))
        asking = asyncio.create_task(connection.ask(more, FAR_S))
        await until(lambda: len(fabric.drive.held) > 0)
        connection.send(Cancel(7))
        answer = await asking
        assert isinstance(answer, PrefetchDone)
        assert list(answer.states) == [BlockState.LATE] * 4
        fabric.drive.let_go()
        connection.close()
        await connection.wait_closed()
