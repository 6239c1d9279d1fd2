from __future__ import annotations

import asyncio
import itertools
import struct

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.fabric.connection.bulk import bulk_frame, bulk_start
from tests.fabric.connection.peers import SETTINGS, Answering, Dial, RawPeer, until

from ostraca_fabric.connection import Server, ServerConnection
from ostraca_fabric.errors import ConnectError
from ostraca_fabric.wire.frames import BULK_HEADER_BYTES
from ostraca_fabric.wire.messages import GetProgress, Ping, Pong, Settled

PART_BYTES = 200_000
MIB = 1 << 20


@pytest.fixture
async def peer(server: Server, dial: Dial) -> RawPeer:
    return await dial.welcomed(server.address)


@pytest.fixture
def agent_end(peer: RawPeer, handler: Answering) -> ServerConnection:
    return handler.opened[0]


class Parts:
    """Memory in which a transfer's parts lie one behind another, with a gap behind each."""

    def __init__(self, count: int, part_bytes: int = PART_BYTES) -> None:
        self.part_bytes = part_bytes
        self.memory = np.zeros(count * (part_bytes + 1), np.uint8)
        self.offsets = np.arange(count) * (part_bytes + 1)
        self.lengths = np.full(count, part_bytes, np.uint32)

    def expected(self, agent_end: ServerConnection, transfer: int = 7) -> asyncio.Future[None]:
        return agent_end.expect_bulk(transfer, self.memory, offsets=self.offsets, lengths=self.lengths)

    def __getitem__(self, part: int) -> bytes:
        return self.memory[self.offsets[part] :][: self.part_bytes].tobytes()

    def whole(self) -> bytes:
        """Return all parts; what lies between them must not have been touched."""
        rows = self.memory.reshape(-1, self.part_bytes + 1)
        assert not rows[:, -1].any()
        return rows[:, :-1].tobytes()


def full(letters: bytes) -> bytes:
    """Return a part per letter, full of it."""
    return b"".join(bytes([letter]) * PART_BYTES for letter in letters)


def bulk(transfer: int, parts: dict[int, bytes]) -> bytes:
    """Return a frame with parts full of a letter each."""
    return bulk_frame(transfer, *((place, letter * PART_BYTES) for place, letter in parts.items()))


def sent(
    agent_end: ServerConnection, memory: NDArray[np.uint8], places: list[int], *, transfer: int = 3
) -> asyncio.Future[None]:
    """Send a memory's equal parts to these places."""
    length = len(memory) // len(places)
    return agent_end.send_bulk(
        transfer,
        memory,
        places=np.array(places, np.uint64),
        offsets=np.arange(len(places)) * length,
        lengths=np.full(len(places), length, np.uint32),
    )


async def read_bulk(peer: RawPeer) -> tuple[int, dict[int, bytes]]:
    """Read a bulk frame; return its transfer and its blocks by place."""
    length, kind, transfer, count = struct.unpack("<IBQI", await peer.read(BULK_HEADER_BYTES))
    assert kind == 1
    places = np.frombuffer(await peer.read(8 * count), "<u8").tolist()
    lengths = np.frombuffer(await peer.read(4 * count), "<u4").tolist()
    assert length == BULK_HEADER_BYTES - 4 + 12 * count + sum(lengths)
    return transfer, {place: await peer.read(each) for place, each in zip(places, lengths, strict=True)}


