"""S3-FIFO: three queues; a small queue receives new blocks and drops most of them.

Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1. New
blocks enter the *small* queue, a tenth of the capacity. A block leaving *small* moves to the *main* queue
after two or more reads. Otherwise the block is evicted, and the *ghost* queue remembers its number. The ghost
queue has as many numbers as the main queue has blocks. A block with a number in the ghost queue enters
*main*. Each read, up to three, gives a block another round in *main*.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from ostraca_cli.tools.replay.research.policy import Policy

_SMALL_SHARE = 10
_READS_MAX = 3
_READS_TO_STAY = 2


class S3Fifo(Policy):
    """Small, main and ghost queues."""

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
        """Insert into *small*, or into *main* for a number in the ghost queue."""
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
