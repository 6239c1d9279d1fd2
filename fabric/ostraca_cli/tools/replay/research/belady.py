"""Belady's MIN: evicts the block with the latest next request. No policy hits more.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
The policy knows the future. Blocks of a request count as requested at the same time. A new block that would
be the first eviction is neither admitted nor written. Belady's MIN therefore also bounds policies with
admission, provided that no request names a block twice.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np

from ostraca_cli.tools.replay.research.policy import Policy
from ostraca_cli.tools.replay.trace import Trace


class Belady(Policy):
    """Eviction by the next request of a block."""

    def __init__(self, capacity_blocks: int, trace: Trace) -> None:
        """Prepare for the requests of *trace*, to be replayed in order from the first."""
        super().__init__(capacity_blocks)
        self._next_requests = _next_requests(trace)
        self._at = 0
        self._new: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._latest: list[tuple[int, int, int]] = []
        """Heap of (-next request, -push number, block). On equal requests the newest goes first, as the block
        may be unwritten."""

        self._pushed = 0
        self._inserted: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def read(self, block: int) -> bool:
        """Record the next request of the block."""
        # For a block named twice in a request, the last position counts.
        self._new[block] = self._next_requests[self._at]
        self._at += 1
        if block not in self._held:
            return False
        self._hold(block)
        return True

    def insert(self, block: int) -> None:
        """Hold the block until the end of the request."""
        if block not in self._held:
            self._inserted.add(block)
        self._hold(block)

    def end_request(self) -> int:
        """Keep the blocks with the earliest next requests."""
        not_written = 0
        while len(self._held) > self.capacity_blocks:
            asked, _, block = heapq.heappop(self._latest)
            if self._held.get(block) == -asked:
                del self._held[block]
                not_written += block in self._inserted
        self._new.clear()
        self._inserted.clear()
        return not_written

    def _hold(self, block: int) -> None:
        self._held[block] = self._new[block]
        self._pushed += 1
        heapq.heappush(self._latest, (-self._new[block], -self._pushed, block))


def _next_requests(trace: Trace) -> list[int]:
    """Return, by position in ``trace.blocks``, the next request of the same block.

    The value is ``len(trace)`` without a next request.
    """
    requests = np.repeat(np.arange(len(trace)), np.diff(trace.bounds)).tolist()
    following = [len(trace)] * len(requests)
    order = np.argsort(trace.blocks, kind="stable")
    blocks = trace.blocks[order].tolist()
    for place, (here, after) in enumerate(pairwise(order.tolist())):
        if blocks[place] == blocks[place + 1]:
            following[here] = requests[after]
    return following
