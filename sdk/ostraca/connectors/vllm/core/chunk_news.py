"""News of chunks for routers: chunks stored, and chunks found missing.

An engine hears of an eviction only by asking: a lookup of an announced chunk withdraws the announcement if
the fabric has the chunk no longer. The next store of the chunk announces the chunk again. A lookup overtaken
by a store may withdraw a stored chunk: the engine loses credit at the router, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class ChunkEvent(NamedTuple):
    """News for routers: chunks stored, or found missing."""

    keys: tuple[bytes, ...]
    is_removed: bool


class ChunkNews:
    """Unsent news, and the announced chunks, bounded: beyond the bound, the oldest are forgotten.

    Only a failed load withdraws a forgotten chunk.
    """

    def __init__(self, *, announced_max: int) -> None:
        self._announced_max = announced_max
        self._announced: dict[bytes, None] = {}
        self._events: list[ChunkEvent] = []

    def announce(self, keys: Sequence[bytes]) -> None:
        """Announce stored chunks."""
        if not keys:
            return
        self._events.append(ChunkEvent(tuple(keys), is_removed=False))
        for key in keys:
            self._announced.pop(key, None)
            self._announced[key] = None
        while len(self._announced) > self._announced_max:
            del self._announced[next(iter(self._announced))]

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Withdraw chunks that a load has found missing, announced or not."""
        if not keys:
            return
        self._events.append(ChunkEvent(tuple(keys), is_removed=True))
        for key in keys:
            self._announced.pop(key, None)

    def withdraw_announced(self, keys: Iterable[bytes]) -> None:
        """Withdraw those of the missing chunks that stand announced."""
        self.withdraw([key for key in keys if key in self._announced])

    def take(self) -> list[ChunkEvent]:
        """Return the news since the last call, in order."""
        events, self._events = self._events, []
        return events
