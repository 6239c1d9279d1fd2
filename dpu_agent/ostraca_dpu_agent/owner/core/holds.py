"""What readers and writers hold: pins on segments, what look-ups were promised, reservations of space.

All of it runs out by itself.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.lifetimes import NO_END_S
from ostraca_fabric.flash.summary import entries_of
from ostraca_fabric.key_table import KeyTable, first_of_each
from ostraca_fabric.outcome import Reason
from ostraca_fabric.wire.columns import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ostraca_fabric.flash.summary import Entries

_SLOT_BITS = 24
_SLOT_MASK = np.uint64((1 << _SLOT_BITS) - 1)

_ENDED_SHARE_MAX = 2
_ENDED_MAX = 1024
"""Times of pins that ended early are forgotten when there are this many more of them than of pins."""

FREE, HELD, COMMITTING = 0, 1, 2


class Pins:
    """Promises not to reuse segments before a time."""

    def __init__(self, segments: int) -> None:
        self.on_segment = np.zeros(segments, np.int64)
        self._pins: dict[int, NDArray[np.intp]] = {}
        self._ends: list[tuple[float, int]] = []
        self._last = 0

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, end_s: float, segments: NDArray[np.intp]) -> int:
        """Pin these segments, each named once; return the pin's number, above zero."""
        self._last += 1
        self._pins[self._last] = segments
        self.on_segment[segments] += 1
        heapq.heappush(self._ends, (end_s, self._last))
        if len(self._ends) > _ENDED_SHARE_MAX * len(self._pins) + _ENDED_MAX:
            self._ends = [(end_s, pin) for end_s, pin in self._ends if pin in self._pins]
            heapq.heapify(self._ends)
        return self._last

    def number_from(self, number: int) -> None:
        """Give pins higher numbers than this from here on."""
        self._last = max(self._last, number)

    def end(self, pins: Iterable[int]) -> None:
        """End pins; unknown ones are ignored."""
        for pin in pins:
            segments = self._pins.pop(pin, None)
            if segments is not None:
                self.on_segment[segments] -= 1

    def expire(self, now_s: float) -> None:
        """End the pins whose time has come."""
        while self._ends and self._ends[0][0] <= now_s:
            self.end([heapq.heappop(self._ends)[1]])

    def check(self) -> None:
        """Assert that segments count their pins."""
        counted = np.zeros_like(self.on_segment)
        for segments in self._pins.values():
            counted[segments] += 1
        assert (counted == self.on_segment).all(), "each segment counts its pins"


class Promises:
    """Until when blocks of each segment were promised to be found, and how late such a promise may end.

    A segment that is wanted for new blocks makes no promise beyond the longest pin from then on, so that it
    can be evicted in the end. An owner that has a successor makes none that the successor does not know of.
    """

    def __init__(self, segments: int) -> None:
        self._until_s = np.full(segments, -np.inf)
        self._at_most_s = np.full(segments, np.inf)
        self._last_s = np.inf

    def may_last(self, segments: NDArray[np.intp], end_s: float) -> NDArray[np.bool_]:
        """Tell of each of these segments whether it may be promised until then."""
        return (end_s <= self._last_s) & (end_s <= self._at_most_s[segments])

    def make(self, segments: NDArray[np.intp], end_s: float) -> None:
        """Promise the blocks of these segments until then."""
        self._until_s[segments] = np.maximum(self._until_s[segments], end_s)

    def inherit(self, segment: int, earlier: NDArray[np.intp]) -> None:
        """Promise a segment's blocks for as long as those of the *earlier* ones, where its blocks lay."""
        self._until_s[segment] = max(self._until_s[segment], float(self._until_s[earlier].max()))

    def bind(self, segment: int, now_s: float, *, at_most_s: float) -> bool:
        """Tell whether a segment that is wanted now is promised; if so, for no longer than *at_most_s*.

        The first time counts, until ``lift``.
        """
        if now_s >= self._until_s[segment]:
            return False
        self._at_most_s[segment] = min(self._at_most_s[segment], at_most_s)
        return True

    def end(self, at_most_s: float) -> None:
        """Make no promise beyond *at_most_s* any more. The first time counts."""
        self._last_s = min(self._last_s, at_most_s)

    def lift(self) -> None:
        """No segment is wanted any more."""
        self._at_most_s[:] = np.inf


