"""An agent that knows the right answers and often gives others.

It speaks bytes over its own socket, one connection at a time. What it says about a request is a list of
frames, right ones first, which chance then drops, repeats, swaps, spoils, and mixes with frames nobody asked
for.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tests.fabric.connection.bulk import bulk_frame
from tests.scenarios.fuzz.dice import WHOLE_NUMBERS, mangled, strange
from tests.scenarios.fuzz.frames import bulk, framed, mutated, nonsense, packed

from ostraca_fabric.errors import ProtocolError
from ostraca_fabric.model.outcome import BlockState, PutState
from ostraca_fabric.model.volume import VolumeIdentity
from ostraca_fabric.tables.digests import tag_of, tag_seeds
from ostraca_fabric.wire import codec
from ostraca_fabric.wire import messages as m
from ostraca_fabric.wire.frames import HEADER_BYTES, BulkEnd, FrameReader, encode

LIMITS = m.ConnectionLimits(frame_bytes_max=1 << 20, blocks_max=64, inflight_max=8)
START_IDS = (bytes(16), b"\1" * 16)
CODES = (
    "unknown_volume",
    "layout_mismatch",
    "usage",
    "overloaded",
    "malformed",
    "internal",
    "limit",
    "",
    "\n" * 500,
)


def content_of(engine_hash: bytes, length: int) -> bytes:
    """Return the bytes that a block has: they follow from its engine hash."""
    return (engine_hash * (-(-length // len(engine_hash))))[:length]


@dataclass(slots=True)
class _Asked:
    """A request that may still be talked about."""

    request: int
    slots: list[int] = field(default_factory=list)


class NonsenseAgent:
    """Listens at *path* until ``stop``. All chance comes from the dice of the case that is under way.

    A client has a connection with an arena, and some of its callers. Each has a thread here.
    """

    def __init__(self, path: Path, identity: VolumeIdentity) -> None:
        self.address = f"unix://{path}"
        self.frames = 0
        self.dice = random.Random(0)
        self._identity = identity
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name="nonsense")
        self._thread.start()

    def stop(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for sock, thread in list(self._open.items()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._open[sock] = threading.Thread(target=self._talk, args=(sock,), name="nonsense")
            self._open[sock].start()

    def _talk(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            _Talk(self, sock, self._identity).run()
        del self._open[sock]


class _Talk:
    """One connection."""

    def __init__(self, agent: NonsenseAgent, sock: socket.socket, identity: VolumeIdentity) -> None:
        self._agent = agent
        self._socket = sock
        self._identity = identity
        self._reader = FrameReader(lambda *_: None, frame_bytes_max=LIMITS.frame_bytes_max)
        self._asked: deque[_Asked] = deque(maxlen=6)
        self._is_greeted = False

    @property
    def _dice(self) -> random.Random:
        return self._agent.dice

    def run(self) -> None:
        """Answer until the client hangs up, or this end does."""
        while count := self._socket.recv_into(self._reader.buffer()):
            for event in self._reader.received(count):
                if isinstance(event, ProtocolError):
                    raise event
                if isinstance(event, BulkEnd):
                    continue
                frames = self._greeting(event) if not self._is_greeted else self._answer(event)
                if frames is None:
                    return
                self._agent.frames += len(frames)
                self._socket.sendall(b"".join(frames))

    def _greeting(self, payload: bytes) -> list[bytes] | None:
        hello = codec.HELLO.decode(payload)
        dice = self._dice
        self._is_greeted = True
        transport = hello.arenas[0].transport if hello.arenas else ""
        welcome: m.Message = m.Welcome(1, "nonsense", dice.choice(START_IDS), (), LIMITS, transport)
        if dice.random() < 0.1:
            welcome = m.Refused(dice.choice(("authentication", "version", "limit", "", "x")), "no\n" * 100)
        if dice.random() < 0.7:
            return [bytes(encode(welcome))]
        match dice.randrange(4):
            case 0:
                return [mutated(dice, welcome)]
            case 1:
                return [
                    framed(packed(mangled(dice, msgspec.msgpack.decode(msgspec.msgpack.encode(welcome)))))
                ]
            case 2:
                return [bytes(encode(welcome)), *(self._unasked() for _ in range(3))]
            case _:
                return None

    def _answer(self, payload: bytes) -> list[bytes] | None:
        message, dice = codec.FROM_WORKER.decode(payload), self._dice
        if isinstance(message, m.Cancel):
            return [] if dice.random() < 0.5 else [bytes(encode(m.Settled(message.request)))]
        frames = [each if isinstance(each, bytes) else bytes(encode(each)) for each in self._right(message)]
        for _ in range(dice.choice((0, 0, 1, 1, 2, 4))):
            self._twist(frames)
        if dice.random() < 0.4:
            many = [self._unasked() for _ in range(dice.choice((1, 20, 200)))]
            at = dice.randrange(len(frames) + 1)
            frames[at:at] = many
        if dice.random() < 0.02:
            return None
        if frames and dice.random() < 0.02:
            frames[-1] = frames[-1][: dice.randrange(len(frames[-1]))]
        return frames

    def _twist(self, frames: list[bytes]) -> None:
        """Do one thing wrong."""
        dice = self._dice
        if not frames:
            return
        at, other = dice.randrange(len(frames)), dice.randrange(len(frames))
        match dice.randrange(7):
            case 0:
                frames.insert(other, frames[at])
            case 1 if dice.random() < 0.2:
                del frames[at]
            case 2:
                frames[at], frames[other] = frames[other], frames[at]
            case 3 if dice.random() < 0.3:
                frames[at] = nonsense(dice)
            case _:
                frames[at] = self._spoiled(frames[at])

    def _spoiled(self, frame: bytes) -> bytes:
        """Return a frame whose values are wrong; its header is right."""
        try:
            return framed(packed(mangled(self._dice, msgspec.msgpack.decode(frame[HEADER_BYTES:]))))
        except (ValueError, RecursionError):  # a bulk frame, or one that is spoiled already
            where = self._dice.randrange(len(frame))
            return frame[:where] + bytes([self._dice.randrange(256)]) + frame[where + 1 :]

    def _unasked(self) -> bytes:  # noqa: C901 (a kind of frame each)
        """Return a frame about something of now, of before, or of nothing at all."""
        dice = self._dice
        asked = dice.choice(self._asked) if self._asked else _Asked(1)
        request = dice.choice((asked.request, asked.request, asked.request + 1, *WHOLE_NUMBERS))
        count = dice.choice((0, 1, 1, 2, 64))
        positions = np.array(
            [dice.choice((0, 0, 1, 2, 63, (1 << 32) - 1)) for _ in range(count)], np.uint32
        ).tobytes()
        codes = bytes([dice.choice((0, 1, 1, 2, 3, 4, 255))]) * dice.choice((1, 2, 8, 16))
        match dice.randrange(12):
            case 0 | 1:
                return bulk(dice, transfers=[asked.request], places=asked.slots)
            case 2 | 3:
                message: m.Message = m.GetProgress(request, positions, bytes(16 * count))
            case 4:
                message = m.GetDone(request, codes, codes, positions, positions, bytes(16 * count))
            case 5:
                message = m.PutDone(request, codes, codes, positions)
            case 6:
                message = m.Settled(request)
            case 7:
                message = dice.choice((m.LookupDone, m.PrefetchDone))(request, codes, codes)
            case 8:
                message = dice.choice(
                    (m.Pong(request), m.VolumeOpened(request, 1, 1), m.StatusDone(request, codes))
                )
            case 9:
                places = np.array([*asked.slots, 0], np.uint64)
                lengths = np.full(len(places), dice.choice((0, 4096, 1 << 20)), np.uint32)
                message = m.Fetch(request, places.tobytes(), lengths.tobytes())
            case 10 if dice.random() < 0.2:
                return nonsense(dice)
            case 11 if dice.random() < 0.2:
                message = m.Refused("internal", "no more")
            case _:
                message = m.Failure(request, dice.choice(CODES), "no")
        return bytes(encode(message))

    def _right(self, message: Any) -> list[m.Message | bytes]:
        """Return the right answer, in frames."""
        match message:
            case m.OpenVolume():
                return [m.VolumeOpened(message.request, 0, 1)]
            case m.Lookup() | m.Prefetch():
                count = sum(map(len, message.spans))
                done = m.LookupDone if isinstance(message, m.Lookup) else m.PrefetchDone
                return [done(message.request, bytes([BlockState.HIT]) * count, bytes(count))]
            case m.Get():
                return self._get(message)
            case m.StatusRequest():
                return [m.StatusDone(message.request, packed(strange(self._dice)))]
            case m.Put():
                count = sum(map(len, message.spans))
                slots = codec.u64(message.slots, count)
                self._asked.append(_Asked(message.request, slots.tolist()))
                states = bytes([PutState.COMMITTED]) * count
                return [
                    m.Fetch(message.request, message.slots, message.lengths),
                    m.PutDone(message.request, states, bytes(count)),
                ]
            case _:
                return [m.Failure(message.request, "usage", "not served here")]

    def _get(self, message: m.Get) -> list[m.Message | bytes]:
        count = sum(map(len, message.spans))
        lengths, slots = codec.u32(message.lengths, count), codec.u64(message.slots, count).tolist()
        hashes = [
            span.hashes[at : at + span.hash_bytes]
            for span in message.spans
            for at in range(0, len(span.hashes), span.hash_bytes)
        ]
        self._asked.append(_Asked(message.request, slots))
        frames: list[m.Message | bytes] = []
        seeds = tag_seeds(self._identity, message.spans, lengths).tolist()
        blocks = [content_of(*each) for each in zip(hashes, lengths.tolist(), strict=True)]
        first = 0
        while first < count:
            some = range(first, min(count, first + self._dice.choice((1, 1, 2, count))))
            frames.append(bulk_frame(message.request, *((slots[each], blocks[each]) for each in some)))
            tags = b"".join(tag_of(blocks[each], seeds[each]) for each in some)
            frames.append(m.GetProgress(message.request, np.array(some, np.uint32).tobytes(), tags))
            first = some.stop
        frames.append(m.GetDone(message.request, bytes([BlockState.HIT]) * count, bytes(count)))
        return frames
