"""Connections over TLS: who is let in, what crosses, and certificates that change."""

from __future__ import annotations

import asyncio
import random
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import uvloop
from tests.contract.network.certificates import Authority
from tests.contract.network.network_contract import Hosts, NetworkContract, Recorder
from tests.contract.network.owners_contract import OwnersContract, Reached
from tests.contract.network.test_owners import over
from tests.fabric.connection.peers import HANDSHAKE, HELLO, SETTINGS, TOKEN, Answering

from ostraca_fabric.connection import SOCKETS, Server, SocketNetwork, connect, serve
from ostraca_fabric.errors import AuthenticationError, ConnectError, UsageError
from ostraca_fabric.sockets.tls import Tls, TlsFiles
from ostraca_fabric.wire.handshake import AGENT, OPERATOR, Access, hello_for
from ostraca_fabric.wire.messages import Hello, Ping, Pong

HOST = "127.0.0.1"
ASKED = f"tls://{HOST}:0"
AGENT_HELLO = hello_for(AGENT, "", "agent-b")
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, TlsFiles, TlsFiles]:
    """Return a CA, and the files of agents a and b."""
    authority = Authority(tmp_path_factory.mktemp("ca"))
    return authority, authority.files("agent-a", HOST), authority.files("agent-b", HOST)


@pytest.fixture
def authority(made: tuple[Authority, TlsFiles, TlsFiles]) -> Authority:
    return made[0]


@pytest.fixture
def a(made: tuple[Authority, TlsFiles, TlsFiles]) -> SocketNetwork:
    return SocketNetwork(Tls(made[1]))


@pytest.fixture
def b(made: tuple[Authority, TlsFiles, TlsFiles]) -> SocketNetwork:
    return SocketNetwork(Tls(made[2]))


class Bare(SocketNetwork):
    """Trusts the CA and shows nothing."""

    def __init__(self, ca: Path) -> None:
        super().__init__()
        self._context = ssl.create_default_context(cafile=ca)

    async def dial(self, address: object, protocol: asyncio.BufferedProtocol) -> None:
        loop = asyncio.get_running_loop()
        _, _, port = str(address).rpartition(":")
        await loop.create_connection(lambda: protocol, HOST, int(port), ssl=self._context)


@asynccontextmanager
async def serving(network: SocketNetwork, access: Access | None = None) -> AsyncIterator[Server]:
    handshake = replace(HANDSHAKE, access=access or HANDSHAKE.access)
    server = await serve(ASKED, Answering(), handshake, SETTINGS, network=network)
    yield server
    assert await server.close()


async def works(server: Server, hello: Hello, network: SocketNetwork) -> None:
    connection = await connect(server.address, hello, network=network)
    assert await connection.ask(Ping(1), 10.0) == Pong(1)
    connection.close()
    await connection.wait_closed()


