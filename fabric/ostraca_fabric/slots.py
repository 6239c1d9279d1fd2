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
the lock. Calls cost per batch, not per slot: the state of every slot is a byte in one array, addressed by
chunk and slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.extent import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

_FREE, _TAKEN, _QUARANTINE = 0, 1, 2


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
        if count == 0:
            return np.empty(0, np.int64)
        per_chunk = self.chunk_bytes // slot_bytes
        chunks = self._chunks_with_room(count, slot_bytes, per_chunk)
        if chunks is None:
            return None
        places = np.flatnonzero(self._state[chunks, :per_chunk] == _FREE)[:count]
        rows, columns = np.divmod(places, per_chunk)
        chosen = chunks[rows]
        self._state[chosen, columns] = _TAKEN
        self._used[chunks] += np.bincount(rows, minlength=len(chunks))
        self._slot_bytes[chosen] = slot_bytes
        self.taken_bytes += count * slot_bytes
        offsets: NDArray[np.int64] = chosen * self.chunk_bytes + columns * slot_bytes
        return offsets

    def give(self, offsets: NDArray[np.int64]) -> None:
        """Give taken slots back; they may be of several sizes."""
        chunks, columns, sizes = self._places(offsets, _TAKEN)
        self.taken_bytes -= int(sizes.sum())
        self._free(chunks, columns)

    def quarantine(self, holder: Hashable, offsets: NDArray[np.int64]) -> None:
        """Keep taken slots from everybody until *holder* is settled. A holder may get more slots later."""
        chunks, columns, sizes = self._places(offsets, _TAKEN)
        moved_bytes = int(sizes.sum())
        self._state[chunks, columns] = _QUARANTINE
        self.taken_bytes -= moved_bytes
        self.quarantined_bytes += moved_bytes
        self._held.setdefault(holder, []).append(np.array(offsets, np.int64))

    def settle(self, holder: Hashable) -> None:
        """Free what *holder* holds. Call it when its transfers are known to have ended, at no other time."""
        assert holder in self._held, f"{holder!r} holds nothing in quarantine"
        chunks, columns, sizes = self._places(np.concatenate(self._held.pop(holder)), _QUARANTINE)
        self.quarantined_bytes -= int(sizes.sum())
        self._free(chunks, columns)

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
        if held:
            self._places(np.concatenate(held), _QUARANTINE)

    def _chunks_with_room(self, count: int, slot_bytes: int, per_chunk: int) -> NDArray[np.int64] | None:
        """Return the chunks to take *count* slots from, in order; None when they have not as many free."""
        partly = np.flatnonzero((self._slot_bytes == slot_bytes) & (self._used < per_chunk))
        partly = partly[np.argsort(-self._used[partly], kind="stable")]
        room = np.cumsum(per_chunk - self._used[partly])
        free_in_partly = int(room[-1]) if len(room) else 0
        if free_in_partly >= count:
            return partly[: int(np.searchsorted(room, count)) + 1]
        empty = np.flatnonzero(self._slot_bytes == 0)
        wanted = -(-(count - free_in_partly) // per_chunk)
        return np.concatenate((partly, empty[:wanted])) if wanted <= len(empty) else None

    def _places(
        self, offsets: NDArray[np.int64], state: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return chunk, slot in it and size of slots that must be distinct and all in *state*."""
        chunks, within = np.divmod(offsets, self.chunk_bytes)
        assert bool(((chunks >= 0) & (chunks < len(self._used))).all()), "an offset lies outside the memory"
        sizes = self._slot_bytes[chunks]
        assert bool((sizes > 0).all()), "an offset lies in a chunk that has no slot in use"
        columns, remainder = np.divmod(within, sizes)
        assert not remainder.any(), "an offset is not where a slot begins"
        assert bool((self._state[chunks, columns] == state).all()), "a slot is not in the state it must be in"
        ordered = np.sort(offsets)
        assert bool((ordered[1:] != ordered[:-1]).all()), "a slot is named twice"
        return chunks, columns, sizes

    def _free(self, chunks: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        self._state[chunks, columns] = _FREE
        np.subtract.at(self._used, chunks, 1)
        self._slot_bytes[chunks[self._used[chunks] == 0]] = 0
