"""Interface of a cache of the literature, and LRU, the common baseline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict


class Policy(ABC):
    """Cache of at most *capacity_blocks* blocks.

    For each request, in order: call ``read`` for every block, then ``insert`` for each missing block.
    """

    def __init__(self, capacity_blocks: int) -> None:
        assert capacity_blocks > 0, "a cache holds at least 1 block"
        self.capacity_blocks = capacity_blocks

    @abstractmethod
    def __len__(self) -> int:
        """Count the blocks held."""

    @abstractmethod
    def read(self, block: int) -> bool:
        """Return whether a block is held, and record the request."""

    @abstractmethod
    def insert(self, block: int) -> None:
        """Insert a missing block, and evict others as needed."""

    def end_request(self) -> int:
        """Finish deferred evictions; return the number of inserted but unwritten blocks."""
        return 0


class Lru(Policy):
    """Eviction of the least recently requested block.

    Mattson, Gecsei, Slutz, Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal
    9(2), 1970.
    """

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def read(self, block: int) -> bool:
        """Move the block to the young end."""
        if block not in self._held:
            return False
        self._held.move_to_end(block)
        return True

    def insert(self, block: int) -> None:
        """Evict from the old end."""
        if len(self._held) >= self.capacity_blocks:
            self._held.popitem(last=False)
        self._held[block] = None
