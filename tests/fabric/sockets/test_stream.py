from __future__ import annotations

import functools
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.fabric.connection.bulk import bulk_start

from ostraca_fabric.sockets.stream import ByteStream, CopyingSender, Outbox, SocketSender, receive, send_all
from ostraca_fabric.wire.frames import (
    HEADER_BYTES,
    BulkEnd,
    BulkFrame,
    FrameReader,
    Passage,
    bulk_frames,
    encode,
)
from ostraca_fabric.wire.messages import Pong

MEMORY_BYTES = 1 << 20
NOBODY_WAKES_S = 60


class Copying(CopyingSender):
    """Sends copies, as an encrypting end does."""

    def __init__(self, sock: socket.socket) -> None:
        self._plain = SocketSender(sock)

    def send(self, frame: bytes | bytearray) -> int:
        return self._plain.send(frame)


class Memory:
    """Where blocks land: their places are offsets."""

    def __init__(self) -> None:
        self.array = np.zeros(MEMORY_BYTES, np.uint8)
        self.reader = FrameReader(self.sink, frame_bytes_max=1 << 20)
        self.seen: list[bytes | int] = []
        """Messages, and the transfers of bulk frames, as they come."""

    def sink(self, transfer: int, places: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> Passage | None:
        return Passage(self.array, places.astype(np.int64), lengths)

    def receive(self, sock: socket.socket, bytes_max: int) -> None:
        landing = self.reader.landing
        try:
            if landing is None:
                count = sock.recv_into(self.reader.buffer())
            else:
                count, _ = receive(sock.fileno(), self.reader, landing, bytes_max)
        except BlockingIOError:
            return
        for event in self.reader.received(count):
            assert isinstance(event, (bytes, BulkEnd)), event
            self.seen.append(event.transfer if isinstance(event, BulkEnd) else event)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel makes it the least there may be
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


def scattered(
    transfer: int, source: NDArray[np.uint8], dice: random.Random
) -> tuple[list[BulkFrame], NDArray[np.bool_]]:
    """Return frames with blocks from all over *source*, each to its own place, and which bytes they hold."""
    cuts = sorted({dice.randrange(1, MEMORY_BYTES) for _ in range(dice.choice((1, 3, 300, 1500)))})
    blocks = list(zip([0, *cuts], [*cuts, MEMORY_BYTES], strict=True))
    dice.shuffle(blocks)
    del blocks[max(1, len(blocks) // 2) :]
    offsets, ends = np.array(blocks).T
    is_sent = np.zeros(MEMORY_BYTES, np.bool_)
    for first, last in blocks:
        is_sent[first:last] = True
    lengths = (ends - offsets).astype(np.uint32)
    return bulk_frames(
        transfer, source, places=offsets.astype(np.uint64), offsets=offsets, lengths=lengths
    ), is_sent


@given(st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None)
def test_whatever_the_socket_takes_and_gives_at_once_everything_arrives_whole_and_in_order(seed: int) -> None:
    dice = random.Random(seed)
    source = np.frombuffer(dice.randbytes(MEMORY_BYTES), np.uint8)
    outbox, memory, expected = Outbox(), Memory(), np.zeros(MEMORY_BYTES, np.bool_)
    gone: list[int] = []
    waiting = list(range(dice.choice((1, 4))))
    messages = [encode(Pong(number)) for number in range(6)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, dice.choice((1, 1 << 20)))
        way_out = dice.choice((SocketSender, Copying))(ours)
        is_sent = False
        while not is_sent or len(memory.seen) < len(messages) or waiting or memory.reader.landing:
            if waiting and dice.random() < 0.3:
                transfer = waiting.pop(0)
                frames, is_there = scattered(transfer, source, dice)
                expected |= is_there
                outbox.add_bulk(frames, functools.partial(gone.append, transfer))
            if messages and dice.random() < 0.3:
                outbox.send(way_out, messages.pop(0))
            is_sent = outbox.write(way_out, dice.choice((1, 5000, 1 << 20))) and not messages
            memory.receive(theirs, dice.choice((1, 5000, 1 << 20)))
            memory.receive(theirs, 1 << 20)
    said = [each for each in memory.seen if isinstance(each, bytes)]
    assert said == [bytes(encode(Pong(number))[HEADER_BYTES:]) for number in range(6)]
    assert gone == sorted({each for each in memory.seen if isinstance(each, int)})
    assert np.array_equal(memory.array, np.where(expected, source, 0))
    assert outbox.is_empty
    assert outbox.held_bytes == 0


def test_a_long_message_that_the_socket_takes_in_parts_arrives_whole(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    outbox, messages = Outbox(), [random.Random(seed).randbytes(100_000) for seed in (1, 2)]
    assert outbox.send(SocketSender(pair[0]), b"short")
    assert not outbox.send(SocketSender(pair[0]), messages[0])
    assert not outbox.send(SocketSender(pair[0]), messages[1])
    came = bytearray()
    while not outbox.write(SocketSender(pair[0]), 1 << 20):
        came += pair[1].recv(1 << 20)
    while len(came) < 200_005:
        came += pair[1].recv(1 << 20)
    assert came == b"short" + messages[0] + messages[1]


def test_frames_of_a_transfer_that_have_not_begun_can_be_dropped(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    outbox, source, gone = Outbox(), np.ones(1 << 20, np.uint8), []
    frames = bulk_frames(
        1,
        source,
        places=np.arange(9, dtype=np.uint64),
        offsets=np.zeros(9, np.int64),
        lengths=np.full(9, 1 << 20, np.uint32),
    )
    outbox.add_bulk(frames, lambda: gone.append(1))
    assert not outbox.write(SocketSender(pair[0]), 1 << 20)
    assert not outbox.send(SocketSender(pair[0]), encode(Pong(1)))
    outbox.drop_bulk()
    came = bytearray()
    pair[1].setblocking(True)
    while not outbox.write(SocketSender(pair[0]), 1 << 20):
        came += pair[1].recv(1 << 20)
    wanted = frames[0].header + bytes([1]) * (4 << 20) + encode(Pong(1))
    while len(came) < len(wanted):
        came += pair[1].recv(1 << 20)
    assert came == wanted
    assert gone == [], "not all of the transfer was sent"


def test_receiving_waits_for_the_blocks_no_longer_than_they_lack_bytes_or_until_it_is_woken(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    memory, wake = Memory(), os.eventfd(0)
    pair[1].setblocking(True)
    start = bulk_start(1, [0, 100], [10, 10])
    pair[1].send(start)
    memory.receive(pair[0], 0)
    landing = memory.reader.landing
    assert landing is not None
    waiting = {"wake": wake, "wait_ms": NOBODY_WAKES_S * 1000}
    pair[1].send(b"x" * 20 + b"behind")
    assert receive(pair[0].fileno(), memory.reader, landing, 1 << 20, **waiting) == (26, True)
    os.eventfd_write(wake, 1)
    with pytest.raises(BlockingIOError):
        receive(pair[0].fileno(), memory.reader, landing, 1 << 20, **waiting)
    pair[1].send(b"x")
    assert receive(pair[0].fileno(), memory.reader, landing, 1 << 20, **waiting) == (1, True)
    pair[1].close()
    assert receive(pair[0].fileno(), memory.reader, landing, 1 << 20, **waiting) == (0, True)
    os.close(wake)


def test_a_broken_socket_is_an_error_also_in_mid_frame(pair: tuple[socket.socket, socket.socket]) -> None:
    outbox = Outbox()
    outbox.add_bulk(scattered(1, np.ones(MEMORY_BYTES, np.uint8), random.Random(1))[0])
    assert not outbox.write(SocketSender(pair[0]), 1 << 20)
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        outbox.write(SocketSender(pair[0]), 1 << 20)


@pytest.mark.parametrize(
    ("offset", "length"), [(1 << 20, 1), (-1, 1), ((1 << 20) - 1, 2), ((1 << 63) - 1, (1 << 32) - 1)]
)
def test_no_byte_outside_of_memory_is_ever_sent_received_or_filled(
    pair: tuple[socket.socket, socket.socket], offset: int, length: int
) -> None:
    memory = Memory()
    outside = Passage(memory.array, np.array([0, offset]), np.array([1, length], np.uint32))
    outbox = Outbox()
    outbox.add_bulk([BulkFrame(b"header", outside)])
    for way_out in (SocketSender(pair[0]), Copying(pair[0])):
        with pytest.raises(AssertionError, match="outside"):
            outbox.write(way_out, 1 << 20)
    pair[1].send(b"x")
    with pytest.raises(AssertionError, match="outside"):
        receive(pair[0].fileno(), memory.reader, outside, 1 << 20)
    with pytest.raises(AssertionError, match="outside"):
        outside.fill(memoryview(b"x"))
    assert pair[0].recv(10) == b"x"
    with pytest.raises(BlockingIOError):
        pair[1].recv(10)
    assert not memory.array.any()


@given(st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None)
def test_blanked_blocks_are_zeros_and_other_blocks_and_messages_stay(seed: int) -> None:
    dice = random.Random(seed)
    blanked, kept = (np.full(MEMORY_BYTES, value, np.uint8) for value in (7, 9))
    outbox, memories = Outbox(), [Memory(), Memory()]
    place, length = np.zeros(1, np.uint64), np.array([300_000], np.uint32)
    frames = [
        bulk_frames(transfer, source, places=place, offsets=np.array([offset]), lengths=length)
        for transfer, (source, offset) in enumerate(zip((blanked, kept) * 2, (5, 6, 700_000, 0), strict=True))
    ]
    ours, theirs = socket.socketpair()
    reader = FrameReader(
        lambda transfer, places, lengths: Passage(
            memories[transfer % 2].array, places.astype(np.int64) + 300_000 * (transfer // 2), lengths
        ),
        frame_bytes_max=1 << 20,
    )
    with ours, theirs:
        theirs.setblocking(False)
        way_out = dice.choice((SocketSender, Copying))(ours)
        for each in frames:
            outbox.add_bulk(each)
        outbox.write(way_out, dice.randrange(1_300_000))
        outbox.blank(blanked)
        blanked[:] = 8
        outbox.send(way_out, encode(Pong(1)))
        ended: list[int | bytes] = []
        while len(ended) < 5:
            outbox.write(way_out, 1 << 20)
            try:
                count = theirs.recv_into(reader.buffer())
            except BlockingIOError:
                continue
            for event in reader.received(count):
                assert not isinstance(event, Exception)
                ended.append(event.transfer if isinstance(event, BulkEnd) else event)
    assert [each for each in ended if isinstance(each, int)] == [0, 1, 2, 3]
    assert bytes(encode(Pong(1))[HEADER_BYTES:]) in ended
    assert (memories[1].array[:600_000] == 9).all()
    found = memories[0].array[:600_000]
    sent = int(np.count_nonzero(found))
    assert (found[:sent] == 7).all(), "what was sent before, and zeros behind"
    assert outbox.is_empty


def test_a_first_frame_that_the_socket_takes_in_parts_arrives_whole() -> None:
    frame = random.Random(3).randbytes(4 << 20)
    ours, theirs = socket.socketpair()
    with theirs, ThreadPoolExecutor() as threads:
        came = threads.submit(lambda: b"".join(iter(lambda: theirs.recv(1 << 16), b"")))
        stream = ByteStream(ours)
        stream.send_first(frame, until_s=time.monotonic() + NOBODY_WAKES_S)
        stream.close()
        assert came.result() == frame


def test_a_send_to_a_lost_connection_is_an_error_and_no_signal() -> None:
    """A program may have the usual effect of SIGPIPE back, which ends the process."""
    seen: list[int] = []
    usual = signal.signal(signal.SIGPIPE, lambda number, _: seen.append(number))
    ours, theirs = socket.socketpair()
    theirs.close()
    try:
        with ours, pytest.raises(BrokenPipeError):
            send_all(ours, b"anything", until_s=time.monotonic() + NOBODY_WAKES_S)
    finally:
        signal.signal(signal.SIGPIPE, usual)
    assert not seen
