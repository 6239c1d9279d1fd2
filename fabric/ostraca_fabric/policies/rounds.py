"""Rounds: items that are looked at again and again, in turn and at a bounded rate. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Rounds(Generic[_Item]):
    """Items in turn, each of some size. Not thread-safe."""

    def __init__(self, *, round_s: float, rate_per_s: float) -> None:
        """Begin without items. A round takes *round_s*, or longer if *rate_per_s* allows no more."""
        self._round_s = round_s
        self._rate_per_s = rate_per_s
        self._items: deque[_Item] = deque()

    def add(self, item: _Item) -> None:
        """Add an item at the end of the round."""
        self._items.append(item)

    def take_due(self, size: Callable[[_Item], int], *, most: int, total: int) -> tuple[list[_Item], float]:
        """Return the next items, of *most* in size or one more, and the time until the next turn.

        Items without size are dropped. *total* is the size of all items.
        """
        due: list[_Item] = []
        taken = 0
        for _ in range(len(self._items)):
            item = self._items.popleft()
            if its := size(item):
                due.append(item)
                taken += its
            if taken >= most:
                break
        self._items.extend(due)
        pause_s = max(self._round_s / max(total, taken, 1), 1 / self._rate_per_s) * taken
        return due, pause_s or self._round_s
