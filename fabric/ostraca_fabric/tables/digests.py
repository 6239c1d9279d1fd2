"""Digests of blocks: keys of the index, placement secrets, and tags over bytes.

**Keys** are derived only by agents. A volume's secret is derived from the fabric key, and all else from the
volume's secret. Without the fabric key, a key reveals no tokens and no tenant. A tenant cannot ask for
another tenant's keys. A new incarnation of an erased volume shares no key with the old incarnation. Secrets
never leave the agents; a worker needs none.

**Tags** verify that received bytes are those of the stored block. A tag is the 128-bit XXH3 of a block's
bytes. The seed is the block's identity: tenant, volume, layout digest, engine hash, rank, group and length.
The SDK makes the tag from the caller's bytes before a put, and checks the tag against received bytes before
delivery; agents check on the way. All inputs are public, so the SDK needs no secret.

A tag protects against accidents:

- bit rot, torn and lost writes
- stale or reused memory and flash, and late transfers
- swapped index entries
- bytes of another block, tenant, volume, layout or length

Each goes unnoticed with a probability of about 2**-64 (the seed's width) or less. A tag does **not** protect
against chosen bytes or identities with a collision: XXH3 is not cryptographic. Any writer of a volume can
write arbitrary bytes under a correct tag. Protection against others is the task of the connection's tenant,
keys and encryption (architecture: trust).

Algorithms: every derivation, seeds included, is BLAKE2b (RFC 7693, section 2.9) with a 16-byte
personalisation from BLAKE2's parameter block, different for each purpose; derivations of secrets and keys are
keyed. Fields of variable length are preceded by their length (u32, little-endian). So tenant ``a`` with
volume ``bc`` and tenant ``ab`` with volume ``c`` have nothing in common. The tag is XXH3 128 bits as in the
xxHash specification (doc/xxhash_spec.md of github.com/Cyan4973/xxHash), in canonical, big-endian form.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.ids import FabricId, TenantId
from ostraca_fabric.model.volume import VolumeIdentity
from ostraca_fabric.native import at, library, library_for

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer  # exists for type checkers only

_PERSON_BYTES = 16
_DIGEST_BYTES_MAX = 64

_ROW_BYTES = 256
"""Bytes of blocks that are hashed in the time of a row."""


def blake2b_rows(
    prefix: bytes,
    rows: bytes,
    suffixes: NDArray[np.uint8] | bytes,
    *,
    count: int,
    digest_bytes: int,
    person: bytes,
    key: bytes = b"",
) -> NDArray[np.uint8]:
    """Return BLAKE2b (RFC 7693) of *prefix*, row and suffix: shape (n, *digest_bytes*).

    *rows* has *count* rows of equal length, back to back. *suffixes* has shape (n, suffix bytes), or is a
    single suffix for all rows. *person* has up to 16 bytes and *key* up to 64, as in ``hashlib.blake2b``.
    """
    row_bytes, left_over = divmod(len(rows), count) if count else (0, len(rows))
    assert not left_over, f"{len(rows)} bytes are not {count} rows"
    assert len(person) <= _PERSON_BYTES, "a personalisation has at most 16 bytes"
    assert len(key) <= _DIGEST_BYTES_MAX, "a key has at most 64 bytes"
    assert 0 < digest_bytes <= _DIGEST_BYTES_MAX, "digests have 1 to 64 bytes"
    if isinstance(suffixes, bytes):
        suffix_bytes, suffix_step = len(suffixes), 0
    else:
        suffixes = np.ascontiguousarray(suffixes, np.uint8)
        suffix_bytes = suffix_step = suffixes.shape[1]
        assert len(suffixes) == count, "each row has a suffix"
    digests = np.empty((count, digest_bytes), np.uint8)
    failed = library_for(count * _ROW_BYTES).ostraca_blake2b_rows(
        key,
        len(key),
        person.ljust(_PERSON_BYTES, b"\0"),
        prefix,
        len(prefix),
        rows,
        row_bytes,
        suffixes if isinstance(suffixes, bytes) else at(suffixes),
        suffix_bytes,
        suffix_step,
        at(digests),
        digest_bytes,
        count,
    )
    if failed:
        raise MemoryError("no memory to lay out messages in")
    return digests


FABRIC_KEY_BYTES = 32
SECRET_BYTES = 32
KEY_BYTES = 16
_RANK_AND_GROUP = struct.Struct("<II")


def contiguous_keys(keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return keys in C layout: contiguous, 16 bytes each."""
    whole = np.ascontiguousarray(keys, np.uint8)
    assert whole.shape == (len(whole), KEY_BYTES), f"keys of shape {whole.shape}"
    return whole


