"""What is put: bytes that follow from a block's version, so that nobody has to remember them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import rounded_up
from ostraca_fabric.tables.digests import tag_of

LENGTH_MAX = 3 << 20
_STEP_BYTES = 64
_NOISE = np.random.Generator(np.random.PCG64(1)).integers(0, 256, 8 << 20, np.uint8)
_VERSIONS = (len(_NOISE) - LENGTH_MAX) // _STEP_BYTES


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def seed_of(number: int) -> int:
    """Return what a block's tag is seeded with: it stands for who the block is."""
    return (number + 1) * 0x9E3779B97F4A7C15 % (1 << 64)


def keys_of(numbers: list[int]) -> NDArray[np.uint8]:
    return rows16([key_of(number) for number in numbers])


def numbers_of(keys: NDArray[np.uint8]) -> list[int]:
    words: list[int] = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)[:, 0].tolist()
    return words


def rows16(values: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, 16)


@dataclass(frozen=True)
class Block:
    """One put of one block: no other has its *version*, nor its bytes."""

    number: int
    version: int
    length: int

    @property
    def data(self) -> NDArray[np.uint8]:
        begin = self.version % _VERSIONS * _STEP_BYTES
        return _NOISE[begin : begin + self.length]

    @cached_property
    def tag(self) -> bytes:
        return tag_of(self.data.data, seed_of(self.number))

    @property
    def stored_bytes(self) -> int:
        return rounded_up(self.length)
