"""The I/O loop, alone with one end of a pair of sockets: what it sends, when, and where what comes lands."""

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
from tests.fabric.connection.bulk import bulk_frame
from tests.sdk.connection.tls_front import HOST

from ostraca._connection.io_loop import IoLoop
from ostraca._connection.tls_stream import TlsStream
from ostraca._memory.inline_arena import InlineArenaEnd, RequestRows
from ostraca_fabric.sockets.stream import ByteStream
from ostraca_fabric.sockets.tls import Tls, TlsFiles
from ostraca_fabric.tables.slots import SlotPool
from ostraca_fabric.wire.frames import BulkFrame, FrameReader, bulk_frames, encode
from ostraca_fabric.wire.messages import Pong


def streams(tls: Tls | None) -> tuple[ByteStream, socket.socket]:
    """Return a stream and the other end of its connection, in the clear or over TLS."""
    ours, theirs = socket.socketpair()
    if tls is None:
        return ByteStream(ours), theirs
    connect: Future[ssl.SSLSocket] = Future()
    there = threading.Thread(
        target=lambda: connect.set_result(tls.listening.wrap_socket(theirs, server_side=True))
    )
    there.start()
    stream = TlsStream.connect(ours, tls, HOST, until_s=time.monotonic() + 10)
    there.join()
    return stream, connect.result()


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest) -> Tls | None:
    if request.param == "plain":
        return None
    files: TlsFiles = request.getfixturevalue("agent_files")
    return Tls(files)


class LoopScene:
    """An I/O loop over one end of a pair of sockets."""

    def __init__(
        self,
        tls: Tls | None,
        *,
        behind: bytes = b"",
        sent: bytes = b"",
        unsent_bytes_max: int = 100_000,
        silent_at_s: float | None = None,
        pace_s: float | None = None,
    ) -> None:
        stream, self.theirs = streams(tls)
        self.memory = bytearray(4096)
        self.end = InlineArenaEnd(memoryview(self.memory), SlotPool(4096, 4096))
        self.reader = FrameReader(self.end.sink, frame_bytes_max=1000, scratch_bytes=2048)
        self.reader.buffer()[: len(behind)] = behind
        for _ in self.reader.received(len(behind)):
            break  # as the handshake does with the Welcome
        self.heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.loop = IoLoop(
            stream,
            self.reader,
            self.end,
            on_message=self.heard.put,
            on_loss=self.lost.put,
            pace_s=lambda: pace_s,
            silent_at_s=lambda: silent_at_s,
            unsent_bytes_max=unsent_bytes_max,
        )
        self.theirs.sendall(sent)
        self.loop.start()

    def landed(self) -> bool:
        """Tell whether all but the last byte of the memory's one slot has come."""
        return self.reader.landing is not None and self.reader.landing.left_bytes == 1

    def close(self) -> None:
        self.loop.stop()
        self.theirs.close()


def test_what_comes_right_behind_the_welcome_is_heard_at_once(tls: Tls | None) -> None:
    scene = LoopScene(tls, behind=bytes(encode(Pong(1)) + encode(Pong(2))))
    assert scene.heard.get(timeout=5) == bytes(encode(Pong(2))[5:])
    scene.close()


def test_what_had_come_is_heard_before_an_agent_counts_as_silent(tls: Tls | None) -> None:
    """Who reads may have stood still meanwhile."""
    scene = LoopScene(tls, sent=bytes(encode(Pong(2))), silent_at_s=0.0)
    assert scene.heard.get(timeout=5) == bytes(encode(Pong(2))[5:])
    assert scene.lost.get(timeout=5).startswith("the agent is silent")
    assert scene.loop.is_silent
    scene.close()


def test_an_agent_that_asks_and_does_not_read_is_given_up(tls: Tls | None) -> None:
    scene = LoopScene(tls)
    piece = bytes(4096)
    until_s = time.monotonic() + 10
    while scene.lost.empty() and time.monotonic() < until_s:
        scene.loop.send([piece] * 100)
    assert scene.lost.get(timeout=5) == "the agent does not read its messages"
    scene.close()


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
    scene = LoopScene(tls)
    memory = np.zeros(1000, np.uint8)
    until_s = time.monotonic() + 10
    while scene.lost.empty() and time.monotonic() < until_s:
        scene.loop.send_bulk(frames_of(memory, 1000))
    assert scene.lost.get(timeout=5) == "the agent does not read its messages"
    scene.close()