class TestConnections:
    loop_factories = LOOPS

    @pytest.mark.parametrize("hello", [AGENT_HELLO, HELLO, hello_for(OPERATOR, "", "ops", TOKEN)])
    async def test_agents_come_in_by_certificate_and_others_by_token(
        self, a: SocketNetwork, b: SocketNetwork, hello: Hello
    ) -> None:
        async with serving(a) as server:
            assert server.address.startswith("tls://")
            assert not server.address.endswith(":0")
            await works(server, hello, b)

    async def test_a_name_of_all_agents_stands_for_the_host_of_an_address(self, authority: Authority) -> None:
        files = authority.files("pods", "agents.example")
        named, other = (
            SocketNetwork(Tls(files, peer_name=each)) for each in ("agents.example", "else.example")
        )
        async with serving(named) as server:
            await works(server, AGENT_HELLO, named)
            for refused in (SocketNetwork(Tls(files)), other):
                with pytest.raises(ConnectError, match="does not carry that host"):
                    await connect(server.address, AGENT_HELLO, network=refused)

    async def test_bulk_and_messages_cross_both_ways(self, a: SocketNetwork, b: SocketNetwork) -> None:
        handler = Answering()
        server = await serve(ASKED, handler, HANDSHAKE, SETTINGS, network=a)
        connection = await connect(server.address, HELLO, network=b)
        (other,) = handler.opened
        source = np.frombuffer(np.random.default_rng(1).bytes(8 << 20), np.uint8)
        targets = np.zeros((2, 8 << 20), np.uint8)
        lengths = np.full(128, 1 << 16, np.uint32)
        offsets = np.arange(128, dtype=np.int64) << 16
        places = np.arange(128, dtype=np.uint64)
        under_way = []
        for number, (ours, theirs) in enumerate(((connection, other), (other, connection))):
            landed = theirs.expect_bulk(7, targets[number], offsets=offsets, lengths=lengths)
            sent = ours.send_bulk(7, source, places=places, offsets=offsets, lengths=lengths)
            under_way += [landed, sent]
        assert await connection.ask(Ping(1), 10.0) == Pong(1)
        async with asyncio.timeout(20):
            await asyncio.gather(*under_way)
        assert np.array_equal(targets, [source, source])
        assert await server.close()
        await connection.wait_closed()

    async def test_what_is_said_last_is_heard(self, a: SocketNetwork, b: SocketNetwork) -> None:
        async with serving(a) as server:
            connection = await connect(server.address, HELLO, network=b)
            connection.send(HELLO)
            with pytest.raises(ConnectError, match="Hello is not accepted from a worker"):
                await connection.ask(Ping(1), 5.0)
            await connection.wait_closed()

    async def test_an_agent_without_a_certificate_is_refused_whatever_its_token(
        self, a: SocketNetwork, authority: Authority
    ) -> None:
        bare = Bare(authority.cert)
        async with serving(a) as server:
            await works(server, HELLO, bare)
            for token in ("", TOKEN):
                with pytest.raises(
                    AuthenticationError, match="certificate for the role agent over TLS is missing"
                ):
                    await connect(server.address, hello_for(AGENT, "", "b", token), network=bare)

    async def test_workers_show_certificates_where_they_must(
        self, a: SocketNetwork, b: SocketNetwork, authority: Authority
    ) -> None:
        async with serving(a, replace(HANDSHAKE.access, workers_show_certificates=True)) as server:
            await works(server, HELLO, b)
            with pytest.raises(AuthenticationError, match="is missing"):
                await connect(server.address, HELLO, network=Bare(authority.cert))

    async def test_a_certificate_is_no_tenant_s_token(self, a: SocketNetwork, b: SocketNetwork) -> None:
        async with serving(a) as server:
            with pytest.raises(AuthenticationError, match="over TLS needs a token"):
                await connect(server.address, hello_for("worker", "red", "w"), network=b)
            with pytest.raises(AuthenticationError, match="the token is not valid for"):
                await connect(server.address, hello_for(AGENT, "", "b", "wrong"), network=b)

    async def test_only_agents_on_the_list_come_in(self, a: SocketNetwork, b: SocketNetwork) -> None:
        async with serving(a, replace(HANDSHAKE.access, agent_names=frozenset({"agent-b"}))) as server:
            await works(server, AGENT_HELLO, b)
            with pytest.raises(AuthenticationError, match="none of the names listed"):
                await connect(server.address, AGENT_HELLO, network=a)

    async def test_rules_that_change_put_out_whom_they_no_longer_let_in_and_nobody_else(
        self, a: SocketNetwork, b: SocketNetwork
    ) -> None:
        async with serving(a) as server:
            connection = await connect(server.address, AGENT_HELLO, network=b)
            server.readmit(replace(HANDSHAKE.access, fabric_tokens=("another",)))
            assert await connection.ask(Ping(1), 5.0) == Pong(1)
            server.readmit(replace(HANDSHAKE.access, agent_names=frozenset({"agent-c"})))
            await connection.wait_closed()

    async def test_a_certificate_of_another_authority_is_refused_by_either_end(
        self, a: SocketNetwork, authority: Authority, tmp_path: Path
    ) -> None:
        stranger = Authority(tmp_path, "stranger")
        believes = SocketNetwork(Tls(stranger.files("x", HOST, ca=authority.cert)))
        doubts = SocketNetwork(Tls(stranger.files("y", HOST)))
        async with serving(a) as server:
            for network, why in (
                (believes, "It may refuse our certificate"),
                (doubts, "is not signed by a CA that is known here"),
            ):
                with pytest.raises(ConnectError, match=why):
                    await connect(server.address, AGENT_HELLO, network=network)
            assert server.connections == frozenset()

    async def test_a_certificate_for_another_host_is_refused(
        self, authority: Authority, b: SocketNetwork
    ) -> None:
        elsewhere = SocketNetwork(Tls(authority.files("elsewhere", "10.1.2.3")))
        async with serving(elsewhere) as server:
            with pytest.raises(
                ConnectError, match=r"does not carry that host: dial one that it carries.*IP address mismatch"
            ):
                await connect(server.address, AGENT_HELLO, network=b)

    async def test_who_speaks_no_tls_harms_nobody(self, a: SocketNetwork, b: SocketNetwork) -> None:
        async with serving(a) as server:
            plain = server.address.replace("tls://", "tcp://")
            with pytest.raises(ConnectError):
                await connect(plain, HELLO, network=SOCKETS)
            await works(server, AGENT_HELLO, b)

    async def test_changed_files_count_for_new_connections(
        self, authority: Authority, b: SocketNetwork, tmp_path: Path
    ) -> None:
        new_authority = Authority(tmp_path, "new")
        files = TlsFiles(tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem")
        install(authority.files("a1", HOST), files)
        network = SocketNetwork(Tls(files))
        async with serving(network) as server:
            old = await connect(server.address, AGENT_HELLO, network=b)
            assert files.key is not None
            files.key.unlink()
            await works(server, AGENT_HELLO, b)
            install(new_authority.files("a2", HOST), files)
            with pytest.raises(ConnectError):
                await connect(server.address, AGENT_HELLO, network=b)
            new = SocketNetwork(Tls(new_authority.files("b2", HOST)))
            await works(server, AGENT_HELLO, new)
            assert await old.ask(Ping(2), 5.0) == Pong(2)
            old.close()
            await old.wait_closed()

    async def test_a_handshake_that_ends_after_its_server_leads_nowhere(
        self, a: SocketNetwork, authority: Authority
    ) -> None:
        server = await serve(ASKED, Answering(), HANDSHAKE, SETTINGS, network=a)
        plain, encrypted = Recorder(), Recorder()
        loop = asyncio.get_running_loop()
        port = int(server.address.rpartition(":")[2])
        await loop.create_connection(lambda: plain, HOST, port)
        while not server._listening._handshakes:  # type: ignore[union-attr]  # noqa: ASYNC110 (in the loop's own time)
            await asyncio.sleep(0)
        assert await server.close()
        context = ssl.create_default_context(cafile=authority.cert)
        await loop.start_tls(plain.transport, encrypted, context, server_hostname=HOST)
        async with asyncio.timeout(3):  # the kernel's backlog would end it as well, but later
            await encrypted.lost
        assert encrypted.came == b""
        assert server.connections == frozenset()


def install(made: TlsFiles, files: TlsFiles) -> None:
    for source, target in ((made.cert, files.cert), (made.key, files.key), (made.ca, files.ca)):
        assert source is not None
        assert target is not None
        shutil.copy(source, target)


class TestNetwork(NetworkContract):
    loop_factories = LOOPS

    @pytest.fixture
    def hosts(self, a: SocketNetwork, b: SocketNetwork) -> Hosts:
        return Hosts(a, b, ASKED)


class TestOwnersOverTls(OwnersContract):
    @pytest.fixture
    async def reached(
        self, a: SocketNetwork, b: SocketNetwork, unused_tcp_port: int
    ) -> AsyncIterator[Reached]:
        nowhere = f"tls://{HOST}:{unused_tcp_port}"
        async with over(ASKED, answering=a, asking=b, nowhere=nowhere) as reached:
            yield reached


async def test_addresses_of_tls_take_certificates() -> None:
    with pytest.raises(UsageError, match="needs a CA"):
        await serve(ASKED, Answering(), HANDSHAKE, SETTINGS)
    with pytest.raises(UsageError, match="needs a CA"):
        await connect("tls://localhost:1", HELLO)


@pytest.mark.parametrize(
    ("host", "days", "why"),
    [
        (HOST, -1, "has expired: renew it"),
        ("10.1.2.3", 2, "does not carry that host"),
        (HOST, 2, None),
    ],
)
def test_a_certificate_that_others_would_not_accept_is_found_by_its_owner(
    authority: Authority, host: str, days: int, why: str | None
) -> None:
    files = authority.files(f"checked-{host}-{days}", host, days=days)
    if why is None:
        Tls(files, [HOST])
        return
    with pytest.raises(UsageError, match=f"{files.cert} will not do for tls://{HOST}.*{why}"):
        Tls(files, [HOST])


@pytest.mark.parametrize("usage", ["serverAuth", "clientAuth"])
def test_a_certificate_for_one_end_alone_is_found_by_its_owner(authority: Authority, usage: str) -> None:
    files = authority.files(f"only-{usage}", HOST, usage=usage)
    with pytest.raises(
        UsageError, match=r"renew it for servers and clients \(unsuitable certificate purpose"
    ):
        Tls(files, [HOST])
    Tls(authority.files(f"beside-{usage}", HOST, usage="serverAuth,clientAuth"), [HOST])


async def test_who_listens_has_a_certificate(authority: Authority) -> None:
    with pytest.raises(UsageError, match="needs a certificate and a key"):
        await serve(
            ASKED, Answering(), HANDSHAKE, SETTINGS, network=SocketNetwork(Tls(TlsFiles(authority.cert)))
        )


@pytest.mark.parametrize("broken", ["cert", "key", "ca"])
def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path, broken: str) -> None:
    files = authority.files(f"broken-{broken}")
    with pytest.raises(UsageError, match="can't be read"):
        Tls(replace(files, **{broken: tmp_path / "nothing"}))
    nonsense = tmp_path / "nonsense"
    nonsense.write_bytes(random.Random(1).randbytes(1000))
    with pytest.raises(UsageError, match="TLS can't be set up"):
        Tls(replace(files, **{broken: nonsense}))
