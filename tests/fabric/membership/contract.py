"""The membership contract over etcd: overrides and holds are written as an admin writes them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from tests.contract.membership.membership_contract import Held, MembershipContract, Rule
from tests.fabric.membership.nodes import Cluster

from ostraca_fabric.membership.etcd.admin_records import EtcdRecords
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.ids import FabricId
from ostraca_fabric.model.overrides import OVERRIDES_MARKER, VERSION, Overrides, VolumeOverride, encode
from ostraca_fabric.ports.records import RecordChange

FABRIC = FabricId(b"f" * 16)


class EtcdContract(MembershipContract):
    """Give the keys and the store."""

    @pytest.fixture
    def keys(self) -> EtcdKeys:
        raise NotImplementedError

    @pytest.fixture
    async def records(
        self, etcd: Cluster, keys: EtcdKeys, store: EtcdMembership
    ) -> AsyncIterator[EtcdRecords]:
        settings, dice = EtcdSettings(etcd.endpoints), random.Random(8)
        async with EtcdRecords(FABRIC, settings, keys=keys, dice=dice, lease_ttl_s=5) as records:
            yield records

    @pytest.fixture
    async def held(self, records: EtcdRecords) -> Held:
        hold = await records.hold(record_keys.work("1"), b"{}")
        assert hold is not None
        return hold, lambda: records.let_go(hold)

    @pytest.fixture
    def rule(self, records: EtcdRecords) -> Rule:
        return lambda overrides: write_overrides(records, overrides)


async def write_overrides(records: EtcdRecords, overrides: Overrides) -> int:
    """Write all overrides, and nothing else of their kinds."""
    made = {record_keys.tenant(tenant): encode(each) for tenant, each in overrides.tenants.items()}
    for (tenant, name), switch in overrides.switches.items():
        made[record_keys.switch(tenant, name)] = encode(VolumeOverride(VERSION, tenant, name, switch))
    made |= {record_keys.live(): encode(overrides.live), record_keys.overrides_marker(): OVERRIDES_MARKER}
    prefixes = record_keys.TENANTS, record_keys.SWITCHES
    known = [record.key for prefix in prefixes for record in await records.below(prefix)]
    changes = [RecordChange(key, made.get(key)) for key in {*known, *made}]
    revision = await records.write(changes, unchanged={})
    assert revision is not None
    return revision
