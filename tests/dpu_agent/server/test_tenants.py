"""Two tenants on one agent: what a flood by the one leaves to the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    FAR_S,
    LAYOUT,
    SLOT_BYTES,
    TENANT,
    Assembly,
    MemoryWorker,
    assembled,
    beside,
    chain_of,
    get_states,
    until,
    with_cache,
)

from ostraca_dpu_agent.settings import MIB, AgentSettings
from ostraca_dpu_agent.tenants import Tenants
from ostraca_dpu_agent.volumes import Volumes
from ostraca_fabric.connection import connect
from ostraca_fabric.errors import RefusedError
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.tables.digests import derive_keys
from ostraca_fabric.wire.messages import Hello, OpenVolume, Prefetch

A, B = TenantId("a"), TenantId("b")
CACHE_BLOCKS = 4 * MIB // SLOT_BYTES
OF_B = range(CACHE_BLOCKS // 2)
"""What B has in the cache: its part, in whole."""

REQUESTS_MAX = 16


def shared(cache_bytes: int = 4 * MIB) -> AgentSettings:
    """Staging that borrows memory from the cache, and few requests at once."""
    settings = with_cache(cache_bytes)
    return replace(settings, flow=replace(settings.flow, requests_max=REQUESTS_MAX))


@dataclass
class Tenant:
    """A tenant with its connections to an agent."""

    fabric: Assembly
    name: TenantId
    workers: list[MemoryWorker]

    async def put(self, numbers: Iterable[int]) -> None:
        """Put blocks, a few at a time, until they are there."""
        left = list(numbers)
        while left:
            some, left = left[:16], left[16:]
            done = await self.fabric.put(self.workers[0], some)
            assert set(done.states) <= {PutState.COMMITTED, PutState.EXISTS}

    @property
    def cached_blocks(self) -> int:
        return self.fabric.context.staging.cache.bytes_of.get(self.name, 0) // SLOT_BYTES

    def are_cached(self, numbers: Iterable[int]) -> bool:
        keys = derive_keys(self.fabric.volume.secret, chain_of(list(numbers)))
        return bool(self.fabric.context.staging.cache.contains(keys).all())

    def leave(self) -> None:
        for _ in self.workers:
            tenants = self.fabric.context.staging.tenants
            tenants.remove(tenants.connections, self.name)


async def tenant(fabric: Assembly, name: TenantId, connections: int) -> Tenant:
    """Connect workers of a tenant, as ``Sessions`` would."""
    volumes = Volumes(fabric.membership, bytes(32))
    volume = await volumes.open(name, OpenVolume(0, "v", LAYOUT, BLOCK_BYTES, create=True))
    own, workers = replace(fabric, volume=volume), []
    for _ in range(connections):
        fabric.context.staging.tenants.add(fabric.context.staging.tenants.connections, name)
        workers.append(replace(fabric.worker(), tenant=name))
    return Tenant(own, name, workers)


class Flood:
    """All that one tenant can do at once: puts, gets and prefetches of ever other blocks."""

    def __init__(self, by: Tenant, rounds: int) -> None:
        self.by = by
        self.outcomes: Counter[str] = Counter()
        self.most_under_way = 0
        self._next = 1000
        self._tasks = [asyncio.create_task(self._of_worker(worker, rounds)) for worker in by.workers]

    @property
    def is_over(self) -> bool:
        return all(task.done() for task in self._tasks)

    async def over(self) -> None:
        await asyncio.gather(*self._tasks)

    async def _of_worker(self, worker: MemoryWorker, rounds: int) -> None:
        for _ in range(rounds):
            numbers = list(range(self._next, self._next + 24))
            self._next += len(numbers)
            before = [number - 200 for number in numbers]
            await asyncio.gather(
                self._put(worker, numbers), *(self._read(worker, before[at::6]) for at in range(6))
            )

    async def _put(self, worker: MemoryWorker, numbers: list[int]) -> None:
        fabric = self.by.fabric
        try:
            done = await fabric.put(worker, numbers)
        except RefusedError as error:
            self.outcomes[error.code] += 1
        else:
            self.outcomes.update(PutState(state).name for state in done.states)

    async def _read(self, worker: MemoryWorker, numbers: list[int]) -> None:
        fabric = self.by.fabric
        self.most_under_way = max(self.most_under_way, fabric.context.staging.tenants.requests.total())
        fabric.requests += 1
        request = Prefetch(fabric.requests, 0, FAR_S, chain_of(numbers))
        try:
            await fabric.data_path.prefetch(worker, fabric.volume, request)
            await fabric.get(worker, numbers)
        except RefusedError as error:
            self.outcomes[error.code] += 1


@asynccontextmanager
async def both(settings: AgentSettings) -> AsyncIterator[tuple[Tenant, Tenant]]:
    async with assembled(settings, segments=80) as fabric:
        await fabric.ready()
        yield await tenant(fabric, A, 4), await tenant(fabric, B, 1)
        await fabric.at_rest()


async def test_a_flood_by_one_tenant_takes_nothing_from_another() -> None:
    async with both(shared()) as (a, b):
        await b.put(OF_B)
        assert b.are_cached(OF_B)
        flood = Flood(a, rounds=8)
        got = 0
        while not flood.is_over:
            halves = (list(OF_B)[:20], list(OF_B)[20:])
            answers = await asyncio.gather(*(b.fabric.get(b.workers[0], half) for half in halves))
            for half, done in zip(halves, answers, strict=True):
                assert get_states(done) == [BlockState.HIT] * len(half)
            await b.fabric.put(b.workers[0], [5000])
            got += len(OF_B)
            await asyncio.sleep(0)
        await flood.over()
        assert flood.outcomes["COMMITTED"] > 3 * CACHE_BLOCKS
        assert flood.outcomes["overloaded"] > 0, "it was more than could be"
        assert got > 5 * len(OF_B)
        assert b.are_cached(list(OF_B)[1:]), "its own put took the place of one at most"
        assert a.cached_blocks >= CACHE_BLOCKS // 2 - 1


async def test_a_flood_uses_everything_while_nobody_else_is_connected() -> None:
    async with both(shared()) as (a, b):
        await b.put(OF_B)
        b.leave()
        flood = Flood(a, rounds=4)
        await flood.over()
        assert b.cached_blocks == 0
        assert a.cached_blocks >= CACHE_BLOCKS - 4, "all but what the last wave left free"
        assert flood.most_under_way == REQUESTS_MAX


async def test_requests_of_one_tenant_leave_room_for_those_of_others() -> None:
    async with both(shared(0)) as (a, b):
        await a.put(range(8))
        await b.put(range(8))
        for worker in (*a.workers, *b.workers):
            worker.arena.is_held = True
        flood = [asyncio.create_task(a.fabric.get(a.workers[at % 4], range(2))) for at in range(40)]
        await until(lambda: sum(task.done() for task in flood) == 40 - 12)
        assert all(isinstance(task.exception(), RefusedError) for task in flood if task.done())
        of_b = [asyncio.create_task(b.fabric.get(b.workers[0], range(2))) for _ in range(4)]
        await until(lambda: len(b.workers[0].arena.held) > 0)
        assert not any(task.done() for task in of_b)
        assert b.fabric.context.staging.tenants.requests == {A: 12, B: 4}
        with pytest.raises(RefusedError, match="16 requests are in progress"):
            await b.fabric.get(b.workers[0], range(2))
        for worker in (*a.workers, *b.workers):
            worker.arena.let_go()
        for task in of_b:
            assert get_states(await task) == [BlockState.HIT] * 2
        await asyncio.gather(*flood, return_exceptions=True)
        assert not b.fabric.context.staging.tenants.requests


async def test_puts_of_a_flood_let_those_of_another_tenant_through() -> None:
    """Staging is full of puts whose workers do nothing; those of another tenant don't wait for them."""
    memory = replace(shared(0).memory, staging_bytes=4 * MIB, worker_share=1.0, drive_share=1.0)
    settings = replace(shared(0), memory=memory, flow=replace(shared().flow, waves_ahead=8))
    async with both(settings) as (a, b):
        for worker in a.workers:
            worker.arena.is_held = True
        flood = [
            asyncio.create_task(a.fabric.put(worker, range(at, at + 16)))
            for at, worker in zip(range(0, 64, 16), a.workers, strict=True)
        ]
        await until(lambda: len(a.workers[0].arena.held) > 0)
        done = await b.fabric.put(b.workers[0], range(4), deadline_s=5.0)
        assert [PutState(state) for state in done.states] == [PutState.COMMITTED] * 4
        assert not any(task.done() for task in flood)
        for worker in a.workers:
            worker.arena.let_go()
        for task in flood:
            assert set((await task).states) == {PutState.COMMITTED}


