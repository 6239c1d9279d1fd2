"""What every membership store must do. An adapter's test inherits this and gives the store."""

from __future__ import annotations

import asyncio

import pytest

from ostraca_fabric.fabric_map import AgentRecord, DriveRecord, EnclosureRecord, ShardRecord
from ostraca_fabric.ids import (
    AgentId,
    EnclosureId,
    OwnerEpoch,
    ShardId,
    StartId,
    TenantId,
    drive_id,
    shard_id,
)
from ostraca_fabric.layout import Layout
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.volume import VolumeRecord

A, B = AgentId("agent-a"), AgentId("agent-b")
FIRST, SECOND = StartId(b"1" * 16), StartId(b"2" * 16)
NONE_BEFORE = OwnerEpoch(1)


def agent(name: AgentId, start: StartId = FIRST) -> AgentRecord:
    return AgentRecord(name, start, (f"unix:///run/{name}.sock",))


def enclosure(name: str = "enclosure-0", *, weight: int = 1 << 30) -> EnclosureRecord:
    drive = drive_id(EnclosureId(name), "drive-0")
    shard = ShardRecord(shard_id(drive, 0), drive, 0, 1 << 30, weight)
    return EnclosureRecord(EnclosureId(name), (DriveRecord(drive, "/nowhere"),), (shard,))


SHARD: ShardId = enclosure().shards[0].id


class MembershipContract:
    @pytest.fixture
    def store(self) -> Membership:
        raise NotImplementedError

    async def test_an_agent_that_joined_is_in_the_map_until_it_leaves(self, store: Membership) -> None:
        await store.join(agent(A))
        assert store.map.agents == {A: agent(A)}
        await store.leave(A, FIRST)
        assert store.map.agents == {}

    async def test_leaving_under_another_start_id_changes_nothing(self, store: Membership) -> None:
        await store.join(agent(A))
        await store.leave(A, SECOND)
        assert A in store.map.agents

    async def test_a_shard_has_one_owner(self, store: Membership) -> None:
        await store.put_enclosure(enclosure())
        await store.join(agent(A))
        await store.join(agent(B))
        epoch = await store.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE)
        assert epoch is not None
        assert await store.claim(SHARD, B, FIRST, epoch_at_least=NONE_BEFORE) is None
        assert store.map.owner(SHARD) == A

    async def test_the_same_process_claiming_again_keeps_its_epoch(self, store: Membership) -> None:
        await store.join(agent(A))
        epoch = await store.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE)
        assert await store.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE) == epoch

    async def test_each_new_owner_has_a_higher_epoch(self, store: Membership) -> None:
        await store.join(agent(A))
        await store.join(agent(B))
        first = await store.claim(SHARD, A, FIRST, epoch_at_least=OwnerEpoch(7))
        assert first is not None
        assert first >= 7
        await store.release(SHARD, A, FIRST)
        second = await store.claim(SHARD, B, FIRST, epoch_at_least=NONE_BEFORE)
        assert second is not None
        assert second > first

    async def test_a_restarted_agent_has_lost_its_claims(self, store: Membership) -> None:
        await store.join(agent(A))
        first = await store.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE)
        await store.join(agent(A, SECOND))
        assert store.map.owner(SHARD) is None
        second = await store.claim(SHARD, A, SECOND, epoch_at_least=NONE_BEFORE)
        assert first is not None
        assert second is not None
        assert second > first

    async def test_who_is_not_in_the_fabric_claims_nothing(self, store: Membership) -> None:
        assert await store.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE) is None

    async def test_leaving_gives_every_claim_back(self, store: Membership) -> None:
        await store.join(agent(A))
        await store.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE)
        await store.leave(A, FIRST)
        assert store.map.claims == {}

    async def test_the_placement_epoch_rises_with_weights_and_with_nothing_else(
        self, store: Membership
    ) -> None:
        await store.put_enclosure(enclosure())
        before = store.map.placement_epoch
        await store.join(agent(A))
        await store.claim(SHARD, A, FIRST, epoch_at_least=NONE_BEFORE)
        await store.put_enclosure(enclosure())
        assert store.map.placement_epoch == before
        await store.put_enclosure(enclosure(weight=0))
        assert store.map.placement_epoch == before + 1

    async def test_a_watcher_sees_the_newest_map(self, store: Membership) -> None:
        changes = store.changes()
        seen = await anext(changes)
        await store.join(agent(A))
        await store.join(agent(B))
        async with asyncio.timeout(5):
            while set(seen.agents) != {A, B}:
                seen = await anext(changes)
        assert seen.revision == store.map.revision

    async def test_the_first_record_of_a_volume_stays(self, store: Membership) -> None:
        first = VolumeRecord(TenantId("t"), "v", Layout("m", "bf16", 16), 4096)
        other = VolumeRecord(TenantId("t"), "v", Layout("m", "fp8", 16), 4096)
        assert await store.create_volume(first) == first
        assert await store.create_volume(other) == first
        assert await store.volume(TenantId("t"), "v") == first
        assert await store.volume(TenantId("u"), "v") is None

    async def test_a_watcher_of_volumes_sees_all_of_them_the_oldest_first(self, store: Membership) -> None:
        layout = Layout("m", "bf16", 16)
        first, second, third = (
            VolumeRecord(TenantId(tenant), name, layout, 4096)
            for tenant, name in (("t", "v"), ("t", "a"), ("a", "v"))
        )
        await store.create_volume(first)
        changes = store.volume_changes()
        seen = await anext(changes)
        assert seen == (first,)
        await store.create_volume(second)
        await store.create_volume(third)
        async with asyncio.timeout(5):
            while len(seen) < 3:
                seen = await anext(changes)
        assert seen == (first, second, third)
        waiting = asyncio.ensure_future(anext(changes))
        await store.create_volume(first)
        await store.join(agent(A))
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
