"""Belady's MIN: knows the future, and evicts what is asked for the latest from now. No policy hits more.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
Blocks of one request are asked for at once, and a new block that would have to go first is not taken at all,
nor written: so it bounds policies with admission, too (where no request names a
block twice).
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np

from ostraca.cli.replay.policies.policy import Policy
from ostraca.cli.replay.trace import Trace


class Belady(Policy):
    """Evicts by the next request that asks for a block."""

    def __init__(self, capacity_blocks: int, trace: Trace) -> None:
        """Requests must come in the order of *trace*, from its first."""
        super().__init__(capacity_blocks)
        self._next_asked = _next_asked(trace)
        self._at = 0
        self._new: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._latest: list[tuple[int, int, int]] = []
        """Of blocks asked for at the same time the newest goes first: it may not have been written yet."""

        self._pushed = 0
        self._inserted: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def read(self, block: int) -> bool:
        """Learn when the block is asked for next."""
        # A block that is named twice in one request is asked for next when its last place says.
        self._new[block] = self._next_asked[self._at]
        self._at += 1
        if block not in self._held:
            return False
        self._hold(block)
        return True

    def insert(self, block: int) -> None:
        """Take it for now."""
        if block not in self._held:
            self._inserted.add(block)
        self._hold(block)

    def end_request(self) -> int:
        """Keep those that are asked for the soonest."""
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


def _next_asked(trace: Trace) -> list[int]:
    """Return for each place of ``trace.blocks`` the next request that names its block, or one past all."""
    requests = np.repeat(np.arange(len(trace)), np.diff(trace.bounds)).tolist()
    following = [len(trace)] * len(requests)
    order = np.argsort(trace.blocks, kind="stable")
    blocks = trace.blocks[order].tolist()
    for place, (here, after) in enumerate(pairwise(order.tolist())):
        if blocks[place] == blocks[place + 1]:
            following[here] = requests[after]
    return following
