"""What requests pass before they are served: erasures, what an agent has heard, and tenants' rates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from tests.support.agent.assembly import SETTINGS, TENANT, Assembly, assembled, until

import ostraca
from ostraca import Ack, BlockState, ClientSettings, Layout, PutState, Reason
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.overrides import VERSION, LiveSettings, Overrides, Switch, TenantOverride

MIB = 1 << 20
BLOCK_BYTES = 64 << 10
LAYOUT = Layout("model", "bf16", 16)
SMALL = ClientSettings(arena_bytes=16 * MIB, chunk_bytes=4 * MIB, transports=("inline",))
HASHES = [bytes([number]) * 32 for number in range(4)]
CONTENT = np.random.default_rng(1).integers(0, 256, (len(HASHES), BLOCK_BYTES), np.uint8)

_T = TypeVar("_T")


class Worker:
    """A worker of a tenant with one volume open, by the SDK, in a thread of its own."""

    def __init__(self, address: str, tenant: str = TENANT, volume: str = "w") -> None:
        self._client = ostraca.connect([address], tenant=tenant, settings=SMALL)
        self._volume = self._client.volume(volume, LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        self._chain = self._volume.chain(HASHES)

    def put(self) -> set[tuple[PutState, Reason]]:
        result = self._volume.put(self._chain, source=CONTENT, deadline_s=5.0, ack=Ack.COMMITTED)
        return set(zip(result.states, result.reasons, strict=True))

    def get(self) -> set[tuple[BlockState, Reason]]:
        into = np.zeros_like(CONTENT)
        result = self._volume.get(self._chain, into=into, deadline_s=5.0)
        if set(result.states) == {BlockState.HIT}:
            assert (into == CONTENT).all()
        return set(zip(result.states, result.reasons, strict=True))

    def lookup(self) -> int:
        return self._volume.lookup([self._chain], deadline_s=5.0).prefix

    def prefetch(self) -> set[tuple[BlockState, Reason]]:
        result = self._volume.prefetch(self._chain, deadline_s=5.0)
        return set(zip(result.states, result.reasons, strict=True))

    def close(self) -> None:
        self._client.close()


PUT = {(PutState.COMMITTED, Reason.NONE)}
EXISTS = {(PutState.EXISTS, Reason.NONE)}
GOT = {(BlockState.HIT, Reason.NONE)}
MISSED = {(BlockState.MISS, Reason.NOT_FOUND)}
NO_QUOTA = {(BlockState.DECLINED, Reason.QUOTA)}
STALE_VOLUME = {(BlockState.DECLINED, Reason.STALE_VOLUME)}


async def do(what: Callable[[], _T]) -> _T:
    return await asyncio.to_thread(what)


async def ruled(fabric: Assembly, **ruling: int | bool) -> None:
    tenant = TenantOverride(VERSION, TENANT, **ruling)  # type: ignore[arg-type]
    fabric.membership.rule(Overrides({TenantId(TENANT): tenant}))


async def test_an_erased_volume_is_empty_for_who_has_it_open_and_may_be_put_to_again(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/agent.sock"
    async with assembled(SETTINGS, addresses=(address,)) as fabric:
        await ruled(fabric, is_erasable=True)
        worker = await do(lambda: Worker(address))
        other = await do(lambda: Worker(address, tenant="other"))
        for each in (worker, other):
            assert await do(each.put) == PUT
            assert await do(each.get) == GOT
        volume = await fabric.membership.volume(TenantId(TENANT), "w")
        assert volume is not None
        assert volume.is_erasable
        revision = await fabric.membership.erase_volume(volume)
        await until(lambda: fabric.agent.status().purged >= revision)
        assert await do(worker.lookup) == 0
        assert await do(worker.get) == MISSED
        assert await do(other.get) == GOT
        assert await do(worker.put) == PUT, "nothing of it exists"
        assert await do(worker.get) == GOT
        again = await do(lambda: Worker(address))
        assert await do(again.get) == GOT
        for each in (worker, other, again):
            await do(each.close)


async def test_a_tenant_that_nobody_made_erasable_makes_volumes_that_are_not(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/agent.sock"
    async with assembled(SETTINGS, addresses=(address,)) as fabric:
        worker = await do(lambda: Worker(address))
        volume = await fabric.membership.volume(TenantId(TENANT), "w")
        assert volume is not None
        assert not volume.is_erasable
        await do(worker.close)


async def test_what_may_have_been_erased_is_declined_and_the_rest_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"unix://{tmp_path}/agent.sock"
    async with assembled(SETTINGS, addresses=(address,)) as fabric:
        lasting = await do(lambda: Worker(address, volume="lasting"))
        await ruled(fabric, is_erasable=True)
        worker = await do(lambda: Worker(address))
        for each in (worker, lasting):
            assert await do(each.put) == PUT

        async def away() -> int:
            raise MembershipError("the store is away")

        monkeypatch.setattr(fabric.membership, "refresh_overrides", away)
        fabric.membership.rule(replace(fabric.membership.overrides, live=LiveSettings(key_ttl_s=0.02)))
        await asyncio.sleep(0.05)
        assert await do(worker.get) == STALE_VOLUME
        assert await do(worker.prefetch) == STALE_VOLUME
        assert await do(worker.put) == {(PutState.DECLINED, Reason.STALE_VOLUME)}
        assert await do(worker.lookup) == 0
        assert await do(lasting.get) == GOT
        declined = next(each for each in fabric.agent.status().operations if each.operation == "get")
        assert declined.of(BlockState.DECLINED, Reason.STALE_VOLUME) == len(HASHES)
        for each in (worker, lasting):
            await do(each.close)


async def test_a_tenant_beyond_its_rate_is_declined_puts_first_and_others_are_not(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/agent.sock"
    async with assembled(SETTINGS, addresses=(address,)) as fabric:
        worker = await do(lambda: Worker(address))
        other = await do(lambda: Worker(address, tenant="other"))
        assert await do(worker.put) == PUT
        # A second holds 100 gets' bytes, and fills so slowly that this test sees nothing of it.
        await ruled(fabric, agent_bytes_per_s=1)
        assert await do(worker.get) == GOT, "a bucket that holds anything lets one in"
        assert await do(worker.get) == NO_QUOTA
        assert await do(worker.prefetch) == NO_QUOTA
        assert await do(worker.put) == {(PutState.DECLINED, Reason.QUOTA)}
        assert await do(worker.lookup) == len(HASHES), "a look-up moves nothing"
        assert await do(other.put) == PUT
        assert await do(other.get) == GOT
        off = {(TenantId(TENANT), "w"): Switch.OFF}
        fabric.membership.rule(replace(fabric.membership.overrides, switches=off))
        assert await do(worker.get) == {(BlockState.DECLINED, Reason.SWITCHED_OFF)}, "of two reasons the one"
        await ruled(fabric, agent_bytes_per_s=0)
        assert await do(worker.get) == GOT
        for each in (worker, other):
            await do(each.close)


async def test_what_was_not_there_costs_a_tenant_nothing(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/agent.sock"
    async with assembled(SETTINGS, addresses=(address,)) as fabric:
        await ruled(fabric, agent_bytes_per_s=len(HASHES) * BLOCK_BYTES)
        worker = await do(lambda: Worker(address))
        for _ in range(20):
            assert await do(worker.get) == MISSED
        assert await do(worker.put) == PUT
        await do(worker.close)
