"""Slots of one piece of memory: who may write to which bytes, and since when they are free again.

Memory is cut into chunks, and each chunk into slots of one size while any of them is in use; a chunk without
slots in use takes any size again. A slot is *free*, *taken*, or in *quarantine*: under a transfer that is not
known to have ended. Only the word that the transfer has ended brings a slot back from quarantine; no time
ever does (architecture §6)::

    free --take--> taken --quarantine(holder)--> quarantine
      ^              |                               |
      +-----give-----+           settle(holder)      |
      +----------------------------------------------+

Pure bookkeeping: it knows offsets, never addresses, and touches no memory. Not thread-safe; its user holds
the lock. The state of every slot is a byte in one array, addressed by chunk and slot, and a call for a batch
of slots is one into C (``native/slots.c``).
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

_FREE, _TAKEN, _QUARANTINE = 0, 1, 2


class _Pool(ctypes.Structure):
    """``struct pool`` of ``native/slots.c``."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_void_p),
        ("used", ctypes.c_void_p),
        ("chunks", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("chunk_bytes", ctypes.c_int64),
    )


def slot_numbers(offsets: NDArray[np.int64], *, chunk_bytes: int, slot_bytes: int) -> NDArray[np.int32]:
    """Number the slots that begin at *offsets*, chunk by chunk, as if all held slots of *slot_bytes*."""
    chunks, within = np.divmod(offsets, chunk_bytes)
    numbers: NDArray[np.int64] = chunks * (chunk_bytes // slot_bytes) + within // slot_bytes
    return numbers.astype(np.int32)


class SlotPool:
    """The slots of ``memory_bytes`` bytes. Sizes and offsets are multiples of 4096.

    Giving or quarantining what is not taken, and settling a holder that holds nothing, are broken invariants:
    AssertionError, and nothing has changed.
    """

    def __init__(self, memory_bytes: int, chunk_bytes: int) -> None:
        assert chunk_bytes > 0
        assert chunk_bytes % PAGE_BYTES == 0, f"chunks of {chunk_bytes} bytes are not whole pages"
        assert memory_bytes > 0
        assert memory_bytes % chunk_bytes == 0, f"{memory_bytes} bytes are not whole chunks of {chunk_bytes}"
        self.memory_bytes = memory_bytes
        self.chunk_bytes = chunk_bytes
        self.taken_bytes = 0
        self.quarantined_bytes = 0
        chunks = memory_bytes // chunk_bytes
        self._state = np.zeros((chunks, chunk_bytes // PAGE_BYTES), np.uint8)
        self._slot_bytes = np.zeros(chunks, np.int64)  # 0: the chunk has no slot in use
        self._used = np.zeros(chunks, np.int64)  # slots not free
        self._held: dict[Hashable, list[NDArray[np.int64]]] = {}
        width = self._state.shape[1]
        self._pool = _Pool(at(self._state), at(self._slot_bytes), at(self._used), chunks, width, chunk_bytes)
        self._at_pool = ctypes.addressof(self._pool)

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot in use. Not all of them need fit a slot of a given size."""
        return self.memory_bytes - self.taken_bytes - self.quarantined_bytes

    @property
    def holders(self) -> frozenset[Hashable]:
        """Who holds slots in quarantine."""
        return frozenset(self._held)

    def take(self, count: int, slot_bytes: int) -> NDArray[np.int64] | None:
        """Take *count* free slots and return their offsets; None when there are not as many.

        Chunks already cut into this size are filled first, the fullest before the others, so that empty ones
        stay free for other sizes; slots of one call are adjacent as far as that allows.
        """
        assert count >= 0
        assert 0 < slot_bytes <= self.chunk_bytes, f"slots of {slot_bytes} bytes do not fit a chunk"
        assert slot_bytes % PAGE_BYTES == 0, f"slots of {slot_bytes} bytes are not whole pages"
        offsets = np.empty(count, np.int64)
        if not library.ostraca_slots_take(self._at_pool, slot_bytes, at(offsets), count):
            return None
        self.taken_bytes += count * slot_bytes
        return offsets

    def give(self, offsets: NDArray[np.int64]) -> None:
        """Give taken slots back; they may be of several sizes."""
        self.taken_bytes -= self._move(offsets, _TAKEN, _FREE)

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
        in_use = self._state != _FREE
        assert np.array_equal(in_use.sum(axis=1), self._used)
        assert np.array_equal(self._slot_bytes > 0, self._used > 0)
        for chunk in np.flatnonzero(self._used):
            assert not in_use[chunk, self.chunk_bytes // self._slot_bytes[chunk] :].any()
        sizes = self._slot_bytes[:, None]
        assert self.taken_bytes == int(((self._state == _TAKEN) * sizes).sum())
        assert self.quarantined_bytes == int(((self._state == _QUARANTINE) * sizes).sum())
        held = [offsets for parts in self._held.values() for offsets in parts]
        assert sum(len(offsets) for offsets in held) == int((self._state == _QUARANTINE).sum())
        for offset in np.concatenate([np.empty(0, np.int64), *held]).tolist():
            chunk, within = divmod(offset, self.chunk_bytes)
            slot, rest = divmod(within, int(self._slot_bytes[chunk]))
            assert (int(self._state[chunk, slot]), rest) == (_QUARANTINE, 0)

    def _move(self, offsets: NDArray[np.int64], before: int, after: int) -> int:
        """Give slots, which must be distinct and all in one state, another one; return their bytes."""
        offsets = np.ascontiguousarray(offsets, np.int64)
        moved_bytes = int(library.ostraca_slots_move(self._at_pool, at(offsets), len(offsets), before, after))
        assert moved_bytes >= 0, (
            f"offset {offsets[-1 - moved_bytes]} is no slot in the state it must be in, or is named twice"
        )
        return moved_bytes