async def test_workers_that_never_end_their_transfers_decline_nothing_of_another_tenant() -> None:
    async with both(shared(0)) as (a, b):
        await a.put(range(64))
        await b.put(range(8))
        for worker in a.workers:
            worker.arena.is_held = True
        for _ in range(6):
            await asyncio.gather(
                *(a.fabric.get(worker, range(64), deadline_s=0.1) for worker in a.workers * 3)
            )
        assert a.fabric.context.staging.quarantined_bytes > 4 * MIB, "as much as is let be"
        done = await b.fabric.get(b.workers[0], range(8), deadline_s=5.0)
        assert get_states(done) == [BlockState.HIT] * 8
        for worker in a.workers:
            worker.arena.let_go()


async def test_tenants_are_those_that_are_connected_or_have_requests() -> None:
    tenants, left = Tenants(), list[set[TenantId]]()
    tenants.on_left = lambda: left.append(set(tenants.members))
    tenants.add(tenants.connections, A)
    tenants.add(tenants.connections, A)
    tenants.add(tenants.requests, A)
    tenants.add(tenants.requests, B)
    assert tenants.members == {A, B}
    tenants.remove(tenants.requests, B)
    tenants.remove(tenants.requests, A)
    assert left == [{A}]
    tenants.remove(tenants.connections, A)
    assert tenants.connections == {A: 1}
    tenants.remove(tenants.connections, A)
    assert left == [{A}, set()]
    assert not tenants.requests


