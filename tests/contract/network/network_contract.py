"""What every network must do. An adapter's test inherits this and gives two hosts of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tests.fabric.connection.peers import HANDSHAKE, HELLO, SETTINGS, Answering, open_volume

from ostraca_fabric.connection import Listening, Network, connect, serve
from ostraca_fabric.errors import ConnectError
from ostraca_fabric.wire.address import Address, parse_address
from ostraca_fabric.wire.messages import Ping, Pong, VolumeOpened

LIMIT_S = 20.0


class Recorder(asyncio.BufferedProtocol):
    """Keeps what comes, and what it is told."""

    def __init__(self) -> None:
        self.came = bytearray()
        self.told: list[str] = []
        self.transport: asyncio.Transport
        self.keeps_open = False
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._buffer = bytearray(5000)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's do not derive from it
        self._tell("made")

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.came += self._buffer[:nbytes]
        self._changed.set()

    def eof_received(self) -> bool:
        self._tell("end")
        return self.keeps_open

    def pause_writing(self) -> None:
        self._tell("pause")

    def resume_writing(self) -> None:
        self._tell("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)
        self._tell("lost")

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so that this recorder hears of."""
        async with asyncio.timeout(LIMIT_S):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    async def is_told(self, word: str) -> None:
        await self.until(lambda: word in self.told)

    def _tell(self, word: str) -> None:
        self.told.append(word)
        self._changed.set()


@dataclass
class Hosts:
    """Two hosts, which may be the same one, and where the first listens, as asked for."""

    called: Network
    calling: Network
    asked: str

    async def listening(self) -> tuple[Listening, list[Recorder]]:
        accepted: list[Recorder] = []

        def accept() -> Recorder:
            accepted.append(Recorder())
            return accepted[-1]

        return await self.called.listen(parse_address(self.asked), accept), accepted

    async def dial(self, address: Address) -> Recorder:
        recorder = Recorder()
        async with asyncio.timeout(LIMIT_S):
            await self.calling.dial(address, recorder)
        return recorder

    async def joined(self) -> tuple[Recorder, Recorder, Listening]:
        listening, accepted = await self.listening()
        ours = await self.dial(listening.address)
        await ours.is_told("made")
        while not accepted:  # noqa: ASYNC110 (a socket's accepting end is made by the loop, in its own time)
            await asyncio.sleep(0)
        await accepted[0].is_told("made")
        return ours, accepted[0], listening


class NetworkContract:
    @pytest.fixture
    def hosts(self) -> Hosts:
        raise NotImplementedError

    async def test_bytes_arrive_as_they_were_sent_both_ways(self, hosts: Hosts) -> None:
        ours, theirs, listening = await hosts.joined()
        dice = random.Random(1)
        there, back = dice.randbytes(1 << 20), dice.randbytes(1 << 20)
        sent = 0
        while sent < 1 << 20:
            count = dice.randint(1, 1 << 16)
            ours.transport.write(there[sent : sent + count])
            theirs.transport.write(back[sent : sent + count])
            sent += count
        await theirs.until(lambda: len(theirs.came) == 1 << 20)
        await ours.until(lambda: len(ours.came) == 1 << 20)
        assert (bytes(theirs.came), bytes(ours.came)) == (there, back)
        await _end(ours, theirs, listening)

    async def test_nobody_listening_is_an_os_error(self, hosts: Hosts) -> None:
        listening, _ = await hosts.listening()
        listening.close()
        with pytest.raises(OSError):  # noqa: PT011 (there are many kinds, and all mean this)
            await hosts.dial(listening.address)

    async def test_a_place_is_had_once(self, hosts: Hosts) -> None:
        listening, _ = await hosts.listening()
        with pytest.raises(ConnectError):
            await hosts.called.listen(listening.address, Recorder)
        listening.close()
        again = await hosts.called.listen(listening.address, Recorder)
        assert again.address == listening.address
        again.close()

    async def test_what_was_sent_before_the_end_arrives_before_it(self, hosts: Hosts) -> None:
        ours, theirs, listening = await hosts.joined()
        ours.transport.write(b"x" * 200_000)
        ours.transport.close()
        assert ours.transport.is_closing()
        assert await ours.lost is None
        assert await theirs.lost is None
        assert len(theirs.came) == 200_000
        assert theirs.told[-2:] == ["end", "lost"]
        await _end(ours, theirs, listening)

    async def test_an_end_that_is_cut_off_is_gone_at_once_and_the_other_hears_of_it(
        self, hosts: Hosts
    ) -> None:
        ours, theirs, listening = await hosts.joined()
        ours.transport.abort()
        assert await ours.lost is None
        await theirs.is_told("lost")
        await _end(ours, theirs, listening)

    async def test_one_half_can_end_before_the_other(self, hosts: Hosts) -> None:
        ours, theirs, listening = await hosts.joined()
        if not ours.transport.can_write_eof():
            await _end(ours, theirs, listening)
            pytest.skip("its connections have no halves")
        theirs.keeps_open = True
        ours.transport.write(b"question")
        ours.transport.write_eof()
        await theirs.is_told("end")
        assert theirs.came == b"question"
        theirs.transport.write(b"answer")
        await ours.until(lambda: ours.came == b"answer")
        theirs.transport.close()
        assert await ours.lost is None
        await _end(ours, theirs, listening)

    async def test_who_does_not_read_makes_the_other_pause(self, hosts: Hosts) -> None:
        ours, theirs, listening = await hosts.joined()
        theirs.transport.pause_reading()
        sent = 0
        while "pause" not in ours.told:
            ours.transport.write(b"x" * 100_000)
            sent += 100_000
        assert ours.transport.get_write_buffer_size() > 0
        assert "resume" not in ours.told
        theirs.transport.resume_reading()
        await ours.is_told("resume")
        await theirs.until(lambda: len(theirs.came) == sent)
        assert ours.transport.get_write_buffer_size() == 0
        await _end(ours, theirs, listening)

    async def test_connections_outlive_the_listening(self, hosts: Hosts) -> None:
        ours, theirs, listening = await hosts.joined()
        listening.close()
        ours.transport.write(b"still here")
        await theirs.until(lambda: theirs.came == b"still here")
        await _end(ours, theirs, listening)

    async def test_an_agent_can_be_asked_over_it(self, hosts: Hosts) -> None:
        handler = Answering()
        server = await serve(hosts.asked, handler, HANDSHAKE, SETTINGS, network=hosts.called)
        connection = await connect(server.address, HELLO, network=hosts.calling)
        assert server.address.partition(":")[0] == hosts.asked.partition(":")[0]
        assert connection.welcome.agent == HANDSHAKE.agent
        asked = [connection.ask(open_volume(number, "fine"), LIMIT_S) for number in (1, 2)]
        assert await asyncio.gather(*asked) == [VolumeOpened(1, 1, 1), VolumeOpened(2, 1, 1)]
        assert await connection.ask(Ping(3), LIMIT_S) == Pong(3)
        assert await server.close()
        await connection.wait_closed()


async def _end(ours: Recorder, theirs: Recorder, listening: Listening) -> None:
    """Leave nothing open."""
    listening.close()
    for end in (ours, theirs):
        end.transport.abort()
        await end.lost
