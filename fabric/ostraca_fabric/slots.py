"""Slots of one piece of memory: who may write to which bytes, and since when they are free again.

Memory is cut into chunks. A slot of any size lies within one chunk, at a multiple of its size from where the
chunk begins: that is a *place* for it, and it is free when all of its pages are. So slots of several sizes
may share a chunk, and no slot keeps more from another size than the places it overlaps: less than its own
bytes and two slots of that size together. Chunks are filled size by size while there are enough of them.

A slot is *free*, *taken*, *kept* (nobody uses it, and it is dropped when others need it), or in *quarantine*:
under a transfer that is not known to have ended. Only the word that the transfer has ended brings a slot back
from quarantine; no time ever does (architecture §6)::

    free --take--> taken --quarantine(holder)--> quarantine
      ^             |  |                             |
      +----give-----+  +--keep--> kept --use--> taken
      +----------------------drop--+                 |
      +-----------------------settle(holder)---------+

Pure bookkeeping: it knows offsets, never addresses, and touches no memory. Not thread-safe; its user holds
the lock. The state of every page is a byte in one array, and a call for a batch of slots is one into C
(``native/slots.c``).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.native import at, library

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

_FREE, _KEPT, _TAKEN, _QUARANTINE = range(4)


class _Pool(ctypes.Structure):
    """``struct pool`` of ``native/slots.c``."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("cut_for", ctypes.c_void_p),
        ("used", ctypes.c_void_p),
        ("chunks", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )


