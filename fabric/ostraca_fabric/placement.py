"""Placement: which shard holds a block, and which agent a shard would rather have as its owner.

Both are rendezvous hashing: every member draws a number for the thing to be placed, and the best draw wins. A
member's draw depends on nobody else, so a member that comes or goes moves its own share and nothing else; and
the draws are independent, so shares are even without virtual nodes. With weights, a member draws an
exponential variate divided by its weight, and the smallest wins: the chance to win is exactly the member's
part of all weight (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).

A block is placed in two steps. Its placement hash alone chooses the *enclosure*, so that all ranks and groups
of a stripe unit share a failure domain; placement hash, rank and group choose the *shard* in it. Placement
hashes are first put through BLAKE2b (RFC 7693) under the volume's placement secret, so no tenant can aim its
blocks at one shard.

Agents on different processors must agree on every draw, so draws use only operations that IEEE 754 and two's
complement define to the last bit: integer multiply, xor and shift, and single float64 additions,
multiplications and divisions, in this order. ``numpy.log`` is not among them: its last bit differs between
libraries and vector units.

Only weights count. An enclosure's state does not: it may change without a new placement epoch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.chain import Span
from ostraca_fabric.fabric_map import EnclosureRecord, FabricMap
from ostraca_fabric.ids import AgentId, PlacementEpoch, ShardId
from ostraca_fabric.rows import blake2b_rows

NOWHERE = -1
"""The index of "no shard": the fabric has no weight at all."""

_LN_2 = 0.6931471805599453
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
"""The float64 nearest to the square root of one half, as bits."""
_MANTISSA_BITS = 52
_ATANH_TERMS = 10
"""With |s| below 0.172 the first term left out is below 3e-17 of the sum."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where blocks go in one placement epoch. Make it once per epoch, with ``of`` or ``among``."""

    epoch: PlacementEpoch
    shard_ids: tuple[ShardId, ...]
    """Every shard of the fabric, those without weight too, sorted: what indexes point into."""

    _enclosure_hashes: NDArray[np.uint64]
    """Shape (enclosures,): enclosures with weight only, sorted by id."""
    _enclosure_shares: NDArray[np.float64]
    """Shape (enclosures,): one divided by the enclosure's weight."""
    _shard_hashes: NDArray[np.uint64]
    """Shape (enclosures, most shards of one)."""
    _shard_shares: NDArray[np.float64]
    """The same shape: one divided by the shard's weight, infinite where a row has no shard."""
    _shard_indexes: NDArray[np.intp]
    """The same shape: indexes into ``shard_ids``, NOWHERE where a row has no shard."""

    @classmethod
    def of(cls, fabric_map: FabricMap) -> Self:
        """Make the placement of a map's placement epoch."""
        return cls.among(fabric_map.placement_epoch, fabric_map.enclosures.values())

    @classmethod
    def among(cls, epoch: PlacementEpoch, enclosures: Iterable[EnclosureRecord]) -> Self:
        """Make the placement over these enclosures. The order of records is of no account."""
        ordered = sorted(enclosures, key=lambda enclosure: enclosure.id)
        shard_ids = tuple(sorted(shard.id for enclosure in ordered for shard in enclosure.shards))
        index_of = {shard: index for index, shard in enumerate(shard_ids)}
        assert len(index_of) == len(shard_ids), "two shards of a fabric have the same id"
        rows = [
            (enclosure.id, sorted((shard.id, shard.weight) for shard in enclosure.shards if shard.weight > 0))
            for enclosure in ordered
        ]
        rows = [(enclosure, members) for enclosure, members in rows if members]
        shape = (len(rows), max((len(members) for _, members in rows), default=0))
        hashes, shares = np.zeros(shape, np.uint64), np.full(shape, np.inf)
        indexes = np.full(shape, NOWHERE, np.intp)
        for row, (_, members) in enumerate(rows):
            hashes[row, : len(members)] = [_member_hash(shard) for shard, _ in members]
            shares[row, : len(members)] = [1.0 / weight for _, weight in members]
            indexes[row, : len(members)] = [index_of[shard] for shard, _ in members]
        return cls(
            epoch,
            shard_ids,
            np.array([_member_hash(enclosure) for enclosure, _ in rows], np.uint64),
            np.array([1.0 / sum(weight for _, weight in members) for _, members in rows], np.float64),
            hashes,
            shares,
            indexes,
        )

    def shards(self, secret: bytes, spans: Sequence[Span]) -> NDArray[np.intp]:
        """Return where each block of *spans* belongs, in order: shape (n,), indexes into ``shard_ids``.

        *secret* is the volume's placement secret. Every index is NOWHERE when no shard has weight.
        """
        unit_blocks = [count for span in spans for count in span.unit_blocks]
        if not len(self._enclosure_hashes) or not unit_blocks:
            return np.full(sum(unit_blocks), NOWHERE, np.intp)
        unit_hashes = _unit_hashes(secret, spans)
        parts = np.array([span.rank << 32 | span.group for span in spans], np.uint64)
        part_of_unit = np.repeat(_mixed(parts), [len(span.unit_blocks) for span in spans])
        rows = _winners(unit_hashes[:, 0], self._enclosure_hashes, self._enclosure_shares)
        columns = _winners(
            unit_hashes[:, 1] ^ part_of_unit, self._shard_hashes[rows], self._shard_shares[rows]
        )
        return np.repeat(self._shard_indexes[rows, columns], unit_blocks)


