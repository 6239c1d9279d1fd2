"""Records in memory and in etcd."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest
from tests.contract.membership.records_contract import RecordsContract
from tests.fabric.membership.nodes import Cluster
from tests.support.simulated.memory_records import MemoryRecords

from ostraca_fabric.membership.etcd.admin_records import EtcdRecords
from ostraca_fabric.membership.etcd.client.rpc_pb2 import Compare, RequestOp, TxnResponse
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.model.ids import FabricId

FABRIC = FabricId(b"f" * 16)


@asynccontextmanager
async def opened(etcd: Cluster, keys: EtcdKeys) -> AsyncIterator[EtcdRecords]:
    settings, dice = EtcdSettings(etcd.endpoints), random.Random(7)
    fabric = await EtcdMembership.open(FABRIC, settings, dice=dice, keys=keys, begin=True)
    async with EtcdRecords(FABRIC, settings, keys=keys, dice=dice, lease_ttl_s=5.0) as records:
        yield records
    await fabric.close()


class TestMemoryRecords(RecordsContract):
    @pytest.fixture
    async def records(self) -> MemoryRecords:
        return MemoryRecords()


@pytest.mark.slow
class TestEtcdRecords(RecordsContract):
    @pytest.fixture
    async def records(self, etcd: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[EtcdRecords]:
        keys = EtcdKeys(f"/records/{request.node.name.replace('_', '-')[-60:].strip('-')}")
        async with opened(etcd, keys) as records:
            yield records


@pytest.mark.slow
class TestEveryAnswerIsLostOnce(TestEtcdRecords):
    """Each transaction is done, not heard of, and asked for again, as a client over several members does."""

    test_changes_are_told_behind_what_there_is = None  # type: ignore[assignment]  # those made twice are told twice

    @pytest.fixture
    async def records(
        self, etcd: Cluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[EtcdRecords]:
        keys = EtcdKeys(f"/lost/{request.node.name.replace('_', '-')[-60:].strip('-')}")
        async with opened(etcd, keys) as records:
            txn = records._client.txn

            async def twice(compare: Iterable[Compare], success: Iterable[RequestOp]) -> TxnResponse:
                asked = list(compare), list(success)
                await txn(*asked)
                return await txn(*asked)

            monkeypatch.setattr(records._client, "txn", twice)
            yield records
