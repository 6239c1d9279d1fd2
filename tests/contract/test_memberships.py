from __future__ import annotations

import random

import pytest
from tests.contract.membership_contract import MembershipContract, Rule

from ostraca_fabric.adapters.memory_membership import MemoryMembership
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.ids import FabricId, TenantId
from ostraca_fabric.layout import Layout
from ostraca_fabric.rulings import Rulings
from ostraca_fabric.testing.simulated_membership import SimulatedMembership, SimulatedStore
from ostraca_fabric.volume import VolumeRecord

FABRIC = FabricId(b"f" * 16)


class TestMemoryMembership(MembershipContract):
    @pytest.fixture
    async def store(self) -> MemoryMembership:
        return MemoryMembership(FABRIC)

    @pytest.fixture
    def rule(self, store: MemoryMembership) -> Rule:
        async def rule(rulings: Rulings) -> int:
            return store.rule(rulings)

        return rule


class TestSimulatedMembership(MembershipContract):
    @pytest.fixture
    def simulated(self) -> SimulatedStore:
        return SimulatedStore(FABRIC)

    @pytest.fixture
    async def store(self, simulated: SimulatedStore) -> SimulatedMembership:
        return SimulatedMembership(simulated, random.Random(1))

    @pytest.fixture
    def rule(self, simulated: SimulatedStore) -> Rule:
        async def rule(rulings: Rulings) -> int:
            return simulated.transact(lambda store: store.memory.rule(rulings))

        return rule


async def test_a_volume_that_could_not_be_kept_does_not_exist() -> None:
    def refuse(_: tuple[VolumeRecord, ...]) -> None:
        raise MembershipError("the disk is full")

    store = MemoryMembership(FABRIC, keep=refuse)
    with pytest.raises(MembershipError):
        await store.create_volume(VolumeRecord(TenantId("t"), "v", Layout("m", "bf16", 16), 4096))
    assert await store.volume(TenantId("t"), "v") is None
