"""Frames and decoders by themselves: every byte of them is a message, a typed refusal, or bytes discarded."""

from __future__ import annotations

import os
import random

import msgspec
import numpy as np
from numpy.typing import NDArray
from tests.fabric.wire.samples import SAMPLES
from tests.scenarios.fuzz.frames import bulk, mutated, nonsense

from ostraca_fabric.errors import ConnectError, ProtocolError
from ostraca_fabric.model.ids import AgentId, StartId, TenantId
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.frames import BULK_BLOCKS_MAX, BulkEnd, FrameReader, Passage, encode
from ostraca_fabric.wire.handshake import Access, AgentHandshake, accepted
from ostraca_fabric.wire.messages import Hello, Message, Refused, Welcome

FRAME_BYTES_MAX = 256 << 10
ARENA_BYTES = 64 << 10
DECODERS = (
    *(codec.HELLO, codec.FROM_WORKER, codec.FROM_AGENT, codec.FROM_OPERATOR),
    *(codec.HELLO_ANSWER, codec.TO_WORKER, codec.TO_AGENT, codec.TO_OPERATOR),
)
HANDSHAKE = AgentHandshake(
    AgentId("a1"),
    StartId(bytes(16)),
    Access(os.getuid(), tenant_tokens={TenantId("red"): ("token",)}, fabric_tokens=("token",)),
    transports=("inline",),
)
HELLO = Hello(1, 1, "worker", "red", "token", "fuzz", ("a",), SAMPLES[0].arenas)  # type: ignore[union-attr]


def decode(stream: bytes, cuts: list[int]) -> int:
    """Read a stream in the pieces given, and decode what comes as every sender's; return the frames read."""
    memory = np.zeros(ARENA_BYTES, np.uint8)

    def sink(transfer: int, places: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> Passage | None:
        if transfer == 99:
            raise ProtocolError("no such transfer")
        assert 0 < len(places) == len(lengths) <= BULK_BLOCKS_MAX
        assert lengths.all()
        if (places > ARENA_BYTES).any() or (lengths > ARENA_BYTES - places).any():
            return None
        return Passage(memory, places.astype(np.int64), lengths)

    reader = FrameReader(sink, frame_bytes_max=FRAME_BYTES_MAX)
    frames, at = 0, 0
    for end in [*cuts, len(stream)]:
        while at < end:
            buffer = reader.buffer()
            assert len(buffer), "a reader always has room"
            piece = stream[at : min(end, at + len(buffer))]
            buffer[: len(piece)] = piece
            at += len(piece)
            for event in reader.received(len(piece)):
                frames += 1
                if isinstance(event, bytes):
                    _decode_message(event)
                else:
                    assert isinstance(event, (BulkEnd, ProtocolError)), event
            assert reader.held_bytes <= FRAME_BYTES_MAX + 4, "memory that nobody agreed to"
    return frames


def _decode_message(payload: bytes) -> None:
    refusals = []
    for decoder in DECODERS:
        try:
            message = decoder.decode(payload)
        except ProtocolError as error:
            refusals.append(str(error))
        else:
            _check_message(message)
    assert max(map(len, refusals), default=0) < 1000, "a refusal that repeats what it refuses"


def _check_message(message: object) -> None:
    assert isinstance(message, Message)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
    assert repr(again) == repr(message), "a message that changes on its way"
    match message:
        case Hello():
            for uid in (None, os.getuid(), 65534):
                answer = HANDSHAKE.answer(message, uid)
                assert len(encode(answer)) <= 64 << 10, "longer than a caller reads before the Welcome"
                assert isinstance(answer, Refused) or message.role in ("worker", "agent", "operator")
        case Welcome() | Refused():
            try:
                assert accepted(HELLO, message) is message
            except (ConnectError, ProtocolError):
                return
            assert isinstance(message, Welcome)
            assert message.version == 1


def decoding_case(dice: random.Random) -> int:
    """Make a few frames, most of them mutated, and decode them."""
    parts = []
    for _ in range(dice.randrange(1, 9)):
        match dice.randrange(10):
            case 0:
                parts.append(bytes(encode(dice.choice(SAMPLES))))
            case 1:
                parts.append(nonsense(dice))
            case 2:
                parts.append(bulk(dice, transfers=[7], places=[0, 60_000, 4096, 100]))
            case _:
                parts.append(mutated(dice, dice.choice(SAMPLES)))
    frames = 0
    # What stands behind a broken frame is not looked at, so each frame also comes first once.
    for part in parts:
        frames += decode(part, [])
    stream = b"".join(parts)
    cuts = sorted(dice.randrange(len(stream) + 1) for _ in range(dice.randrange(6)))
    return frames + decode(stream, cuts)
