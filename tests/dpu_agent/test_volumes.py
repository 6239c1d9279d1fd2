"""Opening volumes: what fits the fabric's shards, and what is refused with what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.agent.assembly import FABRIC, LAYOUT, TENANT

from ostraca_dpu_agent.volumes import Volumes
from ostraca_fabric.errors import (
    BlocksTooLargeError,
    MembershipError,
    RefusedError,
    UnknownVolumeError,
    UsageError,
)
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model.fabric_map import DriveRecord, EnclosureRecord, ShardRecord
from ostraca_fabric.model.ids import EnclosureId, TenantId, drive_id, shard_id
from ostraca_fabric.model.overrides import LiveSettings, Overrides
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.wire.messages import OpenVolume

BLOCK_BYTES = 1 << 20


def enclosure(name: str, block_bytes_max: int, *, weight: int = 1 << 30) -> EnclosureRecord:
    drive = drive_id(EnclosureId(name), "d")
    shard = ShardRecord(shard_id(drive, 0), drive, 0, 1 << 30, weight, block_bytes_max)
    return EnclosureRecord(EnclosureId(name), (DriveRecord(drive, "/nowhere"),), (shard,))


def asked(name: str = "v", block_bytes: int = BLOCK_BYTES) -> OpenVolume:
    return OpenVolume(0, name, LAYOUT, block_bytes, create=True)


async def fabric_of(*enclosures: EnclosureRecord) -> tuple[MemoryMembership, Volumes]:
    membership = MemoryMembership(FABRIC)
    for each in enclosures:
        await membership.put_enclosures([each])
    return membership, Volumes(membership, bytes(32))


async def test_a_volume_whose_blocks_some_shard_can_not_hold_is_not_made() -> None:
    membership, volumes = await fabric_of(enclosure("a", BLOCK_BYTES), enclosure("b", BLOCK_BYTES - 4096))
    with pytest.raises(UsageError, match=f"segments of shard b/d/0 hold none above {BLOCK_BYTES - 4096}"):
        await volumes.open(TENANT, asked())
    assert await membership.volume(TENANT, "v") is None
    assert (await volumes.open(TENANT, asked(block_bytes=BLOCK_BYTES - 4096))).record.name == "v"


async def test_a_block_as_large_as_a_data_area_fits() -> None:
    _, volumes = await fabric_of(enclosure("a", BLOCK_BYTES))
    assert (await volumes.open(TENANT, asked())).record.block_bytes == BLOCK_BYTES


async def test_a_shard_that_nothing_is_placed_on_does_not_count() -> None:
    _, volumes = await fabric_of(enclosure("a", BLOCK_BYTES), enclosure("b", 4096, weight=0))
    assert (await volumes.open(TENANT, asked())).record.name == "v"


async def test_a_volume_is_refused_when_it_is_opened_where_a_shard_does_not_hold_its_blocks() -> None:
    membership = MemoryMembership(FABRIC, volumes=[VolumeRecord(TENANT, "v", LAYOUT, BLOCK_BYTES)])
    store = membership.store
    store.map = replace(store.map, enclosures={EnclosureId("b"): enclosure("b", 4096)})  # however it came
    volumes = Volumes(membership, bytes(32))
    with pytest.raises(UsageError, match=r"volume 'v' .* shard b/d/0 hold none above 4096"):
        await volumes.open(TENANT, asked())


async def test_drives_that_do_not_hold_the_blocks_of_a_volume_are_not_added_and_it_stays_open() -> None:
    membership, volumes = await fabric_of(enclosure("a", BLOCK_BYTES))
    before = await volumes.open(TENANT, asked())
    with pytest.raises(BlocksTooLargeError, match="b/d/0"):
        await membership.put_enclosures([enclosure("b", 4096)])
    assert await volumes.open(TENANT, asked()) == before


async def test_no_volume_of_a_second_tenant_is_made_under_direct_reads() -> None:
    membership, volumes = await fabric_of(enclosure("a", BLOCK_BYTES))
    other = TenantId("other")
    before = await volumes.open(other, asked("known"))
    membership.rule(Overrides(live=LiveSettings(direct_reads_tenant=TENANT)))
    with pytest.raises(RefusedError, match="first `ostraca settings unset direct_reads_tenant`"):
        await volumes.open(other, asked())
    assert await membership.volume(other, "v") is None
    assert await volumes.open(other, asked("known")) == before
    assert (await volumes.open(TENANT, asked())).record.name == "v"
    membership.rule(Overrides())
    assert (await volumes.open(other, asked())).record.tenant == other


class StoreWithoutReads(MemoryMembership):
    async def volume(self, tenant: TenantId, name: str) -> VolumeRecord | None:
        raise MembershipError(f"{len(tenant) + len(name)} bytes were asked for")


@pytest.mark.parametrize("name", ["", "../v", "v/w", "\0" * (1 << 20)])
async def test_no_store_is_asked_for_a_name_that_no_volume_can_have(name: str) -> None:
    with pytest.raises(UnknownVolumeError, match="is not a usable name") as refused:
        await Volumes(StoreWithoutReads(FABRIC), bytes(32)).find(TENANT, name)
    assert len(str(refused.value)) < 1000, "a worker gets its text back in an answer"