def volume_secret(fabric_key: bytes, *, tenant: TenantId, name: str, incarnation: int) -> bytes:
    """Return the 32-byte secret of one incarnation of a volume.

    Raises UsageError unless the fabric key has 32 bytes.
    """
    if len(fabric_key) != FABRIC_KEY_BYTES:
        raise UsageError(f"the fabric key has {len(fabric_key)} bytes: take {FABRIC_KEY_BYTES} random ones")
    fields = [tenant.encode(), name.encode(), struct.pack("<Q", incarnation)]
    message = b"".join(struct.pack("<I", len(field)) + field for field in fields)
    return blake2b(message, key=fabric_key, digest_size=SECRET_BYTES, person=b"ostraca-volume").digest()


def fabric_key_check(fabric_key: bytes, fabric: FabricId) -> str:
    """Return a check value for equality of fabric keys that reveals no key."""
    return blake2b(fabric, key=fabric_key, digest_size=KEY_BYTES, person=b"ostraca-check").hexdigest()


def placement_secret(secret: bytes) -> bytes:
    """Return the 32-byte secret for the placement of a volume, shared by ranks and groups."""
    return blake2b(key=secret, digest_size=SECRET_BYTES, person=b"ostraca-place").digest()


def derive_keys(secret: bytes, spans: Sequence[Span]) -> NDArray[np.uint8]:
    """Return the keys of all blocks of *spans*, in order: shape (n, 16).

    A key is BLAKE2b-128 under the volume's secret over engine hash, rank and group (u32, little-endian).
    """
    made = [
        blake2b_rows(
            b"",
            span.hashes,
            _RANK_AND_GROUP.pack(span.rank, span.group),
            count=len(span),
            digest_bytes=KEY_BYTES,
            person=b"ostraca-key",
            key=secret,
        )
        for span in spans
    ]
    if len(made) == 1:
        return made[0]
    return np.concatenate(made) if made else np.empty((0, KEY_BYTES), np.uint8)


_ALL_BYTES = (1 << 64) - 1
TAG_BYTES = 16
SEED_BYTES = 8


def tag_seeds(
    identity: VolumeIdentity, spans: Sequence[Span], lengths: NDArray[np.uint32]
) -> NDArray[np.uint64]:
    """Return the seed of each block of *spans*, in order: shape (n,).

    *lengths* are the blocks' lengths in bytes, shape (n,). A seed is BLAKE2b-64, read as little-endian, over
    tenant, volume name, layout digest and engine hash, each preceded by its length. Rank, group and length
    follow. All numbers are u32, little-endian. Raises UsageError unless each block has a length.
    """
    blocks = sum(map(len, spans))
    if lengths.shape != (blocks,):
        raise UsageError(f"lengths of shape {lengths.shape} for {blocks} blocks: pass one for each")
    seeds, first = np.empty((blocks, SEED_BYTES), np.uint8), 0
    for span in spans:
        last = first + len(span)
        rest = np.empty((len(span), 3), "<u4")
        rest[:, :2] = span.rank, span.group
        rest[:, 2] = lengths[first:last]
        seeds[first:last] = blake2b_rows(
            identity.encoded + struct.pack("<I", span.hash_bytes),
            span.hashes,
            rest.view(np.uint8),
            count=len(span),
            digest_bytes=SEED_BYTES,
            person=b"ostraca-tag",
        )
        first = last
    return seeds.view("<u8").reshape(-1)


def tag_of(view: ReadableBuffer, seed: int) -> bytes:
    """Return the 16-byte tag of *view*, which must be C-contiguous. Releases the GIL."""
    return xxh3_128_digest(view, seed)


def matches(view: ReadableBuffer, seed: int, tag: ReadableBuffer) -> bool:
    """Tell whether *view* has the bytes of *tag*, for the block of *seed*."""
    return xxh3_128_digest(view, seed) == bytes(tag)


def tags_of(
    memory: NDArray[np.uint8] | None,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
    *,
    calls: CDLL = library,
) -> NDArray[np.uint8]:
    """Return the tags of blocks in *memory*, a flat array: shape (n, 16).

    Offsets, lengths and seeds have shape (n,). *calls* is the library to call, which releases the GIL or not.
    Raises ValueError if a block reaches outside *memory*.
    """
    offsets, lengths, seeds = _columns(offsets, lengths, seeds)
    tags = np.empty((len(offsets), TAG_BYTES), np.uint8)
    where = (None, _ALL_BYTES) if memory is None else (at(memory), memory.nbytes)
    checked = calls.ostraca_tags(*where, at(offsets), at(lengths), at(seeds), at(tags), len(offsets))
    if memory is not None:
        _refuse_outside(checked, memory, offsets, lengths)
    return tags


