"""Records in memory and in etcd."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from tests.contract.records_contract import RecordsContract
from tests.etcd.nodes import Cluster

from ostraca_fabric.adapters.etcd.admin_records import EtcdRecords
from ostraca_fabric.adapters.etcd.keys import Keys
from ostraca_fabric.adapters.etcd.membership import EtcdMembership
from ostraca_fabric.adapters.etcd.settings import EtcdSettings
from ostraca_fabric.adapters.memory_records import MemoryRecords
from ostraca_fabric.ids import FabricId

FABRIC = FabricId(b"f" * 16)


class TestMemoryRecords(RecordsContract):
    @pytest.fixture
    async def records(self) -> MemoryRecords:
        return MemoryRecords()


@pytest.mark.slow
class TestEtcdRecords(RecordsContract):
    @pytest.fixture
    async def records(self, etcd: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[EtcdRecords]:
        keys = Keys(f"/records/{request.node.name.replace('_', '-')[-60:].strip('-')}")
        settings, dice = EtcdSettings(etcd.endpoints), random.Random(7)
        fabric = await EtcdMembership.open(FABRIC, settings, dice=dice, keys=keys, begin=True)
        async with EtcdRecords(FABRIC, settings, keys=keys, dice=dice, lease_ttl_s=5.0) as records:
            yield records
        await fabric.close()
