"""Membership in etcd does what every membership store must."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from tests.contract.membership_contract import MembershipContract
from tests.etcd.nodes import Cluster

from ostraca_fabric.adapters.etcd.keys import Keys
from ostraca_fabric.adapters.etcd.membership import EtcdMembership
from ostraca_fabric.adapters.etcd.settings import EtcdSettings
from ostraca_fabric.ids import FabricId

pytestmark = pytest.mark.slow

FABRIC = FabricId(b"f" * 16)


class TestEtcdMembership(MembershipContract):
    @pytest.fixture
    async def store(self, etcd: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[EtcdMembership]:
        keys = Keys(f"/contract/{request.node.name.replace('_', '-')[-60:].strip('-')}")
        membership = await EtcdMembership.open(
            FABRIC, EtcdSettings(etcd.endpoints), dice=random.Random(7), keys=keys, begin=True
        )
        yield membership
        await membership.close()