def are_good(
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
    tags: NDArray[np.uint8],
    *,
    calls: CDLL = library,
) -> NDArray[np.bool_]:
    """Tell for each block whether the bytes match the tag.

    Arguments as in ``tags_of``, with *tags* of shape (n, 16).
    """
    offsets, lengths, seeds = _columns(offsets, lengths, seeds)
    assert tags.shape == (len(offsets), TAG_BYTES), f"tags of shape {tags.shape} for {len(offsets)} blocks"
    states = np.zeros(len(offsets), np.uint8)
    _verify(memory, offsets, lengths, seeds, np.ascontiguousarray(tags), states, calls=calls)
    good: NDArray[np.bool_] = states == GOOD
    return good


def _verify(
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
    tags: NDArray[np.uint8],
    states: NDArray[np.uint8],
    *,
    in_pages: bool = False,
    calls: CDLL = library,
) -> None:
    """Set the states of blocks by their tags, after zeroing the rest of each block's last page, if any."""
    verified = calls.ostraca_verify(
        at(memory),
        memory.nbytes,
        at(offsets),
        at(lengths),
        at(seeds),
        at(tags),
        at(states),
        len(offsets),
        in_pages,
        0,
        None,
    )
    _refuse_outside(verified, memory, offsets, lengths)


class CheckState(IntEnum):
    """State of a block's tag check, or of a piece of a read without tags, as in ``native/ostraca.h``."""

    PENDING = 0
    """Not read, or not checked in time."""

    GOOD = 1
    DAMAGED = 2
    """The bytes do not match the tag."""


GOOD, DAMAGED = int(CheckState.GOOD), int(CheckState.DAMAGED)
"""The same, for columns: numpy takes thrice as long for an enum's member."""

_DAMAGED = np.uint8(DAMAGED)


def check_states(are_good: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return the states of checked blocks."""
    return _DAMAGED - are_good


@dataclass(frozen=True, slots=True)
class TagCheck:
    """Tags of the blocks of a read, one block per piece: columns of shape (n,).

    A drive checks each piece right after the read, while the bytes are in the processor's cache. The columns
    must not change until the read has ended.
    """

    pieces: Pieces
    lengths: NDArray[np.uint32]
    """Bytes of each block, at most the bytes of the piece."""

    seeds: NDArray[np.uint64]
    tags: NDArray[np.uint8]
    """Tags of shape (n, 16)."""

    progress_bytes: int = 0
    """Bytes read that are worth telling the listeners before the end of the read; 0: none."""

    listeners: list[Callable[[], None]] = field(default_factory=list)
    """Called on the event loop when states have changed before the end of the read. Drives may skip calls."""

    states: NDArray[np.uint8] = field(init=False)
    """A ``CheckState`` per piece, filled in as the read advances. After the end of the read, pending pieces
    are failures of the drive."""

    def __post_init__(self) -> None:
        """Assert columns of one length and of the types that C expects."""
        count = len(self.pieces)
        assert self.lengths.shape == self.seeds.shape == (count,), "one length and one seed for each piece"
        assert self.tags.shape == (count, TAG_BYTES), "one tag for each piece"
        assert self.lengths.dtype == np.uint32, "lengths are u32"
        assert self.seeds.dtype == np.uint64, "seeds are u64"
        for column in (self.lengths, self.seeds, self.tags):
            assert column.flags.c_contiguous, "C sees an array's items one after another"
        assert (self.lengths <= self.pieces.lengths).all(), "a block lies within its piece"
        object.__setattr__(self, "states", np.zeros(count, np.uint8))

    @property
    def was_read(self) -> NDArray[np.bool_]:
        """Pieces read so far, damaged blocks included."""
        read: NDArray[np.bool_] = self.states != CheckState.PENDING
        return read

    def tell(self) -> None:
        """Tell the listeners of progress."""
        for listener in self.listeners:
            listener()

    def run(self, rows: slice) -> NDArray[np.bool_]:
        """Check pieces just read; return for each whether the bytes match the tag. Releases the GIL."""
        at, lengths = self.pieces.memory_offsets[rows], self.lengths[rows]
        is_good = are_good(self.pieces.memory, at, lengths, self.seeds[rows], self.tags[rows])
        self.states[rows] = check_states(is_good)
        return is_good

    def receive(self, rows: slice) -> None:
        """Check blocks that have arrived, after zeroing the rest of each block's last page.

        So a block noted as GOOD has no foreign bytes behind the end. Releases the GIL.
        """
        _verify(
            self.pieces.memory,
            self.pieces.memory_offsets[rows],
            self.lengths[rows],
            self.seeds[rows],
            self.tags[rows],
            self.states[rows],
            in_pages=True,
        )


def _columns(
    offsets: NDArray[np.int64], lengths: NDArray[np.uint32], seeds: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint64]]:
    """Return the columns in C layout."""
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
