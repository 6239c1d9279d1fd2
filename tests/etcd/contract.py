"""The membership contract over etcd: rulings and holds are written as an admin writes them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from tests.contract.membership_contract import Held, MembershipContract, Rule
from tests.etcd.nodes import Cluster

from ostraca_fabric import record_keys
from ostraca_fabric.adapters.etcd.admin_records import EtcdRecords
from ostraca_fabric.adapters.etcd.keys import Keys
from ostraca_fabric.adapters.etcd.membership import EtcdMembership
from ostraca_fabric.adapters.etcd.settings import EtcdSettings
from ostraca_fabric.ids import FabricId
from ostraca_fabric.ports.records import Written
from ostraca_fabric.rulings import RULED, VERSION, Rulings, VolumeRuling, encode

FABRIC = FabricId(b"f" * 16)


class EtcdContract(MembershipContract):
    """Give the keys and the store."""

    @pytest.fixture
    def keys(self) -> Keys:
        raise NotImplementedError

    @pytest.fixture
    async def records(self, etcd: Cluster, keys: Keys, store: EtcdMembership) -> AsyncIterator[EtcdRecords]:
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
        return lambda rulings: write_rulings(records, rulings)


async def write_rulings(records: EtcdRecords, rulings: Rulings) -> int:
    """Write all rulings, and nothing else of their kinds."""
    made = {record_keys.tenant(tenant): encode(each) for tenant, each in rulings.tenants.items()}
    for (tenant, name), switch in rulings.switches.items():
        made[record_keys.switch(tenant, name)] = encode(VolumeRuling(VERSION, tenant, name, switch))
    made |= {record_keys.live(): encode(rulings.live), record_keys.ruled(): RULED}
    prefixes = record_keys.TENANTS, record_keys.SWITCHES
    known = [record.key for prefix in prefixes for record in await records.below(prefix)]
    changes = [Written(key, made.get(key)) for key in {*known, *made}]
    revision = await records.write(changes, unchanged={})
    assert revision is not None
    return revision
