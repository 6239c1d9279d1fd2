"""SIEVE: a queue, a bit per block, and a hand that moves from old to young.

Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for
web caches", NSDI 2024, algorithm 1. The hand clears the bits of read blocks and evicts the first block with a
clear bit. Surviving blocks keep their place in the queue, so that new blocks are tested soon.
"""

from __future__ import annotations

from ostraca_cli.tools.replay.research.policy import Policy

_NONE = -1


class Sieve(Policy):
    """Linked list from old to young, by the blocks' neighbours."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._was_read: dict[int, bool] = {}
        self._older: dict[int, int] = {}
        self._younger: dict[int, int] = {}
        self._oldest = self._youngest = self._hand = _NONE

    def __len__(self) -> int:
        return len(self._was_read)

    def read(self, block: int) -> bool:
        """Set the block's bit."""
        if block not in self._was_read:
            return False
        self._was_read[block] = True
        return True

    def insert(self, block: int) -> None:
        """Insert at the young end."""
        if len(self._was_read) >= self.capacity_blocks:
            self._evict()
        self._was_read[block] = False
        self._older[block], self._younger[block] = self._youngest, _NONE
        if self._youngest == _NONE:
            self._oldest = block
        else:
            self._younger[self._youngest] = block
        self._youngest = block

    def _evict(self) -> None:
        block = self._hand if self._hand != _NONE else self._oldest
        while self._was_read[block]:
            self._was_read[block] = False
            younger = self._younger[block]
            block = younger if younger != _NONE else self._oldest
        older, self._hand = self._older.pop(block), self._younger.pop(block)
        del self._was_read[block]
        if older == _NONE:
            self._oldest = self._hand
        else:
            self._younger[older] = self._hand
        if self._hand == _NONE:
            self._youngest = older
        else:
            self._older[self._hand] = older
