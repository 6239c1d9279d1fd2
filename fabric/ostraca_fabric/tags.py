"""Tags: how both ends know that the bytes that arrived are the bytes that were put, as that block.

A tag is the 128-bit XXH3 of a block's bytes, seeded with who the block is: tenant, volume, layout digest,
engine hash, rank, group and length. The SDK makes it from the caller's bytes before a put and checks it
against what landed before it hands anything over; agents check it on the way. Everything in it is public, so
the SDK needs no secret.

A tag protects against accidents: rot, torn and lost writes, stale or reused memory and flash, late transfers,
a swapped index entry, bytes of another block, tenant, volume, layout or length. Each goes unnoticed with a
chance of about 2**-64 (the seed's width) or less. A tag does **not** protect against someone who chooses
bytes or identities to collide: XXH3 is not cryptographic. Whoever may write a volume can write anything into
it under a right tag, and against others stand the connection's tenant, the keys and encryption (architecture:
trust), not this.

Algorithms: BLAKE2b, RFC 7693, with digest length 8 and a personalisation, for the seed; XXH3 128 bits as in
the xxHash specification (doc/xxhash_spec.md of github.com/Cyan4973/xxHash), in its canonical, big-endian
form.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128, xxh3_128_digest

from ostraca_fabric.chain import Span
from ostraca_fabric.errors import UsageError
from ostraca_fabric.volume import VolumeIdentity

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer  # exists for type checkers only

TAG_BYTES = 16
SEED_BYTES = 8


def tag_seeds(
    identity: VolumeIdentity, spans: Sequence[Span], lengths: NDArray[np.uint32]
) -> NDArray[np.uint64]:
    """Return the seed of each block of *spans*, in order: shape (n,), read-only.

    *lengths* are the blocks' lengths in bytes, shape (n,). A seed is BLAKE2b-64, read as little-endian, over
    tenant, volume name, layout digest and engine hash, each preceded by its length, then rank, group and
    length; all numbers are u32, little-endian. Raises UsageError when there are not as many lengths as
    blocks.
    """
    blocks = sum(len(span) for span in spans)
    if lengths.shape != (blocks,):
        raise UsageError(f"lengths of shape {lengths.shape} for {blocks} blocks: pass one for each")
    fields = [identity.tenant.encode(), identity.name.encode(), identity.layout_digest]
    volume = b"".join(struct.pack("<I", len(field)) + field for field in fields)
    length_column = lengths.astype("<u4").tobytes()
    seeds, length_at = [], 0
    for span in spans:
        hashes, width = span.hashes, span.hash_bytes
        rank_and_group = struct.pack("<II", span.rank, span.group)
        # What the span's blocks have in common is hashed once; copying that state is cheaper.
        begun = blake2b(volume + struct.pack("<I", width), digest_size=SEED_BYTES, person=b"ostraca-tag").copy
        for at in range(0, len(hashes), width):
            state = begun()
            state.update(hashes[at : at + width] + rank_and_group + length_column[length_at : length_at + 4])
            seeds.append(state.digest())
            length_at += 4
    return np.frombuffer(b"".join(seeds), "<u8")


def tag_of(view: ReadableBuffer, seed: int) -> bytes:
    """Return the tag, 16 bytes, of the bytes in *view*, which must be C-contiguous. Releases the GIL."""
    return xxh3_128_digest(view, seed)


def tag_of_parts(parts: Iterable[ReadableBuffer], seed: int) -> bytes:
    """Return the tag of all parts joined, without joining them. Each part must be C-contiguous."""
    state = xxh3_128(seed=seed)
    for part in parts:
        state.update(part)
    return state.digest()


def tags_of(views: Sequence[memoryview], seeds: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Return the tags of whole blocks, one view and one seed each: shape (n, 16), read-only."""
    made = [xxh3_128_digest(view, seed) for view, seed in zip(views, seeds.tolist(), strict=True)]
    return np.frombuffer(b"".join(made), np.uint8).reshape(-1, TAG_BYTES)


def matches(view: ReadableBuffer, seed: int, tag: ReadableBuffer) -> bool:
    """Tell whether *view* holds the bytes that *tag* was made from, for the block that *seed* stands for."""
    return xxh3_128_digest(view, seed) == bytes(tag)
