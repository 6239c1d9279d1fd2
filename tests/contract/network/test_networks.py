from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import uvloop
from tests.contract.conftest import VIRTUAL
from tests.contract.network.network_contract import Hosts, NetworkContract
from tests.support.simulated.hosted import HostedNetwork
from tests.support.simulated.simulated_network import SimulatedNetwork
from tests.support.simulated.simulated_stream import LinkSettings
from tests.support.simulated.virtual_hosts import HostsLoop, VirtualHost

from ostraca_fabric.connection import SOCKETS
from ostraca_fabric.connection.network import listen
from ostraca_fabric.wire.address import TcpAddress

REAL: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

UID = 1000


class TestUnixSockets(NetworkContract):
    loop_factories = REAL

    @pytest.fixture
    def hosts(self, tmp_path: Path) -> Hosts:
        return Hosts(SOCKETS, SOCKETS, f"unix://{tmp_path}/agent.sock")


class TestTcp(NetworkContract):
    loop_factories = REAL

    @pytest.fixture
    def hosts(self) -> Hosts:
        return Hosts(SOCKETS, SOCKETS, "tcp://127.0.0.1:0")


class TestTcpOverIpv6(NetworkContract):
    loop_factories = REAL

    @pytest.fixture
    def hosts(self) -> Hosts:
        if not socket.has_dualstack_ipv6():
            pytest.skip("this machine has no IPv6")
        return Hosts(SOCKETS, SOCKETS, "tcp://[::1]:0")


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_who_listens_everywhere_is_reached_over_both_families(
    has_ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_ipv6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_ipv6)
    with listen(TcpAddress("::", 0)) as listening:
        port = listening.getsockname()[1]
        for host in ("127.0.0.1", "::1") if has_ipv6 else ("127.0.0.1",):
            with socket.create_connection((host, port), timeout=10):
                listening.settimeout(10)
                listening.accept()[0].close()


class TestSimulatedTcp(NetworkContract):
    loop_factories = VIRTUAL

    @pytest.fixture(params=range(5))
    def hosts(self, request: pytest.FixtureRequest) -> Hosts:
        network = SimulatedNetwork(request.param, links=LinkSettings(delay_s=(0.0, 0.01)))
        return Hosts(network.host("a"), network.host("b"), "tcp://a:0")


class TestSimulatedUnixSockets(NetworkContract):
    loop_factories = VIRTUAL

    @pytest.fixture
    def hosts(self) -> Hosts:
        host = SimulatedNetwork(0, uid=UID).host("a")
        return Hosts(host, host, "unix:///run/agent.sock")


class TestProcessesOnSimulatedTcp(NetworkContract):
    loop_factories: ClassVar = {"hosts": HostsLoop}

    @pytest.fixture
    async def hosts(self) -> Hosts:
        network = SimulatedNetwork(0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HostsLoop)
        a, b = (HostedNetwork(network.host(name), VirtualHost(name, loop)) for name in "ab")
        return Hosts(a, b, "tcp://a:0")


class TestSimulatedTcpInRealTime(NetworkContract):
    loop_factories = REAL

    @pytest.fixture
    def hosts(self) -> Hosts:
        network = SimulatedNetwork(0)
        return Hosts(network.host("a"), network.host("b"), "tcp://a:0")
