"""Keys: what an owner's index knows a block by, derived by agents only.

A volume's secret comes from the fabric key, and everything else from the volume's secret. So a key says
nothing about the tokens or the tenant it stands for to whoever lacks the fabric key, a tenant can't ask for
another's keys, and an erased volume's new incarnation shares no key with the old one. Secrets never leave the
agents; a worker needs none.

Every derivation is keyed BLAKE2b (RFC 7693, section 2.9) with the 16-byte personalisation of BLAKE2's
parameter block, a different one for each purpose. Fields of variable length are preceded by their length
(u32, little-endian), so that tenant ``a`` with volume ``bc`` and tenant ``ab`` with volume ``c`` have nothing
in common.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.chain import Span
from ostraca_fabric.errors import UsageError
from ostraca_fabric.ids import FabricId, TenantId
from ostraca_fabric.rows import blake2b_rows

FABRIC_KEY_BYTES = 32
SECRET_BYTES = 32
KEY_BYTES = 16
_RANK_AND_GROUP = struct.Struct("<II")


def volume_secret(fabric_key: bytes, *, tenant: TenantId, name: str, incarnation: int) -> bytes:
    """Return the 32-byte secret of one incarnation of a volume.

    Raises UsageError when the fabric key has not 32 bytes.
    """
    if len(fabric_key) != FABRIC_KEY_BYTES:
        raise UsageError(f"the fabric key has {len(fabric_key)} bytes: take {FABRIC_KEY_BYTES} random ones")
    fields = [tenant.encode(), name.encode(), struct.pack("<Q", incarnation)]
    message = b"".join(struct.pack("<I", len(field)) + field for field in fields)
    return blake2b(message, key=fabric_key, digest_size=SECRET_BYTES, person=b"ostraca-volume").digest()


def fabric_key_check(fabric_key: bytes, fabric: FabricId) -> str:
    """Return what tells whether somebody else has the same key of a fabric, and nothing else of it."""
    return blake2b(fabric, key=fabric_key, digest_size=KEY_BYTES, person=b"ostraca-check").hexdigest()


def placement_secret(secret: bytes) -> bytes:
    """Return the 32 bytes under which a volume's blocks are placed: the same for all ranks and groups."""
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
