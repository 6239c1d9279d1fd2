from __future__ import annotations

import random

import pytest
from tests.contract.membership.membership_contract import Held, MembershipContract, Rule
from tests.support.simulated.memory_records import MemoryRecords
from tests.support.simulated.simulated_membership import SimulatedMembership, SimulatedStore

from ostraca_fabric.errors import MembershipError
from ostraca_fabric.membership.memory_membership import MemoryMembership, MemoryStore
from ostraca_fabric.model.ids import FabricId, TenantId
from ostraca_fabric.model.overrides import Overrides
from ostraca_fabric.model.volume import Layout, VolumeRecord

FABRIC = FabricId(b"f" * 16)


async def held_in(store: MemoryStore) -> Held:
    """Hold something in records that the store goes by."""
    records = MemoryRecords()
    store.stands = records.stands
    hold = await records.hold("work/1", b"{}")
    assert hold is not None
    return hold, lambda: records.let_go(hold)


class TestMemoryMembership(MembershipContract):
    @pytest.fixture
    async def store(self) -> MemoryMembership:
        return MemoryMembership(FABRIC)

    @pytest.fixture
    async def held(self, store: MemoryMembership) -> Held:
        return await held_in(store.store)

    @pytest.fixture
    def rule(self, store: MemoryMembership) -> Rule:
        async def rule(overrides: Overrides) -> int:
            return store.rule(overrides)

        return rule


class TestSimulatedMembership(MembershipContract):
    @pytest.fixture
    def simulated(self) -> SimulatedStore:
        return SimulatedStore(FABRIC)

    @pytest.fixture
    async def store(self, simulated: SimulatedStore) -> SimulatedMembership:
        return SimulatedMembership(simulated, random.Random(1))

    @pytest.fixture
    async def held(self, simulated: SimulatedStore) -> Held:
        return await held_in(simulated.memory)

    @pytest.fixture
    def rule(self, simulated: SimulatedStore) -> Rule:
        async def rule(overrides: Overrides) -> int:
            return simulated.transact(lambda store: store.memory.rule(overrides))

        return rule


async def test_a_volume_that_could_not_be_kept_does_not_exist() -> None:
    def refuse(_: tuple[VolumeRecord, ...]) -> None:
        raise MembershipError("the disk is full")

    store = MemoryMembership(FABRIC, keep=refuse)
    with pytest.raises(MembershipError):
        await store.create_volume(VolumeRecord(TenantId("t"), "v", Layout("m", "bf16", 16), 4096))
    assert await store.volume(TenantId("t"), "v") is None
