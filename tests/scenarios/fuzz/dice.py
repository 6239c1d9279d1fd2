"""Values that no honest program would send, and trees in which one of them stands in the wrong place.

All chance comes from a ``random.Random`` that is passed in, so a case is its seed; hypothesis passes one of
its own and can then shrink what it finds.
"""

from __future__ import annotations

import random
from typing import Any

WHOLE_NUMBERS = (
    *(-(1 << 63), -(1 << 31) - 1, -1, 0, 1, 2, 31, 32, 33, 63, 64, 65, 255, 4095, 4096, 4097, 65535, 65536),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
NUMBERS = (float("nan"), float("inf"), float("-inf"), -1.0, -0.0, 5e-324, 0.001, 0.1, 1e9, 1e308)
TEXTS = (
    "",
    "a",
    "v",
    "worker",
    "agent",
    "operator",
    "inline",
    "nixl",
    "\0",
    "a\nWARNING forged",
    "\x1b[2J",
    "é",
)
LONG = (100, 300, 5000, 70_000)
DEPTHS = (2, 50, 700, 3000)


def strange(dice: random.Random) -> Any:  # noqa: PLR0911 (a kind of value each)
    """Return a value of any kind that msgpack can carry."""
    match dice.randrange(10):
        case 0 | 1 | 2:
            return dice.choice(WHOLE_NUMBERS)
        case 3:
            return dice.choice(NUMBERS)
        case 4:
            return dice.choice(TEXTS)
        case 5:
            return dice.choice(("x", "\n", "\0")) * dice.choice(LONG)
        case 6:
            return bytes([dice.choice((0, 1, 255))]) * dice.choice((0, 1, 3, 4, 15, 16, 17, 4096, *LONG))
        case 7:
            return dice.choice((None, True, False, {}, {"a": 1}, [], [[]], [0, 0, 0]))
        case 8:
            return [dice.choice(WHOLE_NUMBERS)] * dice.choice(LONG)
        case _:
            return nested(dice.choice(DEPTHS))


def nested(depth: int) -> Any:
    """Return arrays in arrays."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def mangled(dice: random.Random, tree: Any) -> Any:
    """Return the tree with one place of it changed: another value, more, fewer, or twice the same."""
    if isinstance(tree, dict) and tree and dice.random() < 0.8:
        key = dice.choice(list(tree))
        return {**tree, key: mangled(dice, tree[key])}
    if isinstance(tree, list) and tree and dice.random() < 0.8:
        at, changed = dice.randrange(len(tree)), list(tree)
        match dice.randrange(8):
            case 0:
                del changed[at]
            case 1:
                changed.insert(at, changed[at])
            case 2:
                other = dice.randrange(len(tree))
                changed[at], changed[other] = changed[other], changed[at]
            case _:
                changed[at] = mangled(dice, changed[at])
        return changed
    if isinstance(tree, bytes) and tree and dice.random() < 0.8:
        return spoiled(dice, tree)
    if isinstance(tree, int) and dice.random() < 0.3:
        return max(-(1 << 63), min((1 << 64) - 1, tree + dice.choice((-1, 1, 1 << 32))))
    return strange(dice)


def spoiled(dice: random.Random, data: bytes) -> bytes:
    """Return the bytes with some changed, cut out, cut off or repeated."""
    at = dice.randrange(len(data))
    match dice.randrange(5):
        case 0:
            return data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[at + 1 + dice.randrange(16) :]
        case 3:
            return data + data[: at + 1]
        case _:
            return data[:at] + b"\xff" * min(8, len(data) - at) + data[at + 8 :]