def test_what_an_agent_does_not_read_yet_waits_without_a_copy_and_messages_get_in_between(
    tls: Tls | None,
) -> None:
    scene = LoopScene(tls)
    memory = np.random.default_rng(1).integers(0, 256, 16 << 20, np.uint8)
    frames = frames_of(memory, 64)
    scene.loop.send_bulk(frames)
    assert scene.loop._outbox.held_bytes < 10_000, "and not 16 MiB"
    scene.loop.send([encode(Pong(7))])
    rows = memory.reshape(4, -1)
    wanted = [frames[0].header, rows[0].tobytes(), bytes(encode(Pong(7)))]
    for frame, row in zip(frames[1:], rows[1:], strict=True):
        wanted += [frame.header, row.tobytes()]
    with scene.theirs.makefile("rb") as stream:
        assert stream.read(sum(map(len, wanted))) == b"".join(wanted), "in another order"
    scene.close()


def test_a_frame_that_stays_half_way_keeps_nobody_from_sending_or_leading(tls: Tls | None) -> None:
    scene = LoopScene(tls)
    scene.end.open(np.array([0]), 4096)
    whole = bulk_frame(1, (0, b"x" * 4096))
    scene.theirs.sendall(whole[:-1])
    scene.loop.lead(scene.landed, until_s=time.monotonic() + 10)
    scene.loop.send([encode(Pong(1))])
    assert scene.theirs.recv(100) == bytes(encode(Pong(1)))
    until_s = time.monotonic() + 0.05
    assert scene.loop.lead(lambda: False, until_s=until_s)
    assert until_s <= time.monotonic() < until_s + 5
    scene.theirs.sendall(whole[-1:] + bytes(encode(Pong(2))))
    assert scene.heard.get(timeout=5) == bytes(encode(Pong(2))[5:])
    assert bytes(scene.memory) == b"x" * 4096
    scene.close()


def test_a_slot_that_is_shut_in_mid_frame_takes_the_rest_of_that_frame_and_no_other(tls: Tls | None) -> None:
    scene = LoopScene(tls)
    scene.end.open(np.array([0]), 4096)
    scene.theirs.sendall(bulk_frame(1, (0, b"x" * 4096))[:-1])
    scene.loop.lead(scene.landed, until_s=time.monotonic() + 10)
    scene.end.shut(np.array([0]))
    scene.theirs.sendall(b"y" + bulk_frame(1, (0, b"z" * 4096)) + bytes(encode(Pong(2))))
    assert scene.heard.get(timeout=5) == bytes(encode(Pong(2))[5:])
    assert bytes(scene.memory) == b"x" * 4095 + b"y"
    scene.close()


def test_after_the_connection_is_lost_in_mid_frame_nothing_lands(tls: Tls | None) -> None:
    scene = LoopScene(tls)
    scene.end.open(np.array([0]), 4096)
    scene.theirs.sendall(bulk_frame(1, (0, b"x" * 4096))[:-1])
    scene.loop.lead(scene.landed, until_s=time.monotonic() + 10)
    scene.loop.stop()
    assert scene.lost.get(timeout=5) == "closed here"
    assert scene.reader.landing is None
    assert bytes(scene.memory) == b"x" * 4095 + b"\0"
    scene.close()


def test_more_than_one_turn_takes_is_read_to_its_end(tls: Tls | None) -> None:
    """Over TLS all of it may have left the socket in the first turn."""
    scene = LoopScene(tls)
    scene.end.open(np.array([0]), 4096)
    frames = b"".join(bulk_frame(1, (0, bytes([number]) * 4096)) for number in range(40))
    scene.theirs.sendall(frames + bytes(encode(Pong(2))))
    assert scene.heard.get(timeout=5) == bytes(encode(Pong(2))[5:])
    assert bytes(scene.memory) == bytes([39]) * 4096
    scene.close()


def test_one_frame_that_the_socket_does_not_take_at_once_is_sent_to_its_end(tls: Tls | None) -> None:
    scene = LoopScene(tls, unsent_bytes_max=4 << 20)
    frame = np.random.default_rng(1).bytes(2 << 20)
    scene.loop.send([frame])
    with scene.theirs.makefile("rb") as stream:
        assert stream.read(len(frame)) == frame
    scene.close()


