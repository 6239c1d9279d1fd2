"""Hash seeds of engines that share a volume.

Engines with seeded hashes find each other's blocks only under one seed. A block under a name common to all
engines holds the digest of the first engine's seed, so that another engine notices a different seed.
"""

from __future__ import annotations

import hashlib

from ostraca.connectors.kv_identity.chains import unordered_chain
from ostraca.volume import Volume

VARIABLE = "PYTHONHASHSEED"

_DEADLINE_S = 2.0
_DIGEST_BYTES = 16
_NAME = b"ostraca hash seed"


def other_seed_problem(volume: Volume, seed: str) -> str:
    """Return why other engines of *volume* and this engine share nothing, and a remedy.

    Empty if the seeds are equal, or if the fabric does not answer in 4 s.
    """
    name = hashlib.blake2b(_NAME, digest_size=volume.layout.hash_bytes).digest()
    own = hashlib.blake2b(seed.encode(), digest_size=_DIGEST_BYTES).digest()
    found, chain = bytearray(_DIGEST_BYTES), unordered_chain([name])
    volume.put(chain, source=[own], deadline_s=_DEADLINE_S)  # the first put wins
    if not volume.get(chain, into=[found], deadline_s=_DEADLINE_S).prefix or found == own:
        return ""
    return (
        f"another engine has begun volume {volume.name} with another {VARIABLE} or hash algorithm: such "
        f"engines find none of each other's blocks. Set {VARIABLE} to the same number everywhere. If all are "
        "equal now, a new revision, and so a new volume, ends this warning"
    )
