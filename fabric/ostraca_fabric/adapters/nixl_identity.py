"""What both ends of the NIXL transport agree on: its name, its agents' names, and how metadata travels."""

from __future__ import annotations

import secrets

import xxhash

from ostraca_fabric.errors import TransportError

NAME = "nixl"
CHECKSUM_BYTES = 16


def sealed(metadata: bytes) -> bytes:
    """Put a checksum before NIXL's metadata."""
    return xxhash.xxh3_128_digest(metadata) + metadata


def unsealed(metadata: bytes) -> bytes:
    """Return NIXL's metadata. Raises TransportError when it is not as it was sealed."""
    checksum, inner = metadata[:CHECKSUM_BYTES], metadata[CHECKSUM_BYTES:]
    if not inner or xxhash.xxh3_128_digest(inner) != checksum:
        raise TransportError("the worker's NIXL metadata is damaged, or is none")
    return inner


def unique_name(label: str) -> str:
    """Name a NIXL agent as no other is named, nor can be guessed: NIXL knows its peers by nothing else."""
    return f"{label}-{secrets.token_hex(16)}"
