"""What workers put: bytes that follow from how many puts came before, under engine hashes that volumes share.

Block *n* is in volume ``n % volumes``, whichever tenant's that is, at place ``n // volumes`` there; the same
place of another volume has the same engine hash and the same length. The first places of a volume may be two
chains, of two ranks by turns, with the same hashes: a few blocks on both sides of the end of the first stripe
unit. Blocks with the same hash are *twins*. No two puts have the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tests.simulation.shard.blocks import _NOISE, _STEP_BYTES, _VERSIONS
from tests.simulation.shard.model import ViolationError

from ostraca_fabric.model.chain import STRIPE_UNIT_BLOCKS, Chain
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.volume import Layout, VolumeIdentity
from ostraca_fabric.tables.digests import derive_keys, placement_secret, tag_seeds, tags_of, volume_secret

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca_fabric.model.chain import Span

HASH_BYTES = 32
LAYOUT = Layout("model", "bf16", 16)
BLOCK_BYTES = 64 << 10
FABRIC_KEY = bytes(range(32))
_RANKS = 2
_CHAINED = 1 << 32
"""What hashes in chains are made of begins here."""


@dataclass(frozen=True)
class Volume:
    """A volume, and its secrets as agents must derive them."""

    tenant: TenantId
    name: str

    def __str__(self) -> str:
        """Say whose it is, too."""
        return f"{self.tenant}/{self.name}"

    @cached_property
    def identity(self) -> VolumeIdentity:
        """What its blocks' tags commit to."""
        return VolumeIdentity(self.tenant, self.name, LAYOUT.digest())

    @cached_property
    def secret(self) -> bytes:
        """What its blocks' keys are derived under."""
        return volume_secret(FABRIC_KEY, tenant=self.tenant, name=self.name, incarnation=1)

    @cached_property
    def placement_secret(self) -> bytes:
        """What its blocks are placed under."""
        return placement_secret(self.secret)


VOLUMES = (
    Volume(TenantId("tenant"), "volume"),
    Volume(TenantId("tenant"), "ntvolume"),
    Volume(TenantId("tena"), "ntvolume"),
)
"""Two of one tenant. The last two have one name, and tenant and name joined are the same of the first and the
last."""


@dataclass(frozen=True)
class Version:
    """One put of one block: no other put has its bytes."""

    number: int
    data: NDArray[np.uint8]
    tag: bytes
    """What its worker makes of it."""


class Blocks:
    """The blocks of one history, by number: those of *volumes* in turn.

    *chained*: the share of them that is in chains.
    """

    def __init__(self, numbers: int, volumes: tuple[Volume, ...], chained: float = 0.0) -> None:
        self.numbers = numbers
        self.volumes = volumes
        in_each = int(chained * numbers / len(volumes) / _RANKS)
        self._chain_begin = STRIPE_UNIT_BLOCKS - in_each // 2
        chain_end = self._chain_begin + in_each
        hashes = [_hash(_CHAINED + depth) for depth in range(chain_end if in_each else 0)]
        self._chains = [Chain.of(hashes, hash_bytes=HASH_BYTES, rank=rank) for rank in range(_RANKS)]
        self._chained = in_each * _RANKS
        """Places of each volume."""

    @property
    def tenants(self) -> list[TenantId]:
        return list(dict.fromkeys(volume.tenant for volume in self.volumes))

    def of_volume(self, volume: Volume) -> range:
        """Return the numbers of a volume's blocks."""
        return range(self.volumes.index(volume), self.numbers, len(self.volumes))

    def volume_of(self, number: int) -> Volume:
        return self.volumes[number % len(self.volumes)]

    def volume_of_all(self, numbers: Sequence[int]) -> Volume:
        """Return the volume of blocks that are in one."""
        (volume,) = {self.volume_of(number) for number in numbers}
        return volume

    def chains(self, volume: Volume) -> list[range]:
        """Return the numbers of a volume's blocks that are in chains, rank by rank, by depth."""
        numbers = self.of_volume(volume)[: self._chained]
        return [numbers[rank::_RANKS] for rank in range(_RANKS)] if numbers else []

    def twins(self, number: int) -> list[int]:
        """Return the other blocks that have the engine hash of this one."""
        own = self._hash_number(number)
        return [twin for twin in range(self.numbers) if twin != number and self._hash_number(twin) == own]

    def spans(self, numbers: Sequence[int]) -> tuple[Span, ...]:
        """Say which blocks of a volume are meant, as a request does.

        In this order, each part of a chain in a span of its own.
        """
        made, position = [], 0
        while position < len(numbers):
            end = self._run_end(numbers, position)
            some = numbers[position:end]
            if self._is_chained(some[0]):
                begin, rank = self._chain_begin + self._place(some[0]) // _RANKS, self._rank(some[0])
                chain = self._chains[rank][begin : begin + len(some)]
            else:
                hashes = [_hash(self._hash_number(number)) for number in some]
                chain = Chain.of(hashes, hash_bytes=HASH_BYTES, is_chained=False)
            made.append(chain.span())
            position = end
        return tuple(made)

    def _run_end(self, numbers: Sequence[int], begin: int) -> int:
        """Return where what one span names ends: the next blocks of a chain, or blocks that are in none."""
        end, next_in_chain = begin + 1, _RANKS * len(self.volumes)
        is_chained = self._is_chained(numbers[begin])
        while end < len(numbers) and self._is_chained(numbers[end]) == is_chained:
            if is_chained and numbers[end] != numbers[end - 1] + next_in_chain:
                break
            end += 1
        return end

    def length(self, number: int) -> int:
        """Every put of a block has the same length, as with pages of a KV cache; different hashes differ."""
        return 1 + self._hash_number(number) % _CHAINED * 7919 % BLOCK_BYTES

    def lengths(self, numbers: Sequence[int]) -> NDArray[np.uint32]:
        return np.array([self.length(number) for number in numbers], np.uint32)

    def version(self, number: int, count: int) -> Version:
        """Make a put of a block, the *count*-th of all puts."""
        begin = count % _VERSIONS * _STEP_BYTES
        data, lengths = _NOISE[begin : begin + self.length(number)], self.lengths([number])
        seeds = tag_seeds(self.volume_of(number).identity, self.spans([number]), lengths)
        return Version(number, data, tags_of(data, np.zeros(1, np.int64), lengths, seeds).tobytes())

    def keys(self) -> dict[bytes, int]:
        """Return the key that owners know each block by."""
        found: dict[bytes, int] = {}
        for volume in self.volumes:
            numbers = self.of_volume(volume)
            keys = derive_keys(volume.secret, self.spans(numbers))
            found |= {keys[row].tobytes(): number for row, number in enumerate(numbers)}
        if len(found) < self.numbers:
            raise ViolationError("two blocks have one key")
        return found

    def _place(self, number: int) -> int:
        """Return the place of a block in its volume."""
        return number // len(self.volumes)

    def _is_chained(self, number: int) -> bool:
        return self._place(number) < self._chained

    def _rank(self, number: int) -> int:
        return self._place(number) % _RANKS

    def _hash_number(self, number: int) -> int:
        """Return what a block's engine hash is made of."""
        place = self._place(number)
        return _CHAINED + self._chain_begin + place // _RANKS if place < self._chained else place


def _hash(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "big")
