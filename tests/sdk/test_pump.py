"""The pump, alone with one end of a pair of sockets: what it sends, when, and where what comes lands."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.fabric.wire.bulk import bulk_frame
from tests.sdk.tls_front import HOST

from ostraca.line import Line, PlainLine
from ostraca.pump import Pump
from ostraca.tls_line import TlsLine
from ostraca_fabric.adapters.inline_arena import InlineArenaEnd
from ostraca_fabric.slots import SlotPool
from ostraca_fabric.tls import Tls, TlsFiles
from ostraca_fabric.wire.frames import BulkFrame, FrameReader, bulk_frames, encode
from ostraca_fabric.wire.messages import Pong


def lines(tls: Tls | None) -> tuple[Line, socket.socket]:
    """Return a line and the other end of its connection, in the clear or over TLS."""
    ours, theirs = socket.socketpair()
    if tls is None:
        return PlainLine(ours), theirs
    shaken: Future[ssl.SSLSocket] = Future()
    there = threading.Thread(
        target=lambda: shaken.set_result(tls.listening.wrap_socket(theirs, server_side=True))
    )
    there.start()
    line = TlsLine.shaken(ours, tls, HOST, until_s=time.monotonic() + 10)
    there.join()
    return line, shaken.result()


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest) -> Tls | None:
    if request.param == "plain":
        return None
    files: TlsFiles = request.getfixturevalue("agent_files")
    return Tls(files)


class Pumped:
    """A pump over one end of a pair of sockets."""

    def __init__(
        self,
        tls: Tls | None,
        *,
        behind: bytes = b"",
        sent: bytes = b"",
        unsent_bytes_max: int = 100_000,
        quiet_until_s: float | None = None,
    ) -> None:
        line, self.theirs = lines(tls)
        self.memory = bytearray(4096)
        self.end = InlineArenaEnd(memoryview(self.memory), SlotPool(4096, 4096))
        self.reader = FrameReader(self.end.sink, frame_bytes_max=1000, scratch_bytes=2048)
        self.reader.buffer()[: len(behind)] = behind
        for _ in self.reader.received(len(behind)):
            break  # as the handshake does with the Welcome
        self.heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.pump = Pump(
            line,
            self.reader,
            self.end,
            on_message=self.heard.put,
            on_lost=self.lost.put,
            pace_s=lambda: None,
            quiet_until_s=lambda: quiet_until_s,
            unsent_bytes_max=unsent_bytes_max,
        )
        self.theirs.sendall(sent)
        self.pump.start()

    def landed(self) -> bool:
        """Tell whether all but the last byte of the memory's one slot has come."""
        return self.reader.landing is not None and self.reader.landing.left_bytes == 1

    def close(self) -> None:
        self.pump.stop()
        self.theirs.close()


def test_what_comes_right_behind_the_welcome_is_heard_at_once(tls: Tls | None) -> None:
    pumped = Pumped(tls, behind=bytes(encode(Pong(1)) + encode(Pong(2))))
    assert pumped.heard.get(timeout=5) == bytes(encode(Pong(2))[5:])
    pumped.close()


def test_what_had_come_is_heard_before_an_agent_counts_as_silent(tls: Tls | None) -> None:
    """Who reads may have stood still meanwhile."""
    pumped = Pumped(tls, sent=bytes(encode(Pong(2))), quiet_until_s=0.0)
    assert pumped.heard.get(timeout=5) == bytes(encode(Pong(2))[5:])
    assert pumped.lost.get(timeout=5).startswith("the agent has fallen silent")
    assert pumped.pump.fell_silent
    pumped.close()


def test_an_agent_that_asks_and_does_not_read_is_given_up(tls: Tls | None) -> None:
    pumped = Pumped(tls)
    piece = bytes(4096)
    until_s = time.monotonic() + 10
    while pumped.lost.empty() and time.monotonic() < until_s:
        pumped.pump.send([piece] * 100)
    assert pumped.lost.get(timeout=5) == "the agent does not read what it is sent"
    pumped.close()


def frames_of(memory: NDArray[np.uint8], blocks: int) -> list[BulkFrame]:
    length = len(memory) // blocks
    return bulk_frames(
        3,
        memory,
        places=np.arange(blocks, dtype=np.uint64),
        offsets=np.arange(blocks) * length,
        lengths=np.full(blocks, length, np.uint32),
    )


def test_an_agent_that_fetches_and_does_not_read_is_given_up(tls: Tls | None) -> None:
    pumped = Pumped(tls)
    memory = np.zeros(1000, np.uint8)
    until_s = time.monotonic() + 10
    while pumped.lost.empty() and time.monotonic() < until_s:
        pumped.pump.send_bulk(frames_of(memory, 1000))
    assert pumped.lost.get(timeout=5) == "the agent does not read what it is sent"
    pumped.close()


