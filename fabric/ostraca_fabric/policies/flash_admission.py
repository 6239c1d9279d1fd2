"""Admission control for flash: choice of blocks worth the flash's life.

The second put of a block proves reuse: such a block is admitted while any budget remains. A block seen for
the first time is admitted by *depth*, the number of earlier blocks in the chain, up to a limit. The limit
falls with the budget's level. With scarce flash, the ends of long prompts are declined. Ends are reused
least, and prefix readers lose no blocks before the end. Random omissions would cost a reader all later
blocks.

The limit is the same for all blocks of one decision. The limit is also similar on all shards of a chain,
because placement gives each shard the same load for its size. A block without chain or of unknown depth
counts as infinitely deep.

Ghost filter: memory of recently named blocks, of bounded size.

Two generations of a Bloom filter. Keys enter the *current* generation. A full current generation becomes the
*previous* one, and the old previous generation is forgotten. A key is remembered until at least ``capacity``
and at most twice as many other keys have entered since its last touch.

A key enters only ``retry_s`` after its touch, and waits in a queue until then. So an immediate retry after a
decline is no second touch of the block.

With 12 bits per key and 8 hashes a full generation takes 1.5 bytes per key. Its false-positive rate is 0.31
%, ``(1 - e**(-8/12))**8``; both generations have at most 0.63 %. A false positive is written on its first
touch: 0.63 % excess writes, and no other harm.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.chain import DEPTH_UNKNOWN
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.tables.digests import KEY_BYTES
from ostraca_fabric.tables.key_table import first_of_each

__all__ = ["DEPTH_ANY", "DEPTH_UNKNOWN", "FlashAdmission"]

DEPTH_ANY = 1 << 32
"""Limit that admits every depth."""

_PLENTY_SHARE = 0.9
"""Part of the burst above which every block is admitted. Below 1, because a full bucket is no longer full
after the first write."""


class ByteBudget(Protocol):
    """Budget that pays for writes."""

    @property
    def burst_bytes(self) -> float:
        """Largest saved budget."""
        ...

    def level_at(self, now_s: float) -> float:
        """Return the bytes that may be written now."""
        ...


class FlashAdmission:
    """Admission of batches of blocks to one shard."""

    def __init__(
        self,
        budget: ByteBudget,
        ghost: GhostFilter,
        *,
        first_touch_reserve: float,
        half_way_blocks: int,
    ) -> None:
        """Use *budget* and *ghost*; the other arguments are as in ``EnduranceSettings``."""
        self._budget = budget
        self._ghost = ghost
        self._reserve_share = first_touch_reserve
        self._plenty_share = max(_PLENTY_SHARE, (1 + first_touch_reserve) / 2)
        self._half_way_blocks = half_way_blocks

    def decide(
        self,
        now_s: float,
        keys: NDArray[np.uint8],
        stored_bytes: NDArray[np.int64],
        depths: NDArray[np.uint32],
        *,
        budget: ByteBudget | None = None,
    ) -> NDArray[np.uint8]:
        """Return a Reason for each block: NONE if admitted, else BUDGET or ADMISSION.

        *keys*: shape (n, 16), all different; *stored_bytes*: size of each block on flash; *budget*: replaces
        the default budget. Spends nothing: the caller spends the bytes then written.
        """
        budget = budget or self._budget
        level_bytes, burst_bytes = budget.level_at(now_s), budget.burst_bytes
        is_second = self._ghost.touch(now_s, keys)
        reasons = np.full(len(keys), Reason.ADMISSION, np.uint8)
        second = np.flatnonzero(is_second)
        is_paid = _before(stored_bytes[second]) < level_bytes
        reasons[second] = np.where(is_paid, Reason.NONE, Reason.BUDGET)
        level_bytes -= float(stored_bytes[second[is_paid]].sum())
        near = np.flatnonzero(~is_second & (depths < self.depth_limit(level_bytes, burst_bytes)))
        near = near[np.argsort(depths[near], kind="stable")]
        is_paid = _before(stored_bytes[near]) < level_bytes - self._reserve_share * burst_bytes
        reasons[near[is_paid]] = Reason.NONE
        return reasons

    def depth_limit(self, level_bytes: float, burst_bytes: float | None = None) -> int:
        """Return the depth below which blocks seen for the first time are admitted.

        *burst_bytes*: burst of another budget, if *level_bytes* is from another.
        """
        burst_bytes = self._budget.burst_bytes if burst_bytes is None else burst_bytes
        reserve_bytes, plenty_bytes = self._reserve_share * burst_bytes, self._plenty_share * burst_bytes
        plenty = (level_bytes - reserve_bytes) / (plenty_bytes - reserve_bytes)
        if plenty <= 0:
            return 0
        if plenty >= 1:
            return DEPTH_ANY
        # Squared, so that the limit covers all usual prompt lengths while the level moves by a
        # few tenths, for any number of tokens per block.
        return min(DEPTH_ANY, int(self._half_way_blocks * (plenty / (1 - plenty)) ** 2))


def _before(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each element the sum of all earlier ones."""
    return np.cumsum(sizes) - sizes


BITS_PER_KEY = 12
_HASHES = 8
_WORD_BITS = 64
_WAITING_SHARE = 4
"""Divisor: this part of the memory holds touches too recent to count."""

_WAITING_BYTES = KEY_BYTES + 8
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Odd constants of the splitmix64 generator: similar keys get dissimilar hashes."""


class GhostFilter:
    """Memory of touches of blocks."""

    def __init__(self, memory_bytes: int, *, retry_s: float) -> None:
        """Allocate *memory_bytes* at once, at least 4096."""
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
        """Keys in one generation."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the filter, independent of its content."""
        arrays = (self._current, self._previous, self._waiting_keys, self._waiting_since_s)
        return sum(array.nbytes for array in arrays)

    def touch(self, now_s: float, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Record a touch of these keys; return the mask of keys touched before.

        *keys*: shape (n, 16), each key once. Earlier touches count after ``retry_s``. Touches beyond the
        queue's size count sooner, the oldest first.
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
        """Enter the keys touched up to *until_s*."""
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
        """Enter the first *count* keys of the queue."""
        if not count:
            return
        rows = (self._first + np.arange(count)) % len(self._waiting_keys)
        self._first = (self._first + count) % len(self._waiting_keys)
        self._waits -= count
        keys = self._waiting_keys[rows]
        self._enter(self._places(keys[first_of_each(keys)]))

    def _enter(self, places: NDArray[np.uint64]) -> None:
        """Enter keys, each once; begin a new generation whenever the current one is full."""
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
        """Return the bits of each key, shape (n, 8), from two hashes by double hashing."""
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
