"""Blocks that anybody can check: bytes, length and hash follow from a block's number.

Each page begins with the number, so that a page of another block, or of an earlier use of the same place, is
noticed whatever else it holds.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

PAGE = 4096
BLOCK_BYTES = 1 << 20
NEVER_PUT = 1 << 40
"""Numbers from here on are asked for, and never put."""

_LENGTHS = (4096, 4096, 5_000, 20_000, 65_536, 200_001, 524_288, BLOCK_BYTES)
_STEPS = 512
_POOL = np.frombuffer(np.random.default_rng(4).bytes(BLOCK_BYTES + _STEPS * PAGE), np.uint8)


def length_of(number: int) -> int:
    """From one page to 1 MiB, some not whole pages."""
    return _LENGTHS[hash_of(number)[0] % len(_LENGTHS)]


@functools.lru_cache(1 << 16)
def hash_of(number: int) -> bytes:
    """Return the engine hash."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32, person=b"soak-flash").digest()


def content(number: int) -> NDArray[np.uint8]:
    """Return the bytes, the caller's own."""
    length = length_of(number)
    begin = number % _STEPS * PAGE
    block = _POOL[begin : begin + length].copy()
    whole = block[: length // PAGE * PAGE].reshape(-1, PAGE)
    whole[:, :8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
    return block
