from __future__ import annotations

import random

import pytest
from tests.contract.membership_contract import MembershipContract

from ostraca_fabric.adapters.memory_membership import MemoryMembership
from ostraca_fabric.errors import MembershipError
from ostraca_fabric.ids import FabricId, TenantId
from ostraca_fabric.layout import Layout
from ostraca_fabric.testing.simulated_membership import SimulatedMembership, SimulatedStore
from ostraca_fabric.volume import VolumeRecord

FABRIC = FabricId(b"f" * 16)


class TestMemoryMembership(MembershipContract):
    @pytest.fixture
    async def store(self) -> MemoryMembership:
        return MemoryMembership(FABRIC)


class TestSimulatedMembership(MembershipContract):
    @pytest.fixture
    async def store(self) -> SimulatedMembership:
        return SimulatedMembership(SimulatedStore(FABRIC), random.Random(1))


async def test_a_volume_that_could_not_be_kept_does_not_exist() -> None:
    def refuse(_: tuple[VolumeRecord, ...]) -> None:
        raise MembershipError("the disk is full")

    store = MemoryMembership(FABRIC, keep=refuse)
    with pytest.raises(MembershipError):
        await store.create_volume(VolumeRecord(TenantId("t"), "v", Layout("m", "bf16", 16), 4096))
    assert await store.volume(TenantId("t"), "v") is None
