"""The DRAM cache: blocks kept in staging memory after they passed through.

Keys are derived under a volume's secret, so an entry answers its own tenant alone. Blocks are immutable, so
an entry is never stale. Least recently used entries go first; an entry in use by a transfer stays until that
has ended, however full the cache is. Pure bookkeeping: it owns slots, it does not know memory.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True)
class CachedBlock:
    """One block in the cache and where it lies."""

    key: bytes
    tag: bytes
    length: int
    offset: int
    """Of its staging slot."""

    slot_bytes: int
    users: int = 0
    """Transfers that read it now."""


class BlockCache:
    """Blocks by key, bounded in bytes of slots.

    ``put`` and ``shrink`` return slots (offset, slot_bytes) that are the caller's to free.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Begin empty; a limit of 0 keeps nothing."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._blocks: OrderedDict[bytes, CachedBlock] = OrderedDict()

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        """Whether the block is here; does not count as a use."""
        return key in self._blocks

    def take(self, key: bytes) -> CachedBlock | None:
        """Return a block and hold it until ``give_back``."""
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
            block.users += 1
        return block

    def give_back(self, blocks: Iterable[CachedBlock]) -> None:
        """End a use of each of these blocks."""
        for block in blocks:
            assert block.users > 0, "a cached block was given back twice"
            block.users -= 1

    def put(self, block: CachedBlock) -> list[tuple[int, int]]:
        """Keep a block, and return the slots this frees: the block's own when it is not kept."""
        if block.key in self._blocks or block.slot_bytes > self.limit_bytes:
            return [(block.offset, block.slot_bytes)]
        freed = self.shrink(self.limit_bytes - block.slot_bytes)
        if self.used_bytes + block.slot_bytes > self.limit_bytes:
            return [*freed, (block.offset, block.slot_bytes)]
        self._blocks[block.key] = block
        self.used_bytes += block.slot_bytes
        return freed

    def shrink(self, to_bytes: int) -> list[tuple[int, int]]:
        """Drop least recently used blocks until at most *to_bytes* are used, as far as none is in use."""
        freed = []
        while self.used_bytes > to_bytes:
            victim = next((block for block in self._blocks.values() if block.users == 0), None)
            if victim is None:
                break
            del self._blocks[victim.key]
            self.used_bytes -= victim.slot_bytes
            freed.append((victim.offset, victim.slot_bytes))
        return freed

    def check(self) -> None:
        """Assert what must hold after every call."""
        assert self.used_bytes == sum(block.slot_bytes for block in self._blocks.values())
        assert self.used_bytes <= self.limit_bytes
        assert all(block.users >= 0 for block in self._blocks.values())
