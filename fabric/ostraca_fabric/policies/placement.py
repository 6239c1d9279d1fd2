"""Placement: the shard of each block, and the preferred owner of each shard.

Both use rendezvous hashing: every member draws a number for the object to place, and the best draw wins. A
draw depends on no other member, so a new or lost member moves only its own share. Draws are independent, so
shares are even without virtual nodes. With weights, a member draws an exponential variate divided by its
weight, and the smallest wins: the probability is exactly the member's part of all weight (Efraimidis and
Spirakis, "Weighted random sampling with a reservoir", 2006).

A block is placed in two steps. The placement hash alone selects the *enclosure*, so that all ranks and groups
of a stripe unit share a failure domain. Placement hash, rank and group select the *shard* in the enclosure.
Placement hashes first pass through BLAKE2b (RFC 7693) under the volume's placement secret, so that no tenant
can direct blocks to one shard.

Agents on different processors must agree on every draw. So draws use only operations that IEEE 754 and two's
complement define to the last bit. These are integer multiply, xor and shift, and single float64 additions,
multiplications and divisions, in a fixed order (``native/winners.c``). ``log`` is excluded: its last bit
differs between libraries and vector units.

Only weights count. The state of an enclosure does not, because a state may change without a new placement
epoch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.fabric_map import EnclosureRecord, PlacementRecord, weights_of
from ostraca_fabric.model.ids import AgentId, EnclosureId, PlacementEpoch, ShardId
from ostraca_fabric.native import at, brief
from ostraca_fabric.tables.digests import blake2b_rows

NOWHERE = -1
"""Index for "no shard": the fabric has no weight at all."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Placement of one epoch. Created once per epoch, with ``among`` or ``recorded``."""

    epoch: PlacementEpoch
    shard_ids: tuple[ShardId, ...]
    """Sorted targets of indexes. With ``among`` all shards, with ``recorded`` the shards with weight."""

    _enclosure_hashes: NDArray[np.uint64]
    """Shape (enclosures,): enclosures with weight only, sorted by id."""
    _enclosure_shares: NDArray[np.float64]
    """Shape (enclosures,): the inverse of the enclosure's weight."""
    _shard_hashes: NDArray[np.uint64]
    """Shape (enclosures, largest number of shards in an enclosure)."""
    _shard_shares: NDArray[np.float64]
    """The same shape: the inverse of the shard's weight, infinite in places without a shard."""
    _shard_indexes: NDArray[np.intp]
    """The same shape: indexes into ``shard_ids``, NOWHERE in places without a shard."""
    _members: tuple[int, ...] = field(init=False)
    """Addresses and sizes of these arrays for C, the same for every request."""

    def __post_init__(self) -> None:
        """Compute the addresses and sizes for C."""
        members = (
            at(self._enclosure_hashes),
            at(self._enclosure_shares),
            self._enclosure_hashes.size,
            at(self._shard_hashes),
            at(self._shard_shares),
            at(self._shard_indexes),
            self._shard_hashes.shape[1],
        )
        object.__setattr__(self, "_members", members)

    @classmethod
    def among(cls, epoch: PlacementEpoch, enclosures: Iterable[EnclosureRecord]) -> Self:
        """Build the placement over these enclosures, in any order."""
        known = list(enclosures)
        shard_ids = [shard.id for enclosure in known for shard in enclosure.shards]
        assert len(set(shard_ids)) == len(shard_ids), "two shards of a fabric have the same id"
        return cls._weighted(epoch, weights_of(known), shard_ids)

    @classmethod
    def recorded(cls, record: PlacementRecord) -> Self:
        """Build the placement of a record's epoch."""
        shard_ids = [shard for members in record.weights.values() for shard in members]
        return cls._weighted(record.epoch, record.weights, shard_ids)

    @classmethod
    def _weighted(
        cls,
        epoch: PlacementEpoch,
        weights: Mapping[EnclosureId, Mapping[ShardId, int]],
        shard_ids: Iterable[ShardId],
    ) -> Self:
        """Build the placement from these weights, all above zero, with indexes into *shard_ids*."""
        shard_ids = tuple(sorted(shard_ids))
        index_of = {shard: index for index, shard in enumerate(shard_ids)}
        rows = [(enclosure, sorted(weights[enclosure].items())) for enclosure in sorted(weights)]
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
        """Return the shard of each block of *spans*: shape (n,), indexes into ``shard_ids``.

        *secret* is the volume's placement secret. Every index is NOWHERE if no shard has weight.
        """
        return self.unit_shards(secret, spans).repeat(blocks_of_units(spans))

    def unit_shards(self, secret: bytes, spans: Sequence[Span]) -> NDArray[np.intp]:
        """Return the shard of each stripe unit of *spans*, as ``shards``: shape (units,)."""
        if not self._enclosure_hashes.size or not spans:
            return np.full(sum(len(span.unit_blocks) for span in spans), NOWHERE, np.intp)
        hashes = _unit_hashes(secret, spans)
        parts = np.array([span.rank << 32 | span.group for span in spans], np.uint64)
        part_of_unit = parts.repeat([len(span.unit_blocks) for span in spans])
        chosen = np.empty(len(hashes), np.intp)
        brief.ostraca_place(at(hashes), at(part_of_unit), *self._members, at(chosen), len(chosen))
        return chosen


def blocks_of_units(spans: Sequence[Span]) -> list[int]:
    """Return the number of blocks in each stripe unit of *spans*, in order."""
    return [count for span in spans for count in span.unit_blocks]


def ranked_agents(shard: ShardId, agents: Sequence[AgentId]) -> tuple[AgentId, ...]:
    """Rank agents as owners of a shard by rendezvous hashing, the preferred agent first.

    The order of the input does not matter.
    """
    return tuple(sorted(agents, key=lambda agent: (_agent_draw(shard, agent), agent), reverse=True))


def agent_draws(agent: AgentId, shards: Sequence[ShardId]) -> NDArray[np.uint64]:
    """Return an agent's draw for each shard, shape (n,), as used by ``ranked_agents``.

    The highest draw is preferred; with equal draws, the higher id.
    """
    return np.frombuffer(b"".join(_agent_draw(shard, agent) for shard in shards), ">u8").astype(np.uint64)


def _agent_draw(shard: ShardId, agent: AgentId) -> bytes:
    named = shard.encode()
    drawn = blake2b(
        struct.pack("<I", len(named)) + named + agent.encode(), digest_size=8, person=b"ostraca-agent"
    )
    return drawn.digest()


def _member_hash(member: str) -> int:
    digest = blake2b(member.encode(), digest_size=8, person=b"ostraca-member").digest()
    return int.from_bytes(digest, "little")


def _unit_hashes(secret: bytes, spans: Sequence[Span]) -> NDArray[np.uint8]:
    """Hash stripe units under the secret, shape (units, 16).

    8 bytes select the enclosure, 8 the shard.
    """
    hashed = [
        blake2b_rows(
            b"",
            span.units,
            b"",
            count=len(span.unit_blocks),
            digest_bytes=16,
            person=b"ostraca-unit",
            key=secret,
        )
        for span in spans
    ]
    return hashed[0] if len(hashed) == 1 else np.concatenate(hashed)
