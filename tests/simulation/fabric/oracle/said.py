"""What owners have said that they have: under one owner epoch no EXISTS and no HIT is contradicted.

It makes no difference who put it, nor whether anybody was told that it is committed: an owner may have died
between the write that lists a block and its word, and what its successor finds then must stay as well. Until
an owner lets go of a block, as it is old, or found damaged, its index lists it; and of what it has committed
itself the put that it was, which no earlier owner's takes the place of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from tests.simulation.shard.model import ViolationError

from ostraca_fabric.model.outcome import PutState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from tests.simulation.fabric.oracle.oracle import Oracle

    from ostraca_dpu_agent.shards.core import Allocations, ShardCore

_ONLY_FOUND = b""


class Said:
    """One history's, by owner: each core is one of one shard, under one epoch."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._of: WeakKeyDictionary[ShardCore, dict[bytes, bytes]] = WeakKeyDictionary()
        """By key: the tag, where the owner has committed the block itself."""

    def looked_up(self, core: ShardCore, keys: NDArray[np.uint8], found: NDArray[np.bool_]) -> None:
        """Note an owner's answer to a look-up; unpromised blocks may exist all the same."""
        is_there = core.index.find(keys) >= 0
        self._answered(core, keys[found & is_there], keys[~found & ~is_there])

    def reserved(self, core: ShardCore, keys: NDArray[np.uint8], made: Allocations) -> None:
        """Note an owner's answer to a put: the owner lacks the blocks that it gives space.

        That very space may have taken the place of what EXISTS.
        """
        exists = (made.states == PutState.EXISTS) & (core.index.find(keys) >= 0)
        self._answered(core, keys[exists], keys[made.states == PutState.STAGED])

    def committed(self, core: ShardCore, keys: NDArray[np.uint8], tags: NDArray[np.uint8]) -> None:
        """Note that an owner called blocks committed, except blocks removed since."""
        rows = core.index.find(keys)
        is_there = (rows >= 0) & (core.index.tags(rows) == tags).all(axis=1)
        committed = zip(_each(keys[is_there]), _each(tags[is_there]), strict=True)
        self._of.setdefault(core, {}).update(committed)

    def gone(self, core: ShardCore, keys: NDArray[np.uint8]) -> None:
        """Note that an owner has removed blocks."""
        said = self._of.get(core, {})
        for key in _each(keys):
            said.pop(key, None)

    def check(self, core: ShardCore, *, is_last: bool) -> None:
        """Look at all that an owner has said. *is_last*: no later one's puts may be what it has adopted."""
        said = self._of.get(core)
        if not said:
            return
        rows = core.index.find(rows_of(said))
        tags = _each(core.index.tags(rows))
        for (key, own), row, tag in zip(said.items(), rows.tolist(), tags, strict=True):
            if row < 0:
                raise ViolationError(f"{self._named(core, key)}, and is not listed any more")
            if is_last and own not in (_ONLY_FOUND, tag):
                raise ViolationError(
                    f"{self._named(core, key)} as committed, and another put of it is listed"
                )

    def _answered(self, core: ShardCore, has: NDArray[np.uint8], lacks: NDArray[np.uint8]) -> None:
        said = self._of.setdefault(core, {})
        for key in _each(has):
            said.setdefault(key, _ONLY_FOUND)
        for key in _each(lacks):
            if key in said:
                raise ViolationError(f"{self._named(core, key)}, and is denied now")

    def _named(self, core: ShardCore, key: bytes) -> str:
        numbers = self._oracle.numbers_of(rows_of([key]))
        return f"block {numbers} was said to be in {core.superblock.shard}, epoch {core.epoch}"


def rows_of(keys: Iterable[bytes]) -> NDArray[np.uint8]:
    """Return keys as a column."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)


def _each(rows: NDArray[np.uint8]) -> list[bytes]:
    return [row.tobytes() for row in rows]
