"""The ghost filter: which blocks were here before, in bounded memory.

Two generations of a Bloom filter. Keys enter the *current* one; when it has taken as many as it is made for,
it becomes the *previous* one, and what that held is forgotten. So a key is known until ``capacity`` others,
at least, have entered since its last touch, and twice as many at most.

A key enters only ``retry_s`` after its touch: until then it waits in a queue, by itself. So a writer that is
declined and tries again at once has not touched the block a second time.

At 12 bits for each key and 8 hashes a full generation takes 1.5 bytes for each key and claims to know 0.31 %
of keys it has never seen, ``(1 - e**(-8/12))**8``; both generations 0.63 % at most. Such a block is written
on its first touch: 0.63 % too many writes, and nothing wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.key_table import first_of_each
from ostraca_fabric.keys import KEY_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

BITS_PER_KEY = 12
_HASHES = 8
_WORD_BITS = 64
_WAITING_SHARE = 4
"""One part in so many of the memory holds touches that are not old enough to count."""

_WAITING_BYTES = KEY_BYTES + 8
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Odd constants of the splitmix64 generator: whatever keys have in common, their hashes do not."""


class GhostFilter:
    """Remembers touches of blocks."""

    def __init__(self, memory_bytes: int, *, retry_s: float) -> None:
        """Remember as much as *memory_bytes* hold, taken at once; at least 4096."""
        waiting_bytes = memory_bytes // _WAITING_SHARE
        words = (memory_bytes - waiting_bytes) // 2 // 8
        self._retry_s = retry_s
        self._current = np.zeros(words, np.uint64)
        self._previous = np.zeros(words, np.uint64)
        self._entered = 0
        waiting = waiting_bytes // _WAITING_BYTES
        self._waiting_keys = np.zeros((waiting, KEY_BYTES), np.uint8)
        self._waiting_since_s = np.zeros(waiting)
        self._first, self._waits = 0, 0
        self.capacity = words * _WORD_BITS // BITS_PER_KEY
        """Keys that one generation takes."""

    @property
    def memory_bytes(self) -> int:
        """What the filter takes, whatever it remembers."""
        arrays = (self._current, self._previous, self._waiting_keys, self._waiting_since_s)
        return sum(array.nbytes for array in arrays)

    def touch(self, now_s: float, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Remember a touch of these keys, shape (n, 16), each named once; say which were touched before,
        ``retry_s`` ago or earlier.

        Touches that come faster than the queue can hold count earlier than that, the oldest first.
        """
        self._take_in(now_s - self._retry_s)
        places = self._places(keys)
        is_current = _has(self._current, places)
        is_known = is_current | _has(self._previous, places)
        self._enter(places[is_known & ~is_current])
        if self._retry_s > 0:
            self._wait(now_s, keys[~is_known])
        else:
            self._enter(places[~is_known])
        return is_known

    def _take_in(self, until_s: float) -> None:
        """Enter what was touched by then."""
        if not self._waits or self._waiting_since_s[self._first] > until_s:
            return
        rows = (self._first + np.arange(self._waits)) % len(self._waiting_keys)
        self._enter_waiting(int(np.searchsorted(self._waiting_since_s[rows], until_s, side="right")))

    def _wait(self, now_s: float, keys: NDArray[np.uint8]) -> None:
        room = len(self._waiting_keys)
        for begin in range(0, len(keys), room):
            part = keys[begin : begin + room]
            self._enter_waiting(max(0, self._waits + len(part) - room))
            rows = (self._first + self._waits + np.arange(len(part))) % room
            self._waiting_keys[rows] = part
            self._waiting_since_s[rows] = now_s
            self._waits += len(part)

    def _enter_waiting(self, count: int) -> None:
        """Enter the first of those that wait."""
        if not count:
            return
        rows = (self._first + np.arange(count)) % len(self._waiting_keys)
        self._first = (self._first + count) % len(self._waiting_keys)
        self._waits -= count
        keys = self._waiting_keys[rows]
        self._enter(self._places(keys[first_of_each(keys)]))

    def _enter(self, places: NDArray[np.uint64]) -> None:
        """Enter keys, each named once, beginning a generation whenever one is full."""
        while len(places):
            new = places[~_has(self._current, places)]
            part, places = new[: self.capacity - self._entered], new[self.capacity - self._entered :]
            bits = np.uint64(1) << (part & np.uint64(_WORD_BITS - 1))
            np.bitwise_or.at(self._current, (part >> np.uint64(6)).astype(np.intp), bits)
            self._entered += len(part)
            if self._entered >= self.capacity:
                self._previous, self._current = self._current, self._previous
                self._current[:] = 0
                self._entered = 0

    def _places(self, keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """Return the bits of each key, shape (n, 8): two hashes, and what they make by double hashing."""
        halves = np.ascontiguousarray(keys).view(np.uint64)
        mixed = halves[:, 0] * _MIX[0] + halves[:, 1]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[1]
        start = mixed ^ (mixed >> np.uint64(27))
        step = (start * _MIX[2]) ^ (halves[:, 1] * _MIX[0] >> np.uint64(31))
        step = (step ^ (step >> np.uint64(29))) | np.uint64(1)
        order = np.arange(_HASHES, dtype=np.uint64)
        places: NDArray[np.uint64] = (start[:, None] + order * step[:, None]) % np.uint64(
            len(self._current) * _WORD_BITS
        )
        return places


def _has(generation: NDArray[np.uint64], places: NDArray[np.uint64]) -> NDArray[np.bool_]:
    words = generation[(places >> np.uint64(6)).astype(np.intp)]
    is_set = (words >> (places & np.uint64(_WORD_BITS - 1))) & np.uint64(1)
    return np.asarray(is_set.all(axis=1), np.bool_)
