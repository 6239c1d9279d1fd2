from __future__ import annotations

import asyncio
import struct

import pytest
from tests.fabric.wire.peers import SETTINGS, Answering, Dial, RawPeer, until

from ostraca_fabric.connection import Server, ServerConnection
from ostraca_fabric.errors import ConnectError
from ostraca_fabric.wire.frames import BULK_HEADER_BYTES, bulk_header
from ostraca_fabric.wire.messages import Ping, Pong, Settled

PART_BYTES = 200_000


@pytest.fixture
async def peer(server: Server, dial: Dial) -> RawPeer:
    return await dial.welcomed(server.address)


@pytest.fixture
def agent_end(peer: RawPeer, handler: Answering) -> ServerConnection:
    return handler.opened[0]


def memory(count: int) -> list[memoryview]:
    return [memoryview(bytearray(PART_BYTES)) for _ in range(count)]


def bulk(transfer: int, offset: int, payload: bytes) -> bytes:
    return bulk_header(transfer, offset, len(payload)) + payload


async def test_expected_parts_land_in_any_order(peer: RawPeer, agent_end: ServerConnection) -> None:
    parts = memory(2)
    landed = agent_end.expect_bulk(7, parts)
    peer.write(bulk(7, 1, b"b" * PART_BYTES) + bulk(7, 0, b"a" * PART_BYTES))
    await asyncio.wait_for(landed, 10)
    assert [bytes(part) for part in parts] == [b"a" * PART_BYTES, b"b" * PART_BYTES]


async def test_no_parts_have_landed_at_once(agent_end: ServerConnection) -> None:
    assert agent_end.expect_bulk(7, []).done()


@pytest.mark.parametrize(
    ("offset", "length"), [(0, PART_BYTES - 1), (0, PART_BYTES + 1), (1, PART_BYTES), (1 << 63, PART_BYTES)]
)
async def test_a_part_that_does_not_fit_is_refused_before_a_byte_lands(
    peer: RawPeer, agent_end: ServerConnection, offset: int, length: int
) -> None:
    parts = memory(1)
    landed = agent_end.expect_bulk(7, parts)
    peer.write(bulk(7, offset, b"x" * length))
    assert await peer.refused() == "protocol"
    with pytest.raises(ConnectError):
        await landed
    assert bytes(parts[0]) == bytes(PART_BYTES)


async def test_a_part_can_not_land_twice(peer: RawPeer, agent_end: ServerConnection) -> None:
    landed = agent_end.expect_bulk(7, memory(2))
    peer.write(bulk(7, 0, b"a" * PART_BYTES) * 2)
    assert await peer.refused() == "protocol"
    with pytest.raises(ConnectError):
        await landed


async def test_after_a_transfer_has_ended_its_frames_land_nowhere(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    parts = memory(1)
    landed = agent_end.expect_bulk(7, parts)
    peer.write(bulk(7, 0, b"a" * PART_BYTES))
    await asyncio.wait_for(landed, 10)
    peer.write(bulk(7, 0, b"z" * PART_BYTES))
    peer.say(Ping(1))
    assert await peer.heard() == Pong(1)
    assert bytes(parts[0]) == b"a" * PART_BYTES


async def test_when_the_connection_is_refused_in_mid_part_the_rest_of_it_lands_nowhere(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    parts = memory(1)
    landed = agent_end.expect_bulk(7, parts)
    peer.write(bulk(7, 0, b"a" * PART_BYTES)[: BULK_HEADER_BYTES + 10])
    await until(lambda: bytes(parts[0][:10]) == b"a" * 10)
    agent_end.refuse("limit", "enough")
    with pytest.raises(ConnectError):
        await landed
    peer.write(b"z" * PART_BYTES)
    assert await peer.refused() == "limit"
    peer.end()
    await agent_end.wait_closed()
    assert bytes(parts[0]) == b"a" * 10 + bytes(PART_BYTES - 10)


async def test_when_the_connection_closes_in_mid_part_the_transfer_ends_and_nothing_more_lands(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    parts = memory(1)
    landed = agent_end.expect_bulk(7, parts)
    peer.write(bulk(7, 0, b"a" * PART_BYTES)[: BULK_HEADER_BYTES + 10])
    peer.say(Ping(1))  # its bytes are part of the payload
    await until(lambda: bytes(parts[0][:10]) == b"a" * 10)
    agent_end.close()
    with pytest.raises(ConnectError):
        await landed
    found = bytes(parts[0])
    peer.write(b"z" * PART_BYTES)
    await agent_end.wait_closed()
    assert bytes(parts[0]) == found
    with pytest.raises(ConnectError):
        await agent_end.expect_bulk(8, parts)


async def test_memory_sent_from_is_free_at_once_however_slow_the_other_end(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    count = 8
    payload = bytearray(1 << 20)
    for number in range(count):
        payload[:] = bytes([number]) * len(payload)
        agent_end.send_bulk(3, number, memoryview(payload))
    payload[:] = b"\xff" * len(payload)
    for number in range(count):
        header = await peer.read(BULK_HEADER_BYTES)
        assert struct.unpack("<IBQQ", header)[2:] == (3, number)
        assert await peer.read(len(payload)) == bytes([number]) * len(payload)


async def test_messages_and_bulk_frames_arrive_in_the_order_sent(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    for number in range(8):
        agent_end.send(Settled(number))
        agent_end.send_bulk(1, number, memoryview(bytes(100_000)))
    for number in range(8):
        assert await peer.heard() == Settled(number)
        header = await peer.read(BULK_HEADER_BYTES)
        assert struct.unpack("<IBQQ", header)[3] == number
        await peer.read(100_000)


async def test_drained_waits_for_a_slow_reader_and_bounds_what_is_queued(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    payload = memoryview(bytes(1 << 20))
    sent = 0

    def queued_bytes() -> int:
        assert agent_end._transport is not None
        return agent_end._transport.get_write_buffer_size()

    async def send_for_ever() -> None:
        nonlocal sent
        while True:
            await agent_end.drained()
            agent_end.send_bulk(1, 0, payload)
            sent += 1

    senders = [asyncio.ensure_future(send_for_ever()) for _ in range(4)]
    before = -1
    while sent > before:
        before = sent
        for _ in range(100):
            await asyncio.sleep(0)
    assert sent < 10
    assert queued_bytes() <= SETTINGS.send_buffer_bytes + len(payload)
    await peer.read(sent * (len(payload) + BULK_HEADER_BYTES))
    await until(lambda: sent > before)
    for _ in range(100):
        await asyncio.sleep(0)
    assert queued_bytes() <= SETTINGS.send_buffer_bytes + len(payload)
    agent_end.abort()
    assert [type(each) for each in await asyncio.gather(*senders, return_exceptions=True)] == [
        ConnectError
    ] * 4


async def test_nothing_is_sent_on_a_closed_connection(peer: RawPeer, agent_end: ServerConnection) -> None:
    agent_end.close()
    with pytest.raises(ConnectError):
        agent_end.send_bulk(1, 0, memoryview(b"x"))
    with pytest.raises(ConnectError):
        agent_end.send(Settled(1))
    with pytest.raises(ConnectError):
        await agent_end.drained()
    assert await peer.rest() == b""
