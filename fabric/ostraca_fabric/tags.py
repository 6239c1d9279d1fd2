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
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from ostraca_fabric.chain import Span
from ostraca_fabric.errors import UsageError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.native import at, library
from ostraca_fabric.rows import blake2b_rows
from ostraca_fabric.volume import VolumeIdentity

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer  # exists for type checkers only

TAG_BYTES = 16
SEED_BYTES = 8


def tag_seeds(
    identity: VolumeIdentity, spans: Sequence[Span], lengths: NDArray[np.uint32]
) -> NDArray[np.uint64]:
    """Return the seed of each block of *spans*, in order: shape (n,).

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
    seeds, first = np.empty((blocks, SEED_BYTES), np.uint8), 0
    for span in spans:
        last = first + len(span)
        rest = np.empty((len(span), 3), "<u4")
        rest[:, :2] = span.rank, span.group
        rest[:, 2] = lengths[first:last]
        seeds[first:last] = blake2b_rows(
            volume + struct.pack("<I", span.hash_bytes),
            span.hashes,
            rest.view(np.uint8),
            count=len(span),
            digest_bytes=SEED_BYTES,
            person=b"ostraca-tag",
        )
        first = last
    return seeds.view("<u8").reshape(-1)


def tag_of(view: ReadableBuffer, seed: int) -> bytes:
    """Return the tag, 16 bytes, of the bytes in *view*, which must be C-contiguous. Releases the GIL."""
    return xxh3_128_digest(view, seed)


def matches(view: ReadableBuffer, seed: int, tag: ReadableBuffer) -> bool:
    """Tell whether *view* holds the bytes that *tag* was made from, for the block that *seed* stands for."""
    return xxh3_128_digest(view, seed) == bytes(tag)


def tags_of(
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
) -> NDArray[np.uint8]:
    """Return the tags of blocks that lie in *memory*, a flat array: shape (n, 16).

    One offset, length and seed each, all of shape (n,). Releases the GIL. Raises ValueError when a block
    reaches outside of *memory*.
    """
    offsets, lengths, seeds = _columns(offsets, lengths, seeds)
    tags = np.empty((len(offsets), TAG_BYTES), np.uint8)
    checked = library.ostraca_tags(
        at(memory), memory.nbytes, at(offsets), at(lengths), at(seeds), at(tags), len(offsets)
    )
    _refuse_outside(checked, memory, offsets, lengths)
    return tags


def are_good(
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
    tags: NDArray[np.uint8],
) -> NDArray[np.bool_]:
    """Tell of each block whether it holds the bytes that its tag was made from.

    As ``tags_of``, with *tags* of shape (n, 16).
    """
    offsets, lengths, seeds = _columns(offsets, lengths, seeds)
    assert tags.shape == (len(offsets), TAG_BYTES), f"tags of shape {tags.shape} for {len(offsets)} blocks"
    tags = np.ascontiguousarray(tags)
    good = np.empty(len(offsets), np.bool_)
    checked = library.ostraca_check(
        at(memory), memory.nbytes, at(offsets), at(lengths), at(seeds), at(tags), at(good), len(offsets)
    )
    _refuse_outside(checked, memory, offsets, lengths)
    return good


def blank_rests(memory: NDArray[np.uint8], offsets: NDArray[np.int64], lengths: NDArray[np.uint32]) -> None:
    """Zero what follows each block in its last page, so that no other block's bytes go to flash with it."""
    offsets, lengths, _ = _columns(offsets, lengths, np.zeros(len(offsets), np.uint64))
    checked = library.ostraca_blank_rests(
        at(memory), memory.nbytes, at(offsets), at(lengths), PAGE_BYTES, len(offsets)
    )
    _refuse_outside(checked, memory, offsets, lengths)


def _columns(
    offsets: NDArray[np.int64], lengths: NDArray[np.uint32], seeds: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint64]]:
    """See the columns as C does."""
    assert len(offsets) == len(lengths) == len(seeds), "a block has one offset, one length and one seed"
    return (
        np.ascontiguousarray(offsets, np.int64),
        np.ascontiguousarray(lengths, np.uint32),
        np.ascontiguousarray(seeds, np.uint64),
    )


def _refuse_outside(
    checked: int, memory: NDArray[np.uint8], offsets: NDArray[np.int64], lengths: NDArray[np.uint32]
) -> None:
    if checked < len(offsets):
        raise ValueError(
            f"block {checked}, {lengths[checked]} bytes at {offsets[checked]}, reaches outside of "
            f"{memory.nbytes} bytes of memory"
        )
