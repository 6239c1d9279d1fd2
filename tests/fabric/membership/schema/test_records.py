"""Records in memory and in etcd."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from tests.contract.membership.records_contract import RecordsContract
from tests.fabric.membership.nodes import Cluster
from tests.support.simulated.memory_records import MemoryRecords

from ostraca_fabric.membership.etcd.admin_records import EtcdRecords
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.model.ids import FabricId

FABRIC = FabricId(b"f" * 16)


class TestMemoryRecords(RecordsContract):
    @pytest.fixture
    async def records(self) -> MemoryRecords:
        return MemoryRecords()


@pytest.mark.slow
class TestEtcdRecords(RecordsContract):
    @pytest.fixture
    async def records(self, etcd: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[EtcdRecords]:
        keys = EtcdKeys(f"/records/{request.node.name.replace('_', '-')[-60:].strip('-')}")
        settings, dice = EtcdSettings(etcd.endpoints), random.Random(7)
        fabric = await EtcdMembership.open(FABRIC, settings, dice=dice, keys=keys, begin=True)
        async with EtcdRecords(FABRIC, settings, keys=keys, dice=dice, lease_ttl_s=5.0) as records:
            yield records
        await fabric.close()
