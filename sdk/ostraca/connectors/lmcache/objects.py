"""Objects of LMCache, and the blocks that hold an object.

The hash of a block commits to every fact of the object's name and layout. So bytes of another model, rank,
group, salt, size, type or shape are a miss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca.connectors.kv_identity.chains import Run, unordered_chain

HASH_BYTES = 32


class ObjectName(NamedTuple):
    """Name of an object, the fields of LMCache's ``ObjectKey``."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str

    def family(self) -> tuple[str, int, int]:
        """Return model, rank and group: objects of one family have one layout."""
        return self.model_name, self.kv_rank, self.object_group_id


class ObjectLayout(NamedTuple):
    """Layout of an object."""

    size_bytes: int
    form: str
    """Shapes and types of the object's tensors."""


class L2Object(NamedTuple):
    """Object in LMCache's memory."""

    layout: ObjectLayout
    memory: NDArray[np.uint8]


def block_hashes(name: ObjectName, layout: ObjectLayout, block_bytes: int) -> list[bytes]:
    """Return the hashes of the blocks that hold an object, in order."""
    facts = msgspec.msgpack.encode((name, layout, block_bytes))
    root = hashlib.blake2b(facts, digest_size=HASH_BYTES, person=b"ostraca-lmcache")
    hashes = []
    for number in range(-(-layout.size_bytes // block_bytes)):
        block = root.copy()
        block.update(number.to_bytes(4, "big"))
        hashes.append(block.digest())
    return hashes


def blocks_of(memory: NDArray[np.uint8], block_bytes: int) -> list[NDArray[np.uint8]]:
    """Cut an object's memory into blocks, without a copy."""
    return [memory[begin : begin + block_bytes] for begin in range(0, len(memory), block_bytes)]


def run_of(hashes: Sequence[bytes]) -> list[Run]:
    """Return the run of these blocks, each placed by its own hash; empty without blocks.

    LMCache gives neither the order nor the positions of stored objects.
    """
    return [Run(unordered_chain(hashes), tuple(hashes))] if hashes else []


class LayoutTable:
    """Layouts of objects by family, as last seen. Bounded: the oldest entries leave first.

    LMCache's description of a lookup may differ from the objects, for example under its serializers.
    """

    def __init__(self, *, entries_max: int) -> None:
        self._entries_max = entries_max
        self._layouts: dict[tuple[str, int, int], ObjectLayout] = {}

    def learn(self, name: ObjectName, layout: ObjectLayout) -> None:
        """Note the layout of an object."""
        family = name.family()
        self._layouts.pop(family, None)
        self._layouts[family] = layout
        if len(self._layouts) > self._entries_max:
            del self._layouts[next(iter(self._layouts))]

    def layout_of(self, name: ObjectName) -> ObjectLayout | None:
        """Return the layout of an object; None if no object of the family was seen."""
        return self._layouts.get(name.family())
