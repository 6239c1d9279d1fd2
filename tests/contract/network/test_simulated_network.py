"""What can befall a simulated network, seen by who uses it. All in virtual time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.contract.conftest import VIRTUAL
from tests.contract.network.network_contract import Hosts, Recorder
from tests.fabric.connection.peers import HANDSHAKE, HELLO, SETTINGS, Answering
from tests.support.simulated.simulated_network import SimulatedNetwork
from tests.support.simulated.simulated_stream import LinkSettings
from tests.support.simulated.virtual_time import VirtualLoop

from ostraca_fabric.connection import connect, serve
from ostraca_fabric.errors import ConnectError
from ostraca_fabric.wire.address import TcpAddress
from ostraca_fabric.wire.messages import Ping, Pong

GIVE_UP_S = 30.0


@pytest.fixture
def network() -> SimulatedNetwork:
    return SimulatedNetwork(1, give_up_s=GIVE_UP_S)


@pytest.fixture
def hosts(network: SimulatedNetwork) -> Hosts:
    """Return a and b; b calls a."""
    return Hosts(network.host("a"), network.host("b"), "tcp://a:7400")


def now_s() -> float:
    return asyncio.get_running_loop().time()


class TestFaults:
    loop_factories = VIRTUAL

    async def test_what_a_cut_link_holds_goes_on_in_order_when_it_heals(
        self, network: SimulatedNetwork, hosts: Hosts
    ) -> None:
        ours, theirs, _ = await hosts.joined()
        network.cut("b", "a")
        ours.transport.write(b"held ")
        theirs.transport.write(b"the other way passes")
        await ours.until(lambda: len(ours.came) == 20)
        await asyncio.sleep(GIVE_UP_S / 2)
        assert theirs.came == b""
        network.heal("b", "a")
        ours.transport.write(b"back")
        ours.transport.close()
        assert await theirs.lost is None
        assert theirs.came == b"held back"

    async def test_the_end_of_a_connection_is_held_back_as_its_bytes_are(
        self, network: SimulatedNetwork, hosts: Hosts
    ) -> None:
        ours, theirs, _ = await hosts.joined()
        network.part("a", "b")
        ours.transport.abort()
        await asyncio.sleep(GIVE_UP_S / 2)
        assert "lost" not in theirs.told
        network.join("a", "b")
        assert await theirs.lost is None
        assert network.connections == 0

    async def test_what_is_lost_in_a_cut_resets_both_ends(
        self, network: SimulatedNetwork, hosts: Hosts
    ) -> None:
        ours, theirs, _ = await hosts.joined()
        network.cut("b", "a")
        ours.transport.write(b"lost")
        await asyncio.sleep(1)
        network.heal("b", "a", is_lost=True)
        assert isinstance(await ours.lost, ConnectionResetError)
        assert isinstance(await theirs.lost, ConnectionResetError)
        assert theirs.came == b""

    async def test_a_cut_that_lasts_is_given_up_at_both_ends(
        self, network: SimulatedNetwork, hosts: Hosts
    ) -> None:
        ours, theirs, _ = await hosts.joined()
        network.cut("a", "b")
        began_s = now_s()
        assert isinstance(await ours.lost, TimeoutError)
        assert isinstance(await theirs.lost, TimeoutError)
        assert now_s() - began_s == pytest.approx(GIVE_UP_S, abs=0.01)

    async def test_a_link_that_heals_and_is_cut_again_is_given_up_anew(
        self, network: SimulatedNetwork, hosts: Hosts
    ) -> None:
        ours, _, _ = await hosts.joined()
        network.cut("a", "b")
        await asyncio.sleep(GIVE_UP_S - 1)
        network.heal("a", "b")
        network.cut("a", "b")
        await asyncio.sleep(2)
        assert "lost" not in ours.told

    async def test_dialling_over_a_cut_link_waits_until_it_heals(
        self, network: SimulatedNetwork, hosts: Hosts
    ) -> None:
        await hosts.listening()
        network.cut("a", "b")
        recorder = Recorder()
        dialling = asyncio.ensure_future(hosts.calling.dial(TcpAddress("a", 7400), recorder))
        await asyncio.sleep(5)
        assert not dialling.done()
        network.heal("a", "b")
        await dialling
        assert recorder.told == ["made"]

    async def test_who_stops_dialling_leaves_nothing_behind(
        self, network: SimulatedNetwork, hosts: Hosts
    ) -> None:
        _, accepted = await hosts.listening()
        network.cut("a", "b")
        with pytest.raises(TimeoutError):
            await hosts.dial(TcpAddress("a", 7400))
        network.heal("a", "b")
        assert await accepted[0].lost is None
        assert network.connections == 0

    async def test_a_host_that_crashes_resets_its_connections_and_refuses_new_ones(
        self, network: SimulatedNetwork, hosts: Hosts
    ) -> None:
        ours, theirs, _ = await hosts.joined()
        theirs.transport.write(b"last words")
        await ours.until(lambda: len(ours.came) == 10)
        network.crash("a")
        assert isinstance(await ours.lost, ConnectionResetError)
        assert "lost" not in theirs.told, "who crashed hears nothing"
        with pytest.raises(ConnectionRefusedError):
            await hosts.dial(TcpAddress("a", 7400))
        network.restart("a")
        _, accepted = await hosts.listening()
        await hosts.dial(TcpAddress("a", 7400))
        assert accepted[0].told == ["made"]

    async def test_a_host_that_falls_silent_is_given_up_later_and_dialling_it_takes_for_ever(
        self, network: SimulatedNetwork, hosts: Hosts
    ) -> None:
        ours, theirs, _ = await hosts.joined()
        began_s = now_s()
        network.crash("a", silently=True)
        ours.transport.write(b"nobody hears this")
        with pytest.raises(TimeoutError):
            await hosts.dial(TcpAddress("a", 7400))
        assert isinstance(await ours.lost, TimeoutError)
        assert now_s() - began_s == pytest.approx(GIVE_UP_S, abs=0.01)
        assert theirs.came == b""

    async def test_a_restarted_host_resets_what_it_does_not_know(
        self, network: SimulatedNetwork, hosts: Hosts
    ) -> None:
        ours, _, _ = await hosts.joined()
        network.crash("a", silently=True)
        network.restart("a")
        ours.transport.write(b"are you there?")
        assert isinstance(await ours.lost, ConnectionResetError)

    async def test_who_writes_to_an_end_that_has_closed_is_reset(self, hosts: Hosts) -> None:
        ours, theirs, _ = await hosts.joined()
        ours.keeps_open = True
        theirs.transport.close()
        await ours.is_told("end")
        ours.transport.write(b"too late")
        assert isinstance(await ours.lost, ConnectionResetError)

    async def test_a_slow_link_takes_its_time(self, network: SimulatedNetwork, hosts: Hosts) -> None:
        network.set_link("b", "a", LinkSettings((0.5, 0.5), bytes_per_s=1e6, window_bytes=1 << 21))
        ours, theirs, _ = await hosts.joined()
        began_s = now_s()
        ours.transport.write(bytes(1_000_000))
        await theirs.until(lambda: len(theirs.came) == 1_000_000)
        assert now_s() - began_s == pytest.approx(1.5, rel=0.05)
        network.slow_down("a", "b", delay_s=2.0)
        theirs.transport.write(b"x")
        began_s = now_s()
        await ours.until(lambda: ours.came == b"x")
        assert now_s() - began_s == pytest.approx(2.0, rel=0.01)

    async def test_a_host_that_nobody_made_is_not_found(self, hosts: Hosts) -> None:
        with pytest.raises(OSError, match="no host is called c"):
            await hosts.dial(TcpAddress("c", 1))

    async def test_blocks_cross_in_bulk_however_small_the_pieces(self) -> None:
        network = SimulatedNetwork(2, links=LinkSettings(piece_bytes_max=3000, window_bytes=8000))
        handler = Answering()
        server = await serve("tcp://a:0", handler, HANDSHAKE, SETTINGS, network=network.host("a"))
        connection = await connect(server.address, HELLO, network=network.host("b"))
        source = np.frombuffer(np.random.default_rng(1).bytes(1 << 21), np.uint8)
        target = np.zeros(1 << 21, np.uint8)
        lengths = np.full(128, 1 << 14, np.uint32)
        offsets = np.arange(128, dtype=np.int64) << 14
        landed = connection.expect_bulk(7, target, offsets=offsets, lengths=lengths)
        (at_server,) = handler.opened
        places = np.arange(128, dtype=np.uint64)
        sent = at_server.send_bulk(7, source, places=places, offsets=offsets, lengths=lengths)
        assert not sent.done(), "it is more than the transport takes before it asks to pause"
        assert await connection.ask(Ping(1), 60.0) == Pong(1)
        await asyncio.gather(sent, landed)
        assert np.array_equal(source, target)
        assert await server.close()
        await connection.wait_closed()

    async def test_a_silent_agent_is_a_connect_error_within_the_handshake_s_time(
        self, network: SimulatedNetwork
    ) -> None:
        server = await serve("tcp://a:7400", Answering(), HANDSHAKE, SETTINGS, network=network.host("a"))
        network.cut("a", "b")
        began_s = now_s()
        with pytest.raises(ConnectError, match="neither stopped nor overloaded"):
            await connect("tcp://a:7400", HELLO, network=network.host("b"))
        assert now_s() - began_s == pytest.approx(5.0, abs=0.1)
        network.heal("a", "b")
        assert await server.close()


def test_one_seed_is_one_history() -> None:
    async def history(seed: int) -> list[tuple[float, int]]:
        network = SimulatedNetwork(seed, links=LinkSettings(piece_bytes_max=100))
        ours, theirs, _ = await Hosts(network.host("a"), network.host("b"), "tcp://a:1").joined()
        seen: list[tuple[float, int]] = []
        ours.transport.write(bytes(2000))

        def is_all_there() -> bool:
            seen.append((now_s(), len(theirs.came)))
            return len(theirs.came) == 2000

        await theirs.until(is_all_there)
        return seen

    def run(seed: int) -> list[tuple[float, int]]:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(history(seed))

    assert run(1) == run(1)
    assert run(1) != run(2)