def test_a_detached_memory_is_neither_received_into_nor_sent_from(tls: Tls | None) -> None:
    """With a frame under way in each direction: what comes is discarded, what goes is zeros."""
    scene = LoopScene(tls)
    rows = np.full(300_000, 7, np.uint8)
    request_rows = RequestRows(rows, np.array([10]), 1000)
    scene.end.bind(1, np.array([0]), request_rows)
    scene.end.open(np.array([0]), 1000)
    frame = bulk_frame(1, (0, b"a" * 1000))
    scene.theirs.sendall(frame[:-500])
    until_s = time.monotonic() + 10
    while not (rows[10:510] == ord("a")).all():
        assert time.monotonic() < until_s
    lengths = np.full(8, 250_000, np.uint32)
    scene.loop.send_bulk(
        bulk_frames(
            2, rows, places=np.arange(8, dtype=np.uint64), offsets=np.zeros(8, np.int64), lengths=lengths
        )
    )
    assert scene.end.unbind(1) is request_rows
    scene.loop.detach(rows)
    rows[:] = 8
    scene.theirs.sendall(frame[-500:] + encode(Pong(1)))
    assert scene.heard.get(timeout=5) == bytes(encode(Pong(1))[5:])
    assert (rows == 8).all()
    wanted, came = 8 * 250_000, bytearray()
    while len(came) < wanted:
        came += scene.theirs.recv(1 << 20)
    assert 8 not in came[100:]
    assert not any(came[-1000:])
    scene.close()


def test_a_detachment_waits_for_the_receipt_under_way_and_for_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes of the receipt under way land before the return of ``detach``, and none afterwards."""
    scene = LoopScene(None)
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    may_receive = threading.Semaphore(0)
    receive = ByteStream.receive

    def receive_slowly(stream: ByteStream, reader: FrameReader, **how: int) -> tuple[int, bool]:
        events.put("receives")
        may_receive.acquire()
        return receive(stream, reader, **how)[0], False

    rows = np.full(1000, 7, np.uint8)
    scene.end.bind(1, np.array([0]), RequestRows(rows, np.array([0]), 1000))
    scene.end.open(np.array([0]), 1000)
    frame = bulk_frame(1, (0, b"a" * 1000))
    scene.theirs.sendall(frame[:-900])
    until_s = time.monotonic() + 10
    while rows[99] != ord("a"):
        assert time.monotonic() < until_s
    monkeypatch.setattr(ByteStream, "receive", receive_slowly)
    scene.theirs.sendall(frame[-900:-500])
    assert events.get(timeout=5) == "receives"
    scene.end.unbind(1)

    def detach() -> None:
        scene.loop.detach(rows)
        events.put("detached")

    detaching = threading.Thread(target=detach)
    detaching.start()
    with pytest.raises(queue.Empty):
        events.get(timeout=0.05)
    may_receive.release()
    assert events.get(timeout=5) == "detached", "before the next receipt"
    assert (rows[:500] == ord("a")).all()
    rows[:] = 8
    scene.theirs.sendall(frame[-500:] + encode(Pong(1)))
    may_receive.release(100)
    assert scene.heard.get(timeout=5) == bytes(encode(Pong(1))[5:])
    assert (rows == 8).all()
    detaching.join()
    scene.close()


def test_a_loss_that_a_leader_notices_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the loop's own thread, which stands back for long here."""
    for name in ("_STAND_BACK_S", "_LED_S"):
        monkeypatch.setattr(f"ostraca._connection.io_loop.{name}", 60.0)
    scene = LoopScene(None)
    scene.loop.lead(lambda: not scene.heard.empty(), until_s=time.monotonic() + 0.05)  # it stands back now
    leader = threading.Thread(target=lambda: scene.loop.lead(lambda: False, until_s=time.monotonic() + 60))
    leader.start()
    scene.theirs.close()
    assert scene.lost.get(timeout=20) == "the agent closed the connection"
    leader.join()
    scene.close()


def test_a_loop_is_stopped_at_once_after_a_leader_has_led_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostraca._connection.io_loop._LED_S", 60.0)
    scene = LoopScene(None)
    scene.loop.lead(lambda: False, until_s=time.monotonic() + 0.1)  # the loop's thread looks meanwhile
    stopping = threading.Thread(target=scene.loop.stop)
    stopping.start()
    stopping.join(20)
    assert not stopping.is_alive()
    scene.close()


def test_a_transport_that_needs_progress_waits_for_no_leader_that_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ostraca._connection.io_loop._LED_S", 60.0)
    scene = LoopScene(None, pace_s=0.001)
    for _ in range(3):  # the loop's thread looks at a leader that goes on
        scene.loop.lead(lambda: False, until_s=time.monotonic() + 0.05)
    scene.theirs.sendall(bytes(encode(Pong(1))))
    assert scene.heard.get(timeout=20) == bytes(encode(Pong(1))[5:])
    scene.close()
