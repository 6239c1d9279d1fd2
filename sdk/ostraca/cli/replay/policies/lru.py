"""LRU: evicts the block that was not asked for the longest.

The oldest of all, and what every other is compared with (Mattson, Gecsei, Slutz, Traiger, "Evaluation
techniques for storage hierarchies", IBM Systems Journal 9(2), 1970).
"""

from __future__ import annotations

from collections import OrderedDict

from ostraca.cli.replay.policies.policy import Policy


class Lru(Policy):
    """Least recently used."""

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
