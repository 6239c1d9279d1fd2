"""S3-FIFO: three queues, of which a small one takes what is new and lets most of it go.

Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1. New
blocks enter the *small* queue, a tenth of the capacity. What leaves it was read twice or more, and then goes
to the *main* queue, or is evicted, and its number is kept in the *ghost* queue, which remembers as many as
the main queue holds. A block whose number is there enters main. Main gives each read, up to three, another
round.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from ostraca.cli.replay.policies.policy import Policy

_SMALL_SHARE = 10
_READS_MAX = 3
_READS_TO_STAY = 2


class S3Fifo(Policy):
    """Small, main and ghost."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._small_max = max(1, capacity_blocks // _SMALL_SHARE)
        self._ghosts_max = max(1, capacity_blocks - self._small_max)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._reads: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._reads)

    def read(self, block: int) -> bool:
        """Count the read."""
        reads = self._reads.get(block)
        if reads is None:
            return False
        self._reads[block] = min(_READS_MAX, reads + 1)
        return True

    def insert(self, block: int) -> None:
        """Enter small, or main where the block was there not long ago."""
        while len(self._reads) >= self.capacity_blocks:
            self._evict()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main.append(block)
        else:
            self._small.append(block)
        self._reads[block] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._small_max or not self._main:
            self._evict_of_small()
        else:
            self._evict_of_main()

    def _evict_of_small(self) -> None:
        block = self._small.popleft()
        if self._reads[block] >= _READS_TO_STAY:
            self._reads[block] = 0
            self._main.append(block)
            return
        del self._reads[block]
        self._ghosts[block] = None
        if len(self._ghosts) > self._ghosts_max:
            self._ghosts.popitem(last=False)

    def _evict_of_main(self) -> None:
        block = self._main.popleft()
        if self._reads[block]:
            self._reads[block] -= 1
            self._main.append(block)
        else:
            del self._reads[block]
