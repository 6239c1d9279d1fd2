"""What a cache of the literature is, for the replay tool."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Policy(ABC):
    """A cache of at most *capacity_blocks* blocks.

    For each request, in order: ``read`` for every block of it, then ``insert`` for each that was not there.
    """

    def __init__(self, capacity_blocks: int) -> None:
        assert capacity_blocks > 0, "a cache holds one block at least"
        self.capacity_blocks = capacity_blocks

    @abstractmethod
    def __len__(self) -> int:
        """Count the blocks held."""

    @abstractmethod
    def read(self, block: int) -> bool:
        """Say whether a block is there, and remember that it was asked for."""

    @abstractmethod
    def insert(self, block: int) -> None:
        """Take a block that is not there, and evict others for it."""

    def end_request(self) -> int:
        """Make room where that waits until here; return how many inserted blocks were not written."""
        return 0
