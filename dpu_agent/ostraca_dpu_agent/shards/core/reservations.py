"""Reservations of space, with an end time."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.flash.summary import Entries, entries_of
from ostraca_fabric.tables.key_table import KeyTable, first_of_each
from ostraca_fabric.wire.codec import KEY_BYTES

_SLOT_BITS = 24
_SLOT_MASK = np.uint64((1 << _SLOT_BITS) - 1)

FREE, HELD, COMMITTING = 0, 1, 2


class ReservationTable:
    """Reservations and commits under way: a *slot* of each column for each.

    The number of a reservation combines slot and count, so no number is used twice, even by the next owner
    (see ``number_from``).
    """

    def __init__(self, slots: int) -> None:
        assert 0 < slots <= 1 << _SLOT_BITS, f"{slots} reservations are not in 1 to {1 << _SLOT_BITS}"
        self.numbers = np.zeros(slots, np.uint64)
        self.states = np.zeros(slots, np.uint8)
        self.keys = np.zeros((slots, KEY_BYTES), np.uint8)
        self.tags = np.zeros((slots, KEY_BYTES), np.uint8)
        self.seeds = np.zeros(slots, np.uint64)
        self.offsets = np.zeros(slots, np.uint64)
        self.lengths = np.zeros(slots, np.uint32)
        self.segments = np.zeros(slots, np.intp)
        self.is_reinsertion = np.zeros(slots, np.bool_)
        self.is_adopted = np.zeros(slots, np.bool_)
        """Whether an earlier owner was found to list the block since."""

        self.kept_until_s = np.zeros(slots, np.float64)
        self.ends_s = np.zeros(slots, np.float64)
        self.in_flight = KeyTable(self.keys)
        """Slot of each key being written."""

        self._named_at = np.zeros(slots, np.intp)  # scratch of ``slots_of``
        self._returned = np.zeros(slots, np.intp)
        """Stack of free slots that were in use before. Others follow in order, so an idle shard touches no
        memory."""

        self._returned_count = self._first_fresh = 0
        self.room = slots
        """Number of reservations that still fit."""

        self._held = 0
        self._batches: list[tuple[float, int, NDArray[np.uint64]]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self.states) - self.room

    @property
    def has_held(self) -> bool:
        """Whether any reservation is neither committed nor ended, so that commits may come."""
        return self._held > 0

    def number_from(self, count: int) -> None:
        """Count reservations from *count* on; call before the first one."""
        self._count = count

    def are_new(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return whether each key is the first of its value here, and not being written."""
        is_new = self.in_flight.find(keys) < 0
        return is_new if len(keys) <= 1 else is_new & first_of_each(keys)

    def add(
        self,
        end_s: float,
        keys: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
        segments: NDArray[np.intp],
        *,
        kept_until_s: NDArray[np.float64],
        is_reinsertion: bool = False,
    ) -> NDArray[np.uint64]:
        """Reserve space for blocks whose keys are not in flight; return the numbers of the reservations.

        *kept_until_s*: end of the lifetime of each block, or of all. *is_reinsertion*: copies of blocks that
        the shard has.
        """
        count = len(keys)
        assert 0 < count <= self.room, f"{count} reservations where {self.room} fit"
        slots = self._take(count)
        counts = np.arange(self._count + 1, self._count + 1 + count, dtype=np.uint64)
        self._count += count
        numbers = counts << np.uint64(_SLOT_BITS) | slots.astype(np.uint64)
        self.numbers[slots] = numbers
        self.states[slots] = HELD
        self._held += count
        self.keys[slots], self.lengths[slots], self.offsets[slots] = keys, lengths, offsets
        self.segments[slots], self.ends_s[slots], self.is_reinsertion[slots] = segments, end_s, is_reinsertion
        self.kept_until_s[slots], self.is_adopted[slots] = kept_until_s, False
        in_flight = self.in_flight.count + count
        self.in_flight.enter(slots)
        assert self.in_flight.count == in_flight, "a key in flight was reserved again"
        heapq.heappush(self._batches, (end_s, self._count, numbers))
        return numbers.copy()

    def mark_adopted(self, keys: NDArray[np.uint8]) -> None:
        """Mark the reservations of *keys*, if any: an earlier owner lists the blocks."""
        slots = self.in_flight.find(keys)
        self.is_adopted[slots[slots >= 0]] = True

    def slots_of(self, numbers: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the slots of reservations, -1 for unknown, ended and repeated numbers."""
        slots = slots_in(numbers)
        slots[slots >= len(self.states)] = 0
        slots[(self.numbers[slots] != numbers) | (self.states[slots] == FREE)] = -1
        known = (slots >= 0).nonzero()[0]
        # The last of several values assigned to one item stays, so assign the first position last.
        self._named_at[slots[known][::-1]] = known[::-1]
        slots[known[self._named_at[slots[known]] != known]] = -1
        return slots

    def entries(self, slots: NDArray[np.intp]) -> Entries:
        """Return summary entries for the blocks of *slots*."""
        return entries_of(
            self.keys[slots], self.tags[slots], self.seeds[slots], self.offsets[slots], self.lengths[slots]
        )

    def begin_commit(
        self, slots: NDArray[np.intp], tags: NDArray[np.uint8], seeds: NDArray[np.uint64]
    ) -> None:
        """Mark held reservations as committed: the blocks are to be listed."""
        self.states[slots] = COMMITTING
        self.tags[slots], self.seeds[slots] = tags, seeds
        self._held -= len(slots)

    def end(self, slots: NDArray[np.intp]) -> None:
        """Free slots, each given once."""
        self.in_flight.remove(slots)
        self._held -= int(np.count_nonzero(self.states[slots] == HELD))
        self.states[slots] = FREE
        self._returned[self._returned_count : self._returned_count + len(slots)] = slots
        self._returned_count += len(slots)
        self.room += len(slots)

    def take_expired(self, now_s: float) -> NDArray[np.intp]:
        """Return the slots of expired reservations without a commit. The caller ends them."""
        ended: list[NDArray[np.uint64]] = []
        while self._batches and self._batches[0][0] <= now_s:
            ended.append(heapq.heappop(self._batches)[2])
        if not ended:
            return np.zeros(0, np.intp)
        numbers = np.concatenate(ended)
        slots = slots_in(numbers)
        return slots[np.flatnonzero((self.numbers[slots] == numbers) & (self.states[slots] == HELD))]

    def _take(self, count: int) -> NDArray[np.intp]:
        """Take free slots, at most as many as there are."""
        self.room -= count
        again = min(count, self._returned_count)
        self._returned_count -= again
        fresh = np.arange(self._first_fresh, self._first_fresh + count - again, dtype=np.intp)
        self._first_fresh += len(fresh)
        return np.concatenate((self._returned[self._returned_count : self._returned_count + again], fresh))


def slots_in(numbers: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return the slots of reservations, past ones included: below 2**24, unique at any time."""
    return (numbers & _SLOT_MASK).astype(np.intp)
