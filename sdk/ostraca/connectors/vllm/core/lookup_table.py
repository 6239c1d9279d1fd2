"""Lookup table: state of the chunks that requests look up.

vLLM looks up each chunk of a waiting request at every step, until the answer is yes or no. A state lasts as
long as its request, so each request sends one lookup per chunk. Concurrent requests for the same chunk share
one lookup.

After a failed load, a chunk is a miss for its request until the request's end. Otherwise the scheduler would
find and load the chunk again, forever. If the chunk itself was at fault, the chunk is a miss for all other
requests too, for a while (``FailedLoads``).

States of a chunk, for one request::

    (unknown) --lookup--> pending --answer--> present | missing
                            +-- deadline over --> missing
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from ostraca.connectors.transfers.failed_loads import FailedLoads


class ChunkState(Enum):
    """State of a chunk for a request."""

    PRESENT = auto()
    MISSING = auto()
    PENDING = auto()
    """Look up again: the answer is under way."""
    TABLE_FULL = auto()
    """The table is full: treated as missing, and not remembered."""


class LookupTable:
    """Table of chunk states, bounded: chunks beyond the bound are misses."""

    def __init__(self, failed_loads: FailedLoads, *, entries_max: int) -> None:
        self._failed_loads = failed_loads
        self._entries_max = entries_max
        self._requests: dict[str, dict[bytes, bool | None]] = {}
        self._entries = 0
        self._pending: dict[bytes, tuple[float, set[str]]] = {}
        """Chunks in open lookups: end time, and waiting requests."""
        self._unsent: dict[str, list[bytes]] = {}

    def __len__(self) -> int:
        """Return the number of entries."""
        return self._entries

    def state_of(self, request: str, key: bytes, *, now_s: float, until_s: float) -> ChunkState:
        """Return the state; an unknown chunk is looked up, due at *until_s*."""
        table = self._requests.setdefault(request, {})
        if key in table:
            known = table[key]
            if known is None:
                return self._still_pending(table, key, now_s)
            return ChunkState.PRESENT if known else ChunkState.MISSING
        if self._entries >= self._entries_max:
            return ChunkState.TABLE_FULL
        self._entries += 1
        if self._failed_loads.holds(key, now_s):
            table[key] = False
            return ChunkState.MISSING
        table[key] = None
        waiting = self._pending.get(key)
        if waiting is None or waiting[0] <= now_s:
            self._pending[key] = (until_s, {request})
            self._unsent.setdefault(request, []).append(key)
        else:
            waiting[1].add(request)
        return ChunkState.PENDING

    def take_pending(self, blocks_max: int) -> list[tuple[str, list[bytes]]]:
        """Take the unsent lookups by request, at most *blocks_max* chunks.

        The rest stays.
        """
        taken: list[tuple[str, list[bytes]]] = []
        room = blocks_max
        for request in list(self._unsent):
            if not room:
                break
            keys = self._unsent[request]
            now, later = keys[:room], keys[room:]
            if later:
                self._unsent[request] = later
            else:
                del self._unsent[request]
            room -= len(now)
            taken.append((request, now))
        return taken

    def record_answers(self, answers: Iterable[tuple[bytes, bool]]) -> None:
        """Pass answers to all requests waiting for these chunks."""
        for key, is_there in answers:
            _, requests = self._pending.pop(key, (0.0, ()))
            for request in requests:
                table = self._requests.get(request)
                if table is not None and table.get(key, False) is None:
                    table[key] = is_there

    def record_failed_loads(self, request: str, keys: Iterable[bytes]) -> None:
        """Note failed loads: the request is to compute these chunks."""
        table = self._requests.get(request, {})
        for key in keys:
            if key in table:
                table[key] = False

    def forget(self, request: str) -> None:
        """Forget a request after its end."""
        table = self._requests.pop(request, {})
        self._entries -= len(table)
        unsent = self._unsent.pop(request, [])
        for key, known in table.items():
            if known is None and key in self._pending:
                self._pending[key][1].discard(request)
        for key in unsent:
            # Another request may wait for this unsent lookup.
            others = self._pending.get(key, (0.0, set()))[1]
            if others:
                self._unsent.setdefault(next(iter(others)), []).append(key)
            else:
                self._pending.pop(key, None)

    def _still_pending(self, table: dict[bytes, bool | None], key: bytes, now_s: float) -> ChunkState:
        until_s, _ = self._pending.get(key, (0.0, ()))
        if now_s < until_s:
            return ChunkState.PENDING
        self._pending.pop(key, None)
        table[key] = False
        return ChunkState.MISSING