async def test_expected_parts_land_in_any_order_and_number(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    parts = Parts(4)
    landed = parts.expected(agent_end)
    peer.write(bulk(7, {3: b"d", 1: b"b"}) + bulk(7, {0: b"a"}) + bulk(7, {2: b"c"}))
    await asyncio.wait_for(landed, 10)
    assert parts.whole() == full(b"abcd")


async def test_many_small_parts_of_one_frame_land(peer: RawPeer, agent_end: ServerConnection) -> None:
    parts = Parts(1000, 4096)
    landed = parts.expected(agent_end)
    payload = np.random.default_rng(1).bytes(1000 * 4096)
    blocks = [(part, payload[part * 4096 : (part + 1) * 4096]) for part in range(1000)]
    peer.write(bulk_frame(7, *reversed(blocks)))
    await asyncio.wait_for(landed, 10)
    assert parts.whole() == payload


async def test_no_parts_have_landed_at_once(agent_end: ServerConnection) -> None:
    assert Parts(0).expected(agent_end).done()


@pytest.mark.parametrize(
    ("places", "lengths"),
    [
        ([0], [PART_BYTES - 1]),
        ([0], [PART_BYTES + 1]),
        ([2], [PART_BYTES]),
        ([1 << 63], [PART_BYTES]),
        ([0, 0], [PART_BYTES, PART_BYTES]),
        ([0, 2], [PART_BYTES, PART_BYTES]),
        ([0, 1, 0], [PART_BYTES, PART_BYTES, PART_BYTES]),
        ([1, 0], [PART_BYTES, 1]),
    ],
)
async def test_a_frame_with_one_part_that_does_not_fit_is_refused_before_a_byte_lands(
    peer: RawPeer, agent_end: ServerConnection, places: list[int], lengths: list[int]
) -> None:
    parts = Parts(2)
    landed = parts.expected(agent_end)
    peer.write(bulk_start(7, places, lengths) + b"x" * sum(lengths))
    assert await peer.refused() == "protocol"
    with pytest.raises(ConnectError):
        await landed
    assert not parts.memory.any()


async def test_a_part_can_not_land_twice(peer: RawPeer, agent_end: ServerConnection) -> None:
    landed = Parts(2).expected(agent_end)
    peer.write(bulk(7, {0: b"a"}) * 2)
    assert await peer.refused() == "protocol"
    with pytest.raises(ConnectError):
        await landed


async def test_after_a_transfer_has_ended_its_frames_land_nowhere(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    parts = Parts(1)
    landed = parts.expected(agent_end)
    peer.write(bulk(7, {0: b"a"}))
    await asyncio.wait_for(landed, 10)
    peer.write(bulk(7, {0: b"z"}))
    peer.say(Ping(1))
    assert await peer.heard() == Pong(1)
    assert parts.whole() == full(b"a")


async def test_when_the_connection_is_refused_in_mid_frame_the_rest_of_it_lands_nowhere(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    parts = Parts(2)
    landed = parts.expected(agent_end)
    begun = bulk_start(7, [1, 0], [PART_BYTES] * 2) + b"a" * (PART_BYTES + 10)
    peer.write(begun)
    await until(lambda: parts[0][:10] == b"a" * 10)
    agent_end.refuse("limit", "enough")
    with pytest.raises(ConnectError):
        await landed
    peer.write(b"z" * PART_BYTES)
    assert await peer.refused() == "limit"
    peer.end()
    await agent_end.wait_closed()
    assert parts.whole() == b"a" * 10 + bytes(PART_BYTES - 10) + full(b"a")


async def test_when_the_connection_closes_in_mid_frame_the_transfer_ends_and_nothing_more_lands(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    parts = Parts(2)
    landed = parts.expected(agent_end)
    peer.write(bulk(7, {0: b"a", 1: b"b"})[: PART_BYTES + 100])
    peer.say(Ping(1))  # its bytes are part of a block
    await until(lambda: parts[1][:10] == b"b" * 10)
    agent_end.close()
    with pytest.raises(ConnectError):
        await landed
    found = parts.whole()
    peer.write(b"z" * PART_BYTES)
    await agent_end.wait_closed()
    assert parts.whole() == found


async def test_a_connection_cut_in_mid_frame_ends_what_it_receives_and_what_it_sends(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    landed = Parts(1).expected(agent_end)
    gone = sent(agent_end, np.zeros(64 * MIB, np.uint8), list(range(64)))
    peer.write(bulk(7, {0: b"a"})[:-1])
    await until(lambda: agent_end._reader.landing is not None)
    await peer.close()
    for end in (landed, gone):
        with pytest.raises(ConnectError):
            await end
    await agent_end.wait_closed()


async def test_blocks_are_sent_from_where_they_lie_and_their_memory_is_free_once_they_are_gone(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    memory = np.random.default_rng(2).integers(0, 256, 32 * MIB, np.uint8)
    copy = memory.tobytes()
    gone = sent(agent_end, memory, list(range(32)))
    assert not gone.done(), "no socket holds as much"
    assert agent_end._outbox.held_bytes < 10_000
    found: dict[int, bytes] = {}
    while len(found) < 31:
        transfer, blocks = await read_bulk(peer)
        assert transfer == 3
        found |= blocks
        if gone.done():
            memory[:] = 0
    await gone
    memory[:] = 0
    while len(found) < 32:
        found |= (await read_bulk(peer))[1]
    assert b"".join(found[place] for place in range(32)) == copy


async def test_a_message_waits_for_the_frame_under_way_and_not_for_those_behind_it(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    gone = sent(agent_end, np.zeros(32 * MIB, np.uint8), list(range(32)))
    agent_end.send(Settled(5))
    places = list((await read_bulk(peer))[1])
    assert places == [0, 1, 2, 3]
    assert await peer.heard() == Settled(5)
    while len(places) < 32:
        places += (await read_bulk(peer))[1]
    assert places == list(range(32))
    await gone


async def test_what_is_said_once_a_transfer_is_gone_arrives_behind_it(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    async def send_and_tell(transfer: int) -> None:
        await sent(agent_end, np.full(5 * MIB, transfer, np.uint8), [transfer], transfer=transfer)
        agent_end.send(Settled(transfer))

    telling = [asyncio.create_task(send_and_tell(transfer)) for transfer in range(1, 7)]
    come: set[int] = set()
    told: set[int] = set()
    while len(told) < 6:
        length, kind = struct.unpack("<IB", await peer.read(5))
        payload = await peer.read(length - 1)
        if kind == 1:
            (transfer,) = struct.unpack_from("<Q", payload)
            assert payload[24:] == bytes([transfer]) * (5 * MIB)
            come.add(transfer)
        else:
            told.add(payload[2])
            assert told <= come
    await asyncio.gather(*telling)


async def test_an_end_that_does_not_read_holds_no_more_than_its_transfers_and_is_cut_for_messages(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    memory = np.zeros(64 * MIB, np.uint8)
    ends = [sent(agent_end, memory, list(range(64)), transfer=transfer) for transfer in range(20)]
    assert not any(end.done() for end in ends)
    assert agent_end._outbox.held_bytes < 100_000
    for number in range(SETTINGS.unread_bytes_max):
        try:
            agent_end.send(Settled(number))
        except ConnectError:
            break
    assert agent_end._outbox.held_bytes == 0
    assert [type(each) for each in await asyncio.gather(*ends, return_exceptions=True)] == [ConnectError] * 20
    await agent_end.wait_closed()


async def test_a_refusal_is_the_last_word_also_while_transfers_wait(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    gone = sent(agent_end, np.zeros(64 * MIB, np.uint8), list(range(64)))
    agent_end.refuse("limit", "enough")
    await read_bulk(peer)
    assert await peer.refused() == "limit"
    peer.end()
    with pytest.raises(ConnectError):
        await gone


async def test_closing_sends_the_frame_under_way_and_the_messages_that_wait(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    gone = sent(agent_end, np.zeros(64 * MIB, np.uint8), list(range(64)))
    agent_end.send(Settled(1))
    agent_end.close()
    assert not gone.done(), "its memory is in use as long as the connection is there"
    await read_bulk(peer)
    assert await peer.heard() == Settled(1)
    assert await peer.rest() == b""
    with pytest.raises(ConnectError):
        await gone


async def test_who_says_that_nothing_more_comes_still_gets_what_waits_for_it(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    sent(agent_end, np.zeros(4 * MIB, np.uint8), [0])
    agent_end.send(Settled(1))
    peer.end()
    await read_bulk(peer)
    assert await peer.heard() == Settled(1)
    assert await peer.rest() == b""


async def test_nothing_is_sent_on_a_closed_connection(peer: RawPeer, agent_end: ServerConnection) -> None:
    agent_end.close()
    with pytest.raises(ConnectError):
        await sent(agent_end, np.zeros(1, np.uint8), [0])
    with pytest.raises(ConnectError):
        agent_end.send(Settled(1))
    with pytest.raises(ConnectError):
        await Parts(1).expected(agent_end, 8)
    assert await peer.rest() == b""


async def test_messages_of_any_thread_arrive_in_order_with_those_of_the_loop(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    assert await asyncio.to_thread(agent_end.send_here, Settled(1))
    agent_end.send(Settled(2))
    assert await asyncio.to_thread(agent_end.send_here, Settled(3))
    assert [await peer.heard() for _ in range(3)] == [Settled(1), Settled(2), Settled(3)]


async def test_a_thread_sends_nothing_before_what_waits_for_the_socket(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    gone = sent(agent_end, np.zeros(16 * MIB, np.uint8), [0])
    assert not await asyncio.to_thread(agent_end.send_here, Settled(1))
    await read_bulk(peer)
    await gone
    assert await asyncio.to_thread(agent_end.send_here, Settled(2))
    assert await peer.heard() == Settled(2)


async def test_what_a_thread_could_send_in_part_follows(peer: RawPeer, agent_end: ServerConnection) -> None:
    long = [GetProgress(number, bytes(40_000), b"") for number in range(1000)]
    count = await asyncio.to_thread(lambda: sum(itertools.takewhile(bool, map(agent_end.send_here, long))))
    assert 0 < count < len(long), "the socket is full, and no message waits but the last"
    assert [await peer.heard() for _ in range(count)] == long[:count]


async def test_a_thread_sends_nothing_on_a_closed_connection(
    peer: RawPeer, agent_end: ServerConnection
) -> None:
    agent_end.close()
    assert not await asyncio.to_thread(agent_end.send_here, Settled(1))
    assert await peer.rest() == b""