def test_what_an_agent_does_not_read_yet_waits_without_a_copy_and_messages_get_in_between(
    tls: Tls | None,
) -> None:
    pumped = Pumped(tls)
    memory = np.random.default_rng(1).integers(0, 256, 16 << 20, np.uint8)
    frames = frames_of(memory, 64)
    pumped.pump.send_bulk(frames)
    assert pumped.pump._outbox.held_bytes < 10_000, "and not 16 MiB"
    pumped.pump.send([encode(Pong(7))])
    rows = memory.reshape(4, -1)
    wanted = [frames[0].header, rows[0].tobytes(), bytes(encode(Pong(7)))]
    for frame, row in zip(frames[1:], rows[1:], strict=True):
        wanted += [frame.header, row.tobytes()]
    with pumped.theirs.makefile("rb") as stream:
        assert stream.read(sum(map(len, wanted))) == b"".join(wanted), "in another order"
    pumped.close()


def test_a_frame_that_stays_half_way_keeps_nobody_from_sending_or_leading(tls: Tls | None) -> None:
    pumped = Pumped(tls)
    pumped.end.open(np.array([0]), 4096)
    whole = bulk_frame(1, (0, b"x" * 4096))
    pumped.theirs.sendall(whole[:-1])
    pumped.pump.lead(pumped.landed, until_s=time.monotonic() + 10)
    pumped.pump.send([encode(Pong(1))])
    assert pumped.theirs.recv(100) == bytes(encode(Pong(1)))
    until_s = time.monotonic() + 0.05
    assert pumped.pump.lead(lambda: False, until_s=until_s)
    assert until_s <= time.monotonic() < until_s + 5
    pumped.theirs.sendall(whole[-1:] + bytes(encode(Pong(2))))
    assert pumped.heard.get(timeout=5) == bytes(encode(Pong(2))[5:])
    assert bytes(pumped.memory) == b"x" * 4096
    pumped.close()


def test_a_slot_that_is_shut_in_mid_frame_takes_the_rest_of_that_frame_and_no_other(tls: Tls | None) -> None:
    pumped = Pumped(tls)
    pumped.end.open(np.array([0]), 4096)
    pumped.theirs.sendall(bulk_frame(1, (0, b"x" * 4096))[:-1])
    pumped.pump.lead(pumped.landed, until_s=time.monotonic() + 10)
    pumped.end.shut(np.array([0]))
    pumped.theirs.sendall(b"y" + bulk_frame(1, (0, b"z" * 4096)) + bytes(encode(Pong(2))))
    assert pumped.heard.get(timeout=5) == bytes(encode(Pong(2))[5:])
    assert bytes(pumped.memory) == b"x" * 4095 + b"y"
    pumped.close()


def test_after_the_connection_is_lost_in_mid_frame_nothing_lands(tls: Tls | None) -> None:
    pumped = Pumped(tls)
    pumped.end.open(np.array([0]), 4096)
    pumped.theirs.sendall(bulk_frame(1, (0, b"x" * 4096))[:-1])
    pumped.pump.lead(pumped.landed, until_s=time.monotonic() + 10)
    pumped.pump.stop()
    assert pumped.lost.get(timeout=5) == "closed here"
    assert pumped.reader.landing is None
    assert bytes(pumped.memory) == b"x" * 4095 + b"\0"
    pumped.close()


def test_more_than_one_turn_takes_is_read_to_its_end(tls: Tls | None) -> None:
    """Over TLS all of it may have left the socket in the first turn."""
    pumped = Pumped(tls)
    pumped.end.open(np.array([0]), 4096)
    frames = b"".join(bulk_frame(1, (0, bytes([number]) * 4096)) for number in range(40))
    pumped.theirs.sendall(frames + bytes(encode(Pong(2))))
    assert pumped.heard.get(timeout=5) == bytes(encode(Pong(2))[5:])
    assert bytes(pumped.memory) == bytes([39]) * 4096
    pumped.close()


def test_one_frame_that_the_socket_does_not_take_at_once_is_sent_to_its_end(tls: Tls | None) -> None:
    pumped = Pumped(tls, unsent_bytes_max=4 << 20)
    frame = np.random.default_rng(1).bytes(2 << 20)
    pumped.pump.send([frame])
    with pumped.theirs.makefile("rb") as stream:
        assert stream.read(len(frame)) == frame
    pumped.close()