class ReservationTable:
    """Reservations and commits under way, one *slot* of each column for each.

    A reservation's number is its slot and a count, so that a number is never used twice, not by the next
    owner either (``number_above``).
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
        self.is_carried = np.zeros(slots, np.bool_)
        self.is_adopted = np.zeros(slots, np.bool_)
        """Whether the block was found since to have been listed by an earlier owner."""

        self.kept_until_s = np.zeros(slots, np.float64)
        self.ends_s = np.zeros(slots, np.float64)
        self.in_flight = KeyTable(self.keys)
        """The slot of each key that someone is writing."""

        self._named_at = np.zeros(slots, np.intp)  # scratch of ``slots_of``
        self._free = np.arange(slots - 1, -1, -1, dtype=np.intp)
        self._free_count = slots
        self._held = 0
        self._batches: list[tuple[float, int, NDArray[np.uint64]]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self.states) - self._free_count

    @property
    def room(self) -> int:
        """How many more fit."""
        return self._free_count

    @property
    def has_held(self) -> bool:
        """Whether any was handed out and is neither being committed nor ended."""
        return self._held > 0

    def number_from(self, count: int) -> None:
        """Give reservations higher counts than this from here on; none was given before."""
        self._count = count

    def not_in_flight(
        self, keys: NDArray[np.uint8], wanted: NDArray[np.intp], reasons: NDArray[np.uint8]
    ) -> NDArray[np.intp]:
        """Return those of *wanted* that nobody is writing, the first of each key; give others a reason."""
        asked = keys[wanted]
        is_new = first_of_each(asked) & (self.in_flight.find(asked) < 0)
        reasons[wanted[~is_new]] = Reason.IN_FLIGHT
        return wanted[is_new]

    def add(
        self,
        end_s: float,
        keys: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
        segments: NDArray[np.intp],
        *,
        kept_until_s: float | NDArray[np.float64] = NO_END_S,
        is_carried: bool = False,
    ) -> NDArray[np.uint64]:
        """Hold space for blocks whose keys are not in flight; return the reservations' numbers.

        *kept_until_s*: the blocks' ends, as ``lifetimes`` has them; *is_carried*: for copies of blocks that
        the shard has.
        """
        count = len(keys)
        assert 0 < count <= self.room, f"{count} reservations where {self.room} fit"
        self._free_count -= count
        slots = self._free[self._free_count : self._free_count + count].copy()
        counts = np.arange(self._count + 1, self._count + 1 + count, dtype=np.uint64)
        self._count += count
        numbers = counts << np.uint64(_SLOT_BITS) | slots.astype(np.uint64)
        self.numbers[slots] = numbers
        self.states[slots] = HELD
        self._held += count
        self.keys[slots], self.lengths[slots], self.offsets[slots] = keys, lengths, offsets
        self.segments[slots], self.ends_s[slots], self.is_carried[slots] = segments, end_s, is_carried
        self.kept_until_s[slots], self.is_adopted[slots] = kept_until_s, False
        is_new = self.in_flight.enter(slots)
        assert is_new.all(), "a key that someone is writing was reserved again"
        heapq.heappush(self._batches, (end_s, self._count, numbers))
        return numbers.copy()

    def slots_of(self, numbers: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the slots of reservations, -1 for those unknown, ended, or named before in the batch."""
        slots = slots_in(numbers)
        slots[slots >= len(self.states)] = 0
        slots[(self.numbers[slots] != numbers) | (self.states[slots] == FREE)] = -1
        known = np.flatnonzero(slots >= 0)
        # Of values assigned to one item the last stays, so that of the first position comes last.
        self._named_at[slots[known][::-1]] = known[::-1]
        slots[known[self._named_at[slots[known]] != known]] = -1
        return slots

    def entries(self, slots: NDArray[np.intp]) -> Entries:
        """Return what a summary says of these blocks."""
        return entries_of(
            self.keys[slots], self.tags[slots], self.seeds[slots], self.offsets[slots], self.lengths[slots]
        )

    def begin_commit(
        self, slots: NDArray[np.intp], tags: NDArray[np.uint8], seeds: NDArray[np.uint64]
    ) -> None:
        """Take reservations that are held for committed: their blocks are to be listed."""
        self.states[slots] = COMMITTING
        self.tags[slots], self.seeds[slots] = tags, seeds
        self._held -= len(slots)

    def end(self, slots: NDArray[np.intp]) -> None:
        """Free these slots, each named once."""
        self.in_flight.remove(slots)
        self._held -= int(np.count_nonzero(self.states[slots] == HELD))
        self.states[slots] = FREE
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

    def take_expired(self, now_s: float) -> NDArray[np.intp]:
        """Return the slots of reservations whose time has come, uncommitted. The caller ends them."""
        ended: list[NDArray[np.uint64]] = []
        while self._batches and self._batches[0][0] <= now_s:
            ended.append(heapq.heappop(self._batches)[2])
        if not ended:
            return np.zeros(0, np.intp)
        numbers = np.concatenate(ended)
        slots = slots_in(numbers)
        is_held = (self.numbers[slots] == numbers) & (self.states[slots] == HELD)
        return slots[np.flatnonzero(is_held)]

    def check(self) -> None:
        """Assert that the columns agree."""
        live = np.flatnonzero(self.states != FREE)
        assert len(live) == len(self), "free slots are counted"
        assert self._held == int((self.states == HELD).sum()), "those that are held are counted"
        is_free = np.zeros(len(self.states), np.bool_)
        is_free[self._free[: self._free_count]] = True
        assert not is_free[live].any(), "no slot in use is free"
        assert len(self.in_flight) == len(live), "keys in flight are counted"
        assert (self.in_flight.find(self.keys[live]) == live).all(), "each key in flight has its slot"


def slots_in(numbers: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return the slots that reservations of these numbers have, or had: below 2**24, one each at a time."""
    return (numbers & _SLOT_MASK).astype(np.intp)
