"""What is known of the chunks that requests have asked for.

vLLM asks for each chunk of a waiting request, again at every step, until the answer is yes or no. A *verdict*
is kept for as long as its request lives, so that one chunk is asked for once per request. Requests that ask
for the same chunk at the same time share one question.

A chunk whose load failed is a miss for its request as long as that lives. Otherwise the scheduler, told again
that the chunk is there, would load it again, for ever. When the chunk itself was at fault, it is a miss for
every other request, too, for ``failed_hold_s``.

States of a chunk, for one request::

    (not known) --ask--> asked --answered--> there | missing
                           +-- its time is over --> missing
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Verdict(Enum):
    """What a request is told about a chunk."""

    THERE = auto()
    MISSING = auto()
    ASKED = auto()
    """Ask again: the answer is on its way."""
    FULL = auto()
    """The table is full: taken for missing, and not remembered."""


class Verdicts:
    """The table. It is bounded: what does not fit is a miss."""

    def __init__(self, *, entries_max: int, failed_max: int, failed_hold_s: float) -> None:
        self._entries_max = entries_max
        self._failed_max = failed_max
        self._failed_hold_s = failed_hold_s
        self._requests: dict[str, dict[bytes, bool | None]] = {}
        self._entries = 0
        self._asked: dict[bytes, tuple[float, set[str]]] = {}
        """Chunks that are being asked for: until when, and by which requests."""
        self._unsent: dict[str, list[bytes]] = {}
        self._failed: dict[bytes, float] = {}
        """Chunks whose load failed, and until when nobody tries again; oldest first."""

    def __len__(self) -> int:
        """Count the entries."""
        return self._entries

    def of(self, request: str, key: bytes, *, now_s: float, until_s: float) -> Verdict:
        """Return what is known; when nothing is, the chunk is asked for, with an answer due at *until_s*."""
        table = self._requests.setdefault(request, {})
        if key in table:
            known = table[key]
            if known is None:
                return self._still_asked(table, key, now_s)
            return Verdict.THERE if known else Verdict.MISSING
        if self._entries >= self._entries_max:
            return Verdict.FULL
        self._entries += 1
        if self._has_failed(key, now_s):
            table[key] = False
            return Verdict.MISSING
        table[key] = None
        waiting = self._asked.get(key)
        if waiting is None or waiting[0] <= now_s:
            self._asked[key] = (until_s, {request})
            self._unsent.setdefault(request, []).append(key)
        else:
            waiting[1].add(request)
        return Verdict.ASKED

    def take_questions(self, blocks_max: int) -> list[tuple[str, list[bytes]]]:
        """Take what has to be asked now, by request, at most *blocks_max* chunks; the rest stays."""
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

    def answered(self, answers: Iterable[tuple[bytes, bool]]) -> None:
        """Tell every request that waits for one of these chunks whether it is there."""
        for key, is_there in answers:
            _, requests = self._asked.pop(key, (0.0, ()))
            for request in requests:
                table = self._requests.get(request)
                if table is not None and table.get(key, False) is None:
                    table[key] = is_there

    def failed(self, request: str, keys: Iterable[bytes]) -> None:
        """Loading these did not succeed: the request is to compute them."""
        table = self._requests.get(request, {})
        for key in keys:
            if key in table:
                table[key] = False

    def hold(self, keys: Iterable[bytes], now_s: float) -> None:
        """These were said to be there and were not, or did not verify: no request tries them for a while."""
        for key in keys:
            self._failed.pop(key, None)
            self._failed[key] = now_s + self._failed_hold_s
        while len(self._failed) > self._failed_max:
            del self._failed[next(iter(self._failed))]

    def forget(self, request: str) -> None:
        """The request is over."""
        table = self._requests.pop(request, {})
        self._entries -= len(table)
        unsent = self._unsent.pop(request, [])
        for key, known in table.items():
            if known is None and key in self._asked:
                self._asked[key][1].discard(request)
        for key in unsent:
            # Another request may wait for the question that this one would have asked.
            others = self._asked.get(key, (0.0, set()))[1]
            if others:
                self._unsent.setdefault(next(iter(others)), []).append(key)
            else:
                self._asked.pop(key, None)

    def _still_asked(self, table: dict[bytes, bool | None], key: bytes, now_s: float) -> Verdict:
        until_s, _ = self._asked.get(key, (0.0, ()))
        if now_s < until_s:
            return Verdict.ASKED
        self._asked.pop(key, None)
        table[key] = False
        return Verdict.MISSING

    def _has_failed(self, key: bytes, now_s: float) -> bool:
        until_s = self._failed.get(key)
        if until_s is None:
            return False
        if now_s < until_s:
            return True
        del self._failed[key]
        return False