async def test_connections_of_workers_count_and_those_of_others_do_not(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/agent.sock"
    async with assembled(shared(), addresses=(address,)) as fabric:
        tenants = fabric.context.staging.tenants
        hellos = [Hello(1, 1, "worker", name, "", "test") for name in ("a", "a", "b")]
        hellos += [Hello(1, 1, role, "", "", "test") for role in ("agent", "operator")]
        connections = [await connect(address, each) for each in hellos]
        assert tenants.connections == {A: 2, B: 1}
        for connection in connections[1:]:
            connection.close()
            await connection.wait_closed()
        await until(lambda: tenants.connections == {A: 1})
        assert tenants.members == {A}
        connections[0].close()
        await connections[0].wait_closed()


async def test_guests_are_a_tenant_while_something_is_done_for_them() -> None:
    async with assembled() as fabric, beside(fabric, shared()) as other:
        worker = fabric.worker()
        await fabric.put(worker, range(4))
        fabric.drive.holds_reads = True
        fabric.requests += 1
        request = Prefetch(fabric.requests, 0, FAR_S, chain_of(range(4)), "agent-1")
        asking = asyncio.create_task(fabric.data_path.prefetch(worker, fabric.volume, request))
        await until(lambda: len(fabric.drive.held) > 0)
        tenants = other._staging.tenants
        assert tenants.members == {TENANT}
        assert not tenants.connections
        fabric.drive.let_go()
        done = await asking
        assert set(np.frombuffer(done.reasons, np.uint8)) == {Reason.NONE}
        assert not tenants.members
