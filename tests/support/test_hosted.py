from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine

import numpy as np
import pytest
from tests.support.simulated.drives.drive_faults import DriveFaults
from tests.support.simulated.drives.simulated_drive import SimulatedDrive
from tests.support.simulated.drives.simulated_flash import SimulatedFlash
from tests.support.simulated.hosted import HostedDrive, HostedNetwork
from tests.support.simulated.simulated_network import SimulatedNetwork
from tests.support.simulated.virtual_hosts import HostsLoop, VirtualHost

from ostraca_fabric.errors import ConnectError
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.wire.address import parse_address

ONES = np.ones(4096, np.uint8)


def play(scenario: Callable[[HostsLoop], Coroutine[None, None, None]]) -> None:
    loop = HostsLoop()
    try:
        loop.run_until_complete(scenario(loop))
    finally:
        loop.close()


def drive_of(flash: SimulatedFlash) -> HostedDrive:
    return HostedDrive(SimulatedDrive(DriveId("e/d"), flash))


def test_a_write_lands_while_its_process_stands_still_and_is_told_of_later() -> None:
    async def scenario(loop: HostsLoop) -> None:
        flash = SimulatedFlash(8192, random.Random(1))
        host, drive = VirtualHost("a", loop), drive_of(flash)
        told = []

        async def writing() -> None:
            assert (await drive.submit_write(Pieces.one(ONES, drive_offset=4096))).all()
            told.append(loop.now_s)

        done = host.spawn(writing())
        await asyncio.sleep(0)
        host.pause(3.0)
        await asyncio.sleep(1.0)
        assert flash.image[4096:].all()
        await done
        assert told == [3.0]

    play(scenario)


def test_a_process_paused_before_it_submits_writes_when_it_goes_on() -> None:
    async def scenario(loop: HostsLoop) -> None:
        flash = SimulatedFlash(8192, random.Random(1))
        host, drive = VirtualHost("a", loop), drive_of(flash)
        host.before_acting = lambda: host.pause(3.0)
        host.run(lambda: drive.submit_write(Pieces.one(ONES, drive_offset=4096)))
        assert drive.queued == 1
        await asyncio.sleep(2.9)
        assert not flash.image.any()
        await asyncio.sleep(0.2)
        assert flash.image[4096:].all()

    play(scenario)


def test_what_a_dead_process_had_submitted_may_land_late() -> None:
    async def scenario(loop: HostsLoop) -> None:
        flash = SimulatedFlash(8192, random.Random(2), DriveFaults(late=1.0, late_s=9.0))
        host, drive = VirtualHost("a", loop), drive_of(flash)
        host.run(lambda: drive.submit_write(Pieces.one(ONES, drive_offset=4096)))
        host.kill()
        drive.path.crash()
        assert not flash.image.any()
        await asyncio.sleep(9.0)
        assert flash.image[4096:].all()

    play(scenario)


class Reader(asyncio.BufferedProtocol):
    """Notes when bytes came, by its own clock."""

    def __init__(self) -> None:
        self.came: list[float] = []
        self.count = 0
        self._buffer = bytearray(1000)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.count += nbytes
        self.came.append(asyncio.get_running_loop().time())


def test_a_process_that_stands_still_reads_later_and_takes_no_more_than_fits_its_socket() -> None:
    async def scenario(loop: HostsLoop) -> None:
        network = SimulatedNetwork(1)
        a, b = VirtualHost("a", loop), VirtualHost("b", loop)
        served, calling = Reader(), Reader()
        await HostedNetwork(network.host("a"), a).listen(parse_address("tcp://a:7"), lambda: served)
        await b.spawn(HostedNetwork(network.host("b"), b).dial(parse_address("tcp://a:7"), calling))
        await asyncio.sleep(0.1)
        a.pause(5.0)
        began_s = loop.now_s
        b.run(lambda: calling.transport.write(bytes(4 << 20)))
        await asyncio.sleep(4.0)
        assert served.count == 0
        assert calling.transport.get_write_buffer_size() > 2 << 20
        await asyncio.sleep(4.0)
        assert served.count == 4 << 20
        assert served.came[0] == pytest.approx(began_s + 5.0)

    play(scenario)


def test_who_dials_and_gives_up_is_connected_no_more() -> None:
    async def scenario(loop: HostsLoop) -> None:
        network = SimulatedNetwork(1)
        network.host("a")
        network.part("a", "b")
        b = VirtualHost("b", loop)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await HostedNetwork(network.host("b"), b).dial(parse_address("tcp://a:7"), Reader())
        with pytest.raises(OSError, match="no host"):
            await HostedNetwork(network.host("b"), b).dial(parse_address("tcp://c:7"), Reader())

    play(scenario)


def test_a_place_that_is_taken_is_refused() -> None:
    async def scenario(loop: HostsLoop) -> None:
        hosted = HostedNetwork(SimulatedNetwork(1).host("a"), VirtualHost("a", loop))
        await hosted.listen(parse_address("tcp://a:7"), Reader)
        with pytest.raises(ConnectError):
            await hosted.listen(parse_address("tcp://a:7"), Reader)

    play(scenario)
