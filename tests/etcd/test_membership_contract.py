"""Membership in etcd does what every membership store must."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from tests.etcd.contract import FABRIC, EtcdContract
from tests.etcd.nodes import Cluster

from ostraca_fabric.adapters.etcd.keys import Keys
from ostraca_fabric.adapters.etcd.membership import EtcdMembership
from ostraca_fabric.adapters.etcd.settings import EtcdSettings

pytestmark = pytest.mark.slow


class TestEtcdMembership(EtcdContract):
    @pytest.fixture
    def keys(self, request: pytest.FixtureRequest) -> Keys:
        return Keys(f"/contract/{request.node.name.replace('_', '-')[-60:].strip('-')}")

    @pytest.fixture
    async def store(self, etcd: Cluster, keys: Keys) -> AsyncIterator[EtcdMembership]:
        membership = await EtcdMembership.open(
            FABRIC, EtcdSettings(etcd.endpoints), dice=random.Random(7), keys=keys, begin=True
        )
        yield membership
        await membership.close()