def slot_numbers(offsets: NDArray[np.int64], *, chunk_bytes: int, slot_bytes: int) -> NDArray[np.int32]:
    """Number the slots that begin at *offsets*, chunk by chunk, as if all held slots of *slot_bytes*."""
    chunks, within = np.divmod(offsets, chunk_bytes)
    numbers: NDArray[np.int64] = chunks * (chunk_bytes // slot_bytes) + within // slot_bytes
    return numbers.astype(np.int32)


class SlotPool:
    """The slots of ``memory_bytes`` bytes. Sizes and offsets are multiples of 4096.

    Giving, keeping or quarantining what is not taken, dropping what is not kept, and settling a holder that
    holds nothing, are broken invariants: AssertionError, and nothing has changed.
    """

    def __init__(self, memory_bytes: int, chunk_bytes: int) -> None:
        assert chunk_bytes > 0
        assert chunk_bytes % PAGE_BYTES == 0, f"chunks of {chunk_bytes} bytes are not whole pages"
        assert memory_bytes > 0
        assert memory_bytes % chunk_bytes == 0, f"{memory_bytes} bytes are not whole chunks of {chunk_bytes}"
        self.memory_bytes = memory_bytes
        self.chunk_bytes = chunk_bytes
        self.taken_bytes = 0
        self.kept_bytes = 0
        self.quarantined_bytes = 0
        chunks, width = memory_bytes // chunk_bytes, chunk_bytes // PAGE_BYTES
        self._state = np.zeros((chunks, width), np.uint8)  # of each page: its slot's
        self._pages = np.zeros((chunks, width), np.int32)  # of the slot that begins with each page
        self._cut_for = np.zeros(chunks, np.int64)  # pages of a slot; 0: the chunk has no slot in use
        self._used = np.zeros(chunks, np.int64)  # pages not free
        self._held: dict[Hashable, list[NDArray[np.int64]]] = {}
        arrays = (self._state, self._pages, self._cut_for, self._used)
        self._pool = _Pool(*(at(array) for array in arrays), chunks, width)
        self._at_pool = ctypes.addressof(self._pool)

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot in use. Not all of them need fit a slot of a given size."""
        return self.memory_bytes - self.taken_bytes - self.kept_bytes - self.quarantined_bytes

    @property
    def holders(self) -> frozenset[Hashable]:
        """Who holds slots in quarantine."""
        return frozenset(self._held)

    def take(self, count: int, slot_bytes: int) -> NDArray[np.int64] | None:
        """Take *count* free slots and return their offsets; None when there are not as many.

        Chunks first cut for this size are filled first, the fullest before the others, so that empty ones
        stay free for other sizes; then empty ones are cut; what others have left comes last. Slots of one
        call are adjacent as far as that allows.
        """
        assert count >= 0
        self._assert_size(slot_bytes)
        offsets = np.empty(count, np.int64)
        if not library.ostraca_slots_take(self._at_pool, slot_bytes, at(offsets), count):
            return None
        self.taken_bytes += count * slot_bytes
        return offsets

    def has_room(self, count: int, slot_bytes: int, *, if_taken_were_given: bool = False) -> bool:
        """Tell whether *count* slots could be taken if all that is kept were dropped.

        *if_taken_were_given*: and all that is taken given, so that only what is in quarantine is in the way.
        """
        self._assert_size(slot_bytes)
        most = _TAKEN if if_taken_were_given else _KEPT
        return int(library.ostraca_slots_fit(self._at_pool, slot_bytes, count, most)) >= count

    def give(self, offsets: NDArray[np.int64]) -> None:
        """Give taken slots back; they may be of several sizes."""
        self.taken_bytes -= self._move(offsets, _TAKEN, _FREE)

    def keep(self, offsets: NDArray[np.int64]) -> None:
        """Say that taken slots may be dropped from now on."""
        moved_bytes = self._move(offsets, _TAKEN, _KEPT)
        self.taken_bytes -= moved_bytes
        self.kept_bytes += moved_bytes

    def use(self, offsets: NDArray[np.int64]) -> None:
        """Say that kept slots must not be dropped: they are taken again."""
        moved_bytes = self._move(offsets, _KEPT, _TAKEN)
        self.kept_bytes -= moved_bytes
        self.taken_bytes += moved_bytes

    def drop(self, offsets: NDArray[np.int64]) -> None:
        """Free kept slots; they may be of several sizes."""
        self.kept_bytes -= self._move(offsets, _KEPT, _FREE)

    def quarantine(self, holder: Hashable, offsets: NDArray[np.int64]) -> None:
        """Keep taken slots from everybody until *holder* is settled. A holder may get more slots later."""
        moved_bytes = self._move(offsets, _TAKEN, _QUARANTINE)
        self.taken_bytes -= moved_bytes
        self.quarantined_bytes += moved_bytes
        self._held.setdefault(holder, []).append(np.array(offsets, np.int64))

    def settle(self, holder: Hashable) -> None:
        """Free what *holder* holds. Call it when its transfers are known to have ended, at no other time."""
        assert holder in self._held, f"{holder!r} holds nothing in quarantine"
        held = np.concatenate(self._held.pop(holder))
        self.quarantined_bytes -= self._move(held, _QUARANTINE, _FREE)

    def numbers(self, offsets: NDArray[np.int64], slot_bytes: int) -> NDArray[np.int32]:
        """Number slots of *slot_bytes* as the wire's ArenaOffer does."""
        return slot_numbers(offsets, chunk_bytes=self.chunk_bytes, slot_bytes=slot_bytes)

    def check(self) -> None:
        """Assert that the books agree with each other."""
        state, pages = self._state.ravel(), self._pages.ravel()
        begins = np.flatnonzero(pages)
        covered = np.concatenate(
            [np.empty(0, np.int64), *(first + np.arange(pages[first]) for first in begins)]
        )
        assert np.array_equal(covered, np.flatnonzero(state)), "each page in use is one slot's"
        assert np.array_equal(np.repeat(state[begins], pages[begins]), state[covered])
        width = self._state.shape[1]
        assert not (begins % width % pages[begins]).any()
        assert (begins % width + pages[begins] <= width).all()
        assert np.array_equal((self._state != _FREE).sum(axis=1), self._used)
        assert np.array_equal(self._cut_for > 0, self._used > 0)
        counted = np.bincount(state, minlength=_QUARANTINE + 1) * PAGE_BYTES
        assert counted.tolist() == [
            self.free_bytes,
            self.kept_bytes,
            self.taken_bytes,
            self.quarantined_bytes,
        ]
        held = [offsets for parts in self._held.values() for offsets in parts]
        quarantined = begins[state[begins] == _QUARANTINE] * PAGE_BYTES
        assert np.array_equal(np.sort(np.concatenate([np.empty(0, np.int64), *held])), quarantined)

    def _assert_size(self, slot_bytes: int) -> None:
        assert 0 < slot_bytes <= self.chunk_bytes, f"slots of {slot_bytes} bytes do not fit a chunk"
        assert slot_bytes % PAGE_BYTES == 0, f"slots of {slot_bytes} bytes are not whole pages"

    def _move(self, offsets: NDArray[np.int64], before: int, after: int) -> int:
        """Give slots, which must be distinct and all in one state, another one; return their bytes."""
        offsets = np.ascontiguousarray(offsets, np.int64)
        moved_bytes = int(library.ostraca_slots_move(self._at_pool, at(offsets), len(offsets), before, after))
        assert moved_bytes >= 0, (
            f"offset {offsets[-1 - moved_bytes]} is no slot in the state it must be in, or is named twice"
        )
        return moved_bytes
