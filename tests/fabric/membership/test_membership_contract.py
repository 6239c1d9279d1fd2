"""Membership in etcd does what every membership store must."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from tests.fabric.membership.contract import FABRIC, EtcdContract
from tests.fabric.membership.nodes import Cluster

from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys

pytestmark = pytest.mark.slow


class TestEtcdMembership(EtcdContract):
    @pytest.fixture
    def keys(self, request: pytest.FixtureRequest) -> EtcdKeys:
        return EtcdKeys(f"/contract/{request.node.name.replace('_', '-')[-60:].strip('-')}")

    @pytest.fixture
    async def store(self, etcd: Cluster, keys: EtcdKeys) -> AsyncIterator[EtcdMembership]:
        membership = await EtcdMembership.open(
            FABRIC, EtcdSettings(etcd.endpoints), dice=random.Random(7), keys=keys, begin=True
        )
        yield membership
        await membership.close()
