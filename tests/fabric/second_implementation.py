"""Keys, tags and placement once more, written from their definitions and without the code under test.

One block at a time, plain Python, ``math.log`` where the fabric computes a logarithm of its own. What both
say alike is very likely what the definitions say.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping

import xxhash


def with_length(field: bytes) -> bytes:
    return len(field).to_bytes(4, "little") + field


def volume_secret(fabric_key: bytes, tenant: str, name: str, incarnation: int) -> bytes:
    message = (
        with_length(tenant.encode())
        + with_length(name.encode())
        + with_length(incarnation.to_bytes(8, "little"))
    )
    return hashlib.blake2b(message, digest_size=32, key=fabric_key, person=b"ostraca-volume").digest()


def placement_secret(secret: bytes) -> bytes:
    return hashlib.blake2b(b"", digest_size=32, key=secret, person=b"ostraca-place").digest()


def key(secret: bytes, engine_hash: bytes, rank: int, group: int) -> bytes:
    message = engine_hash + rank.to_bytes(4, "little") + group.to_bytes(4, "little")
    return hashlib.blake2b(message, digest_size=16, key=secret, person=b"ostraca-key").digest()


def seed(volume: tuple[str, str, bytes], engine_hash: bytes, rank: int, group: int, length: int) -> int:
    tenant, name, layout_digest = volume
    message = (
        with_length(tenant.encode())
        + with_length(name.encode())
        + with_length(layout_digest)
        + with_length(engine_hash)
        + struct.pack("<III", rank, group, length)
    )
    digest = hashlib.blake2b(message, digest_size=8, person=b"ostraca-tag").digest()
    return int.from_bytes(digest, "little")


def tag(block: bytes, seed_of_block: int) -> bytes:
    return xxhash.xxh3_128(block, seed=seed_of_block).intdigest().to_bytes(16, "big")


def placement_hashes(engine_hashes: list[bytes], start: int, stop: int) -> list[bytes]:
    """Compute the placement hashes of a chain's blocks from start to stop."""
    return [engine_hashes[position // 32 * 32] for position in range(start, stop)]


def mixed(number: int) -> int:
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def winner(drawer: int, weights: Mapping[str, int]) -> str | None:
    def draw(member: str) -> float:
        member_hash = hashlib.blake2b(member.encode(), digest_size=8, person=b"ostraca-member").digest()
        number = mixed(drawer ^ int.from_bytes(member_hash, "little"))
        uniform = (number >> 11 | 1) / 2**53
        return -math.log(uniform) / weights[member]

    return min((member for member in weights if weights[member] > 0), key=draw, default=None)


def shard(
    secret: bytes, fabric: Mapping[str, Mapping[str, int]], placement_hash: bytes, rank: int, group: int
) -> str | None:
    """Where a block belongs; *fabric* maps enclosures to their shards' weights."""
    unit = hashlib.blake2b(placement_hash, digest_size=16, key=secret, person=b"ostraca-unit").digest()
    enclosure = winner(
        int.from_bytes(unit[:8], "little"), {name: sum(shards.values()) for name, shards in fabric.items()}
    )
    if enclosure is None:
        return None
    return winner(int.from_bytes(unit[8:], "little") ^ mixed(rank * 2**32 + group), fabric[enclosure])


def preferred_agent(shard_id: str, agents: Iterable[str]) -> str:
    def draw(agent: str) -> int:
        message = with_length(shard_id.encode()) + agent.encode()
        return int.from_bytes(
            hashlib.blake2b(message, digest_size=8, person=b"ostraca-agent").digest(), "big"
        )

    return max(agents, key=draw)
