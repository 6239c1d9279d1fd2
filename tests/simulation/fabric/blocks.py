"""What workers put: bytes that follow from a block's number and version, under engine hashes of their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tests.simulation.blocks import _NOISE, _STEP_BYTES, _VERSIONS

from ostraca_fabric.chain import Chain
from ostraca_fabric.ids import TenantId
from ostraca_fabric.keys import derive_keys, placement_secret, volume_secret
from ostraca_fabric.layout import Layout
from ostraca_fabric.tags import tag_seeds, tags_of
from ostraca_fabric.volume import VolumeIdentity

HASH_BYTES = 32
TENANT = TenantId("tenant")
VOLUME = "volume"
LAYOUT = Layout("model", "bf16", 16)
BLOCK_BYTES = 64 << 10
IDENTITY = VolumeIdentity(TENANT, VOLUME, LAYOUT.digest())
FABRIC_KEY = bytes(range(32))
SECRET = volume_secret(FABRIC_KEY, tenant=TENANT, name=VOLUME, incarnation=1)
PLACEMENT_SECRET = placement_secret(SECRET)


@dataclass(frozen=True)
class Version:
    """One put of one block: no other put has its bytes."""

    number: int
    version: int

    @property
    def data(self) -> NDArray[np.uint8]:
        begin = self.version % _VERSIONS * _STEP_BYTES
        return _NOISE[begin : begin + length_of(self.number)]

    @cached_property
    def tag(self) -> bytes:
        """What its worker makes of it."""
        numbers = [self.number]
        lengths, spans = lengths_of(numbers), (chain_of(numbers).span(),)
        tags = tags_of(self.data, np.zeros(1, np.int64), lengths, tag_seeds(IDENTITY, spans, lengths))
        return tags.tobytes()


def length_of(number: int) -> int:
    """Every put of a block has the same length, as with pages of a KV cache; different blocks differ."""
    return 1 + number * 7919 % BLOCK_BYTES


def chain_of(numbers: list[int]) -> Chain:
    """Blocks without order: each is placed by its own hash."""
    hashes = [number.to_bytes(HASH_BYTES, "big") for number in numbers]
    return Chain.of(hashes, hash_bytes=HASH_BYTES, is_chained=False)


def lengths_of(numbers: list[int]) -> NDArray[np.uint32]:
    return np.array([length_of(number) for number in numbers], np.uint32)


def keys_of(numbers: list[int]) -> dict[bytes, int]:
    """Return the key that owners know each block by."""
    keys = derive_keys(SECRET, [chain_of(numbers).span()])
    return {keys[row].tobytes(): number for row, number in enumerate(numbers)}
