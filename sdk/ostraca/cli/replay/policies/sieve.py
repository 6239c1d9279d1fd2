"""SIEVE: one queue, one bit per block, and a hand that walks from old to young.

Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for
web caches", NSDI 2024, algorithm 1. The hand clears the bit of what was read and evicts the first block whose
bit is clear; what stays keeps its place in the queue, so that new blocks are tested soon.
"""

from __future__ import annotations

from ostraca.cli.replay.policies.policy import Policy

_NOBODY = -1


class Sieve(Policy):
    """A list from old to young, by the blocks' neighbours."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._was_read: dict[int, bool] = {}
        self._older: dict[int, int] = {}
        self._younger: dict[int, int] = {}
        self._oldest = self._youngest = self._hand = _NOBODY

    def __len__(self) -> int:
        return len(self._was_read)

    def read(self, block: int) -> bool:
        """Set the block's bit."""
        if block not in self._was_read:
            return False
        self._was_read[block] = True
        return True

    def insert(self, block: int) -> None:
        """Enter at the young end."""
        if len(self._was_read) >= self.capacity_blocks:
            self._evict()
        self._was_read[block] = False
        self._older[block], self._younger[block] = self._youngest, _NOBODY
        if self._youngest == _NOBODY:
            self._oldest = block
        else:
            self._younger[self._youngest] = block
        self._youngest = block

    def _evict(self) -> None:
        block = self._hand if self._hand != _NOBODY else self._oldest
        while self._was_read[block]:
            self._was_read[block] = False
            younger = self._younger[block]
            block = younger if younger != _NOBODY else self._oldest
        older, self._hand = self._older.pop(block), self._younger.pop(block)
        del self._was_read[block]
        if older == _NOBODY:
            self._oldest = self._hand
        else:
            self._younger[older] = self._hand
        if self._hand == _NOBODY:
            self._youngest = older
        else:
            self._older[self._hand] = older
