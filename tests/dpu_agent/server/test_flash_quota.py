"""A tenant's quota of flash, by the SDK: what it keeps from others, and what becomes of its own beyond it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.support.agent.assembly import BLOCK_BYTES, LAYOUT, SETTINGS, Assembly, assembled

import ostraca
from ostraca import Ack, BlockState, ClientSettings, PutState
from ostraca_dpu_agent.shards.service import flash_shares
from ostraca_fabric.model.fabric_map import DriveRecord, EnclosureRecord, FabricMap, ShardRecord
from ostraca_fabric.model.ids import EnclosureId, FabricId, PlacementEpoch, TenantId, drive_id, shard_id
from ostraca_fabric.model.overrides import VERSION, Overrides, TenantOverride

MIB = 1 << 20
SEGMENTS = 32
SMALL = ClientSettings(arena_bytes=16 * MIB, chunk_bytes=4 * MIB, transports=("inline",))
BLOCKS = 32
"""Of a chain: nearly two segments."""


def hashes(chain: int) -> list[bytes]:
    rng = np.random.default_rng(chain)
    return [rng.bytes(32) for _ in range(BLOCKS)]


def content(chain: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.random.default_rng(1000 + chain).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)


class Worker:
    """A worker of a tenant."""

    def __init__(self, address: str, tenant: str) -> None:
        self.client = ostraca.connect([address], tenant=tenant, settings=SMALL)
        self._volume = self.client.volume("w", LAYOUT, block_bytes=BLOCK_BYTES, create=True)

    def put(self, chains: range) -> None:
        for chain in chains:
            named = self._volume.chain(hashes(chain))
            for _ in range(100):  # a segment may have to be emptied first
                result = self._volume.put(named, source=content(chain), deadline_s=10.0, ack=Ack.COMMITTED)
                if not set(result.states) - {PutState.COMMITTED, PutState.EXISTS}:
                    break
            else:
                raise AssertionError(f"chain {chain} is declined: {result}")

    def found(self, chains: range) -> int:
        """Count the blocks that are there."""
        into, found = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8), 0
        for chain in chains:
            result = self._volume.get(self._volume.chain(hashes(chain)), into=into, deadline_s=10.0)
            found += sum(state is BlockState.HIT for state in result.states)
        return found


def ruled(fabric: Assembly, **flash_bytes: int) -> None:
    tenants = {TenantId(name): TenantOverride(VERSION, name, quota) for name, quota in flash_bytes.items()}
    fabric.membership.rule(Overrides(tenants))


@pytest.mark.parametrize("flood_mib", [0, 12], ids=["without a quota", "with a quota of its own"])
async def test_a_flood_evicts_nothing_of_what_is_kept_for_another(tmp_path: Path, flood_mib: int) -> None:
    address = f"unix://{tmp_path}/agent.sock"
    async with assembled(SETTINGS, segments=SEGMENTS, addresses=(address,)) as fabric:
        ruled(fabric, kept=8 * MIB, flood=flood_mib * MIB)
        kept = await asyncio.to_thread(Worker, address, "kept")
        flood = await asyncio.to_thread(Worker, address, "flood")
        await asyncio.to_thread(kept.put, range(2))
        await asyncio.to_thread(flood.put, range(100, 140))  # more than twice the shard
        assert await asyncio.to_thread(kept.found, range(2)) == 2 * BLOCKS
        used = dict(fabric.agent.status().shards[0].pools)
        pools = {name: fabric.membership.overrides.tenant(TenantId(name)).pool for name in ("kept", "flood")}
        assert used[pools["kept"]] <= 8 * MIB
        if flood_mib:
            assert used[pools["flood"]] <= flood_mib * MIB
        found = await asyncio.to_thread(flood.found, range(100, 140))
        assert 0 < found < 40 * BLOCKS, "its own gave way to its own"
        for worker in (kept, flood):
            await asyncio.to_thread(worker.client.close)


async def test_without_a_quota_a_flood_evicts_what_others_have(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/agent.sock"
    async with assembled(SETTINGS, segments=SEGMENTS, addresses=(address,)) as fabric:
        other = await asyncio.to_thread(Worker, address, "other")
        flood = await asyncio.to_thread(Worker, address, "flood")
        await asyncio.to_thread(other.put, range(2))
        await asyncio.to_thread(flood.put, range(100, 140))
        assert await asyncio.to_thread(other.found, range(2)) == 0
        ruled(fabric, other=8 * MIB)
        await asyncio.to_thread(other.put, range(2))
        await asyncio.to_thread(flood.put, range(200, 240))
        assert await asyncio.to_thread(other.found, range(2)) == 2 * BLOCKS, "from when it was ruled"
        for worker in (other, flood):
            await asyncio.to_thread(worker.client.close)


def test_every_shard_keeps_the_same_part_of_it_for_a_tenant() -> None:
    enclosure = EnclosureId("e")
    drives = [DriveRecord(drive_id(enclosure, f"d{number}"), "/nowhere") for number in range(3)]
    shards = [
        ShardRecord(shard_id(drive.id, 0), drive.id, 0, 1 << 30, weight, 1 << 20)
        for drive, weight in zip(drives, (300, 100, 0), strict=True)
    ]
    record = EnclosureRecord(enclosure, tuple(drives), tuple(shards))
    fabric_map = FabricMap(FabricId(bytes(16)), 1, PlacementEpoch(1), enclosures={enclosure: record})
    a, b, c = (TenantOverride(VERSION, name, quota) for name, quota in (("a", 100), ("b", 20), ("c", 0)))
    overrides = Overrides({TenantId(each.name): each for each in (a, b, c)})
    assert flash_shares(overrides, fabric_map) == {a.pool: 0.25, b.pool: 0.05}
    assert c.pool == 0
    assert flash_shares(overrides, FabricMap(FabricId(bytes(16)), 1, PlacementEpoch(1))) == {}