def preferred_agent(shard: ShardId, agents: Sequence[AgentId]) -> AgentId:
    """Return the agent that rendezvous prefers as the shard's owner, of at least one, in any order."""
    prefix = struct.pack("<I", len(shard.encode())) + shard.encode()

    def draw(agent: AgentId) -> tuple[bytes, AgentId]:
        return blake2b(prefix + agent.encode(), digest_size=8, person=b"ostraca-agent").digest(), agent

    return max(agents, key=draw)


def _member_hash(member: str) -> int:
    digest = blake2b(member.encode(), digest_size=8, person=b"ostraca-member").digest()
    return int.from_bytes(digest, "little")


def _unit_hashes(secret: bytes, spans: Sequence[Span]) -> NDArray[np.uint64]:
    """Hash each stripe unit under the secret, shape (units, 2): one for the enclosure, one for the shard."""
    digests = [
        blake2b_rows(
            b"",
            span.units,
            np.empty((len(span.unit_blocks), 0), np.uint8),
            digest_bytes=16,
            person=b"ostraca-unit",
            key=secret,
        )
        for span in spans
    ]
    return np.concatenate(digests).view("<u8").astype(np.uint64)


def _winners(
    things: NDArray[np.uint64], members: NDArray[np.uint64], shares: NDArray[np.float64]
) -> NDArray[np.intp]:
    """Return for each thing, shape (n,), the column of the member that wins it.

    *members* and *shares* have shape (m,) or (n, m). Of equal draws the first wins, but 53 bits hardly ever
    tie.
    """
    draws = _exponential(_mixed(things[:, np.newaxis] ^ members))
    draws *= shares
    winners: NDArray[np.intp] = draws.argmin(axis=1)
    return winners


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's finaliser of each number (Steele, Lea and Flood 2014, with Stafford's mix 13)."""
    mixed = numbers ^ (numbers >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _exponential(numbers: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return -ln(u), to about 4e-16 of itself, where u is the odd number of the top 53 bits divided by 2**53.

    So u is never 0 nor 1 and the result is positive and finite. u * 2**53 is split into m * 2**e with m
    between the square roots of 1/2 and 2, and ln(m) is 2 * atanh((m - 1) / (m + 1)), by its series.
    """
    bits = ((numbers >> np.uint64(11)) | np.uint64(1)).astype(np.float64).view(np.uint64)
    exponent = (bits - np.uint64(_SQRT_HALF_BITS)) >> np.uint64(_MANTISSA_BITS)
    bits -= exponent << np.uint64(_MANTISSA_BITS)
    mantissa = bits.view(np.float64)
    # In place from here on: fresh memory would cost more in page faults than the arithmetic.
    s = mantissa - 1.0
    mantissa += 1.0
    s /= mantissa
    square = np.multiply(s, s, out=mantissa)
    series = np.full_like(square, 1.0 / (2 * _ATANH_TERMS - 1))
    for term in range(_ATANH_TERMS - 2, -1, -1):
        series *= square
        series += 1.0 / (2 * term + 1)
    series *= s
    series *= 2.0
    variate = 53.0 - exponent.astype(np.float64)
    variate *= _LN_2
    variate -= series
    return variate
