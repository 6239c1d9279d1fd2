"""Frames that are almost right."""

from __future__ import annotations

import random
import struct
from typing import Any

import msgspec
from tests.fabric.connection.bulk import bulk_start
from tests.scenarios.fuzz.dice import mangled, nested, spoiled
from tests.scenarios.fuzz.dice import strange as strange_value

from ostraca_fabric.wire.frames import HEADER_BYTES, MESSAGE, encode
from ostraca_fabric.wire.messages import Message

_HEADER = struct.Struct("<IB")
_U32 = struct.Struct("<I")
_HUGE_COUNTS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
)
_LENGTHS = (0, 1, 2, 5, 12, 13, 17, 26, 4096, 1 << 18, (1 << 18) + 1, 1 << 22, (1 << 30) + 14, (1 << 32) - 1)


def framed(payload: bytes, *, kind: int = MESSAGE, length: int | None = None) -> bytes:
    """Put a payload in a frame, whose header may lie."""
    return _HEADER.pack(len(payload) + 1 if length is None else length, kind) + payload


def mutated(dice: random.Random, message: Message) -> bytes:  # noqa: PLR0911 (a kind of wrong each)
    """Return the frame of a message with something wrong about it, most of the time."""
    payload = bytes(encode(message)[HEADER_BYTES:])
    match dice.randrange(12):
        case 0:
            return framed(spoiled(dice, payload))
        case 1:
            return framed(payload, length=max(0, len(payload) + 1 + dice.choice((-2, -1, 1, 2, 100))))
        case 2:
            return framed(payload, length=dice.choice(_LENGTHS))
        case 3:
            return framed(payload, kind=dice.choice((1, 2, 7, 255)))
        case 4:
            at = dice.randrange(len(payload))
            return framed(payload[:at] + dice.choice(_HUGE_COUNTS) + payload[at + 1 :])
        case 5:
            return framed(_HUGE_COUNTS[0] + payload[1:])
        case 6:
            return framed(dice.randbytes(dice.randrange(1, 60)))
        case _:
            return framed(packed(mangled(dice, msgspec.msgpack.decode(payload))))


def nonsense(dice: random.Random) -> bytes:
    """Return a frame that was never a message."""
    match dice.randrange(5):
        case 0:
            return dice.randbytes(dice.randrange(1, 40))
        case 1:
            return framed(packed([dice.randrange(-2, 300), *(strange_value(dice) for _ in range(3))]))
        case 2:
            return framed(b"\x91" * dice.choice((10, 2000, 100_000)))
        case 3:
            return framed(packed(nested(dice.choice((5, 900)))))
        case _:
            return framed(packed(strange_value(dice)))


def bulk(dice: random.Random, *, transfers: list[int], places: list[int]) -> bytes:
    """Return a bulk frame, whole or not, that may be about a transfer that there is."""
    count = dice.choice((1, 1, 1, 2, 3, 3, 64))
    lengths = [dice.choice((1, 100, 4096, 4096, 5000)) for _ in range(count)]
    named = [dice.choice([*places, *places, 0, 1, 4096, (1 << 63), (1 << 64) - 1]) for _ in range(count)]
    if places and dice.random() < 0.5:
        named = [*places[:count], *named[len(places) :]]
    transfer = dice.choice([*transfers, *transfers, 0, 1, 2, 99, (1 << 64) - 1])
    start = bulk_start(transfer, named, lengths)
    if dice.random() < 0.3:
        start = _lying(dice, start, count)
    return start + dice.choice((b"\xee", b"\x00")) * sum(lengths)


def _lying(dice: random.Random, start: bytes, count: int) -> bytes:
    """Return a bulk frame's header with something wrong about its lengths or its count."""
    match dice.randrange(5):
        case 0:
            return _U32.pack(dice.choice(_LENGTHS)) + start[4:]
        case 1:
            lie = dice.choice((0, count - 1, count + 1, 1023, 1024, 1 << 31, (1 << 32) - 1))
            return start[:13] + _U32.pack(lie) + start[17:]
        case 2:
            lengths = [dice.choice((0, 1, 1 << 31, (1 << 32) - 1)) for _ in range(count)]
            return start[: -4 * count] + b"".join(map(_U32.pack, lengths))
        case 3:
            return spoiled(dice, start)
        case _:
            longer = int.from_bytes(start[:4], "little") + dice.choice((-1, 1, 4096))
            return _U32.pack(max(0, longer)) + start[4:]


def packed(value: Any) -> bytes:
    """Pack a value; arrays nested deeper than msgspec packs are written by hand."""
    try:
        return msgspec.msgpack.encode(value)
    except RecursionError:
        return b"\x91" * 5000 + b"\x90"
