from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.contract.conftest import VIRTUAL
from tests.contract.network.owners_contract import OWNER, Owner, OwnersContract, Reached, Serving
from tests.support.simulated.simulated_network import SimulatedNetwork

from ostraca_dpu_agent.adapters.peers.loopback_owners import LoopbackOwners
from ostraca_dpu_agent.adapters.peers.owners import NetworkOwners
from ostraca_fabric.connection import SOCKETS, Network, serve
from ostraca_fabric.model.ids import AgentId, StartId
from ostraca_fabric.wire.handshake import Access, AgentHandshake

TOKEN = "of the fabric"


@asynccontextmanager
async def over(address: str, *, answering: Network, asking: Network, nowhere: str) -> AsyncIterator[Reached]:
    """Reach an owner that listens at an address."""
    owner = Owner()
    handshake = AgentHandshake(OWNER, StartId(bytes(16)), Access(own_uid=0, fabric_tokens=(TOKEN,)))
    server = await serve(address, Serving(owner), handshake, network=answering)
    owners = NetworkOwners(
        AgentId("asker"),
        here=LoopbackOwners(),
        address_of=lambda agent: (server.address if agent == OWNER else nowhere,),
        dice=random.Random(1),
        token=lambda: TOKEN,
        network=asking,
    )
    yield Reached(owners, owner)
    await owners.close()
    assert await server.close()


class TestLoopback(OwnersContract):
    @pytest.fixture
    async def reached(self) -> AsyncIterator[Reached]:
        owners, owner = LoopbackOwners(), Owner()
        owners.register(OWNER, owner)
        yield Reached(owners, owner)
        await owners.finish()


class TestUnixSockets(OwnersContract):
    @pytest.fixture
    async def reached(self, tmp_path: Path) -> AsyncIterator[Reached]:
        nowhere = f"unix://{tmp_path}/nowhere.sock"
        address = f"unix://{tmp_path}/agent.sock"
        async with over(address, answering=SOCKETS, asking=SOCKETS, nowhere=nowhere) as reached:
            yield reached


class TestTcp(OwnersContract):
    @pytest.fixture
    async def reached(self, unused_tcp_port: int) -> AsyncIterator[Reached]:
        nowhere = f"tcp://127.0.0.1:{unused_tcp_port}"
        async with over("tcp://127.0.0.1:0", answering=SOCKETS, asking=SOCKETS, nowhere=nowhere) as reached:
            yield reached


class TestSimulatedNetwork(OwnersContract):
    loop_factories = VIRTUAL

    @pytest.fixture(params=range(3))
    async def reached(self, request: pytest.FixtureRequest) -> AsyncIterator[Reached]:
        network = SimulatedNetwork(request.param)
        answering, asking = network.host("a"), network.host("b")
        async with over("tcp://a:0", answering=answering, asking=asking, nowhere="tcp://a:1") as reached:
            yield reached
