"""Slots of a memory area: state of each slot, with several slot sizes in one area.

Memory is cut into chunks. A slot lies within a chunk, at a multiple of its size from the chunk's start. Such
a position is a *place*, free if all of its pages are free. So slots of several sizes may share a chunk. A
slot takes from another size only the places overlapped by the slot: less than its own bytes plus two slots of
that size. Chunks are filled per size while enough chunks exist.

A slot is *free*, *taken*, *kept* or in *quarantine*. A kept slot is unused, and dropped when other callers
need the memory. Quarantine is for a transfer not known to have ended. Only the end of the transfer ends the
quarantine, never a timeout (architecture §6)::

    free --take--> taken --quarantine(holder)--> quarantine
      ^             |  |                             |
      +----give-----+  +--keep--> kept --use--> taken
      +----------------------drop--+                 |
      +-----------------------settle(holder)---------+

Pure bookkeeping: offsets only, without addresses or memory accesses. Not thread-safe; the caller holds the
lock. An array has a state byte per page, and a batch of slots is a single call into C (``native/slots.c``).

A ``Wave`` names slots at both ends of a transfer. A ``WaveQueue`` cuts ready blocks into waves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.native import at, brief
from ostraca_fabric.tables.digests import GOOD

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


def slot_numbers(
    offsets: NDArray[np.int64], *, chunk_bytes: int, slot_bytes: int
) -> tuple[NDArray[np.int32], bool]:
    """Return the numbers of slots at *offsets*, as if all had *slot_bytes*.

    Slots are numbered chunk by chunk. The flag tells whether each slot begins at such a place and ends within
    its chunk.
    """
    offsets, numbers = np.ascontiguousarray(offsets, np.int64), np.empty(len(offsets), np.int32)
    count = len(numbers)
    is_grid = brief.ostraca_slots_number(at(offsets), count, chunk_bytes, slot_bytes, at(numbers))
    return numbers, bool(is_grid)


class SlotPool:
    """Slots of ``memory_bytes`` bytes. Sizes and offsets are multiples of 4096.

    AssertionError, without a change, for broken invariants: giving, keeping or quarantining a slot not taken,
    dropping a slot not kept, settling a holder without slots.
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
        self._state = np.zeros((chunks, width), np.uint8)  # state per page
        self._pages = np.zeros((chunks, width), np.int32)  # pages of the slot that begins with this page
        self._cut_for = np.zeros(chunks, np.int64)  # pages of a slot; 0: the chunk has no slot in use
        self._used = np.zeros(chunks, np.int64)  # pages not free
        self._held: dict[Hashable, list[NDArray[np.int64]]] = {}
        arrays = (self._state, self._pages, self._cut_for, self._used)
        self._pool = _Pool(*(at(array) for array in arrays), chunks, width)
        self._at_pool = ctypes.addressof(self._pool)

    @property
    def free_bytes(self) -> int:
        """Bytes outside all slots in use. A slot of a given size need not fit."""
        return self.memory_bytes - self.taken_bytes - self.kept_bytes - self.quarantined_bytes

    @property
    def holders(self) -> frozenset[Hashable]:
        """Holders of slots in quarantine."""
        return frozenset(self._held)

    def take(self, count: int, slot_bytes: int) -> NDArray[np.int64] | None:
        """Take *count* free slots and return their offsets, or None if too few are free.

        Chunks first cut for this size are filled first, the fullest first, so that empty chunks stay free for
        other sizes. Next are empty chunks, and last the remains of other sizes. Slots of a call are adjacent
        as far as possible.
        """
        assert count >= 0
        self._assert_size(slot_bytes)
        offsets = np.empty(count, np.int64)
        if not brief.ostraca_slots_take(self._at_pool, slot_bytes, at(offsets), count):
            return None
        self.taken_bytes += count * slot_bytes
        return offsets

    def has_room(self, count: int, slot_bytes: int, *, if_taken_were_given: bool = False) -> bool:
        """Tell whether *count* slots could be taken after dropping all kept slots.

        With *if_taken_were_given*, taken slots count as free as well, so only quarantine limits the room.
        """
        self._assert_size(slot_bytes)
        most = _TAKEN if if_taken_were_given else _KEPT
        return int(brief.ostraca_slots_fit(self._at_pool, slot_bytes, count, most)) >= count

    def give(self, offsets: NDArray[np.int64]) -> None:
        """Return taken slots, of any sizes."""
        self.taken_bytes -= self._move(offsets, _TAKEN, _FREE)

    def keep(self, offsets: NDArray[np.int64]) -> None:
        """Allow taken slots to be dropped from now on."""
        moved_bytes = self._move(offsets, _TAKEN, _KEPT)
        self.taken_bytes -= moved_bytes
        self.kept_bytes += moved_bytes

    def use(self, offsets: NDArray[np.int64]) -> None:
        """Take kept slots again, so that they are not dropped."""
        moved_bytes = self._move(offsets, _KEPT, _TAKEN)
        self.kept_bytes -= moved_bytes
        self.taken_bytes += moved_bytes

    def drop(self, offsets: NDArray[np.int64]) -> None:
        """Free kept slots, of any sizes."""
        self.kept_bytes -= self._move(offsets, _KEPT, _FREE)

    def quarantine(self, holder: Hashable, offsets: NDArray[np.int64]) -> None:
        """Withhold taken slots until *holder* is settled. A holder may get more slots later."""
        moved_bytes = self._move(offsets, _TAKEN, _QUARANTINE)
        self.taken_bytes -= moved_bytes
        self.quarantined_bytes += moved_bytes
        self._held.setdefault(holder, []).append(np.array(offsets, np.int64))

    def settle(self, holder: Hashable) -> None:
        """Free the slots of *holder*.

        Call only once the holder's transfers are known to have ended.
        """
        assert holder in self._held, f"{holder!r} holds nothing in quarantine"
        self.quarantined_bytes -= self._move(np.concatenate(self._held.pop(holder)), _QUARANTINE, _FREE)

    def _assert_size(self, slot_bytes: int) -> None:
        assert 0 < slot_bytes <= self.chunk_bytes, f"slots of {slot_bytes} bytes do not fit a chunk"
        assert slot_bytes % PAGE_BYTES == 0, f"slots of {slot_bytes} bytes are not whole pages"

    def _move(self, offsets: NDArray[np.int64], before: int, after: int) -> int:
        """Move distinct slots from state *before* to state *after*; return their bytes."""
        offsets = np.ascontiguousarray(offsets, np.int64)
        moved_bytes = int(brief.ostraca_slots_move(self._at_pool, at(offsets), len(offsets), before, after))
        assert moved_bytes >= 0, (
            f"offset {offsets[-1 - moved_bytes]} is no slot in the state it must be in, or is named twice"
        )
        return moved_bytes


@dataclass(frozen=True, slots=True)
class Wave:
    """Blocks transferred together.

    ``staging`` and ``arena`` are offsets (int64, shape (n,)) of slots in the agent's staging memory and in
    the worker's arena. ``lengths`` (uint32, shape (n,)) has the bytes of each block. The two sizes are the
    slot sizes of the two sides. With ``in_regions``, ``arena`` has addresses in the worker's regions instead.
    """

    staging: NDArray[np.int64]
    arena: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    staging_slot_bytes: int
    arena_slot_bytes: int
    in_regions: bool = False

    def some(self, rows: NDArray[np.intp]) -> Wave:
        """Return a part of the wave."""
        return replace(self, staging=self.staging[rows], arena=self.arena[rows], lengths=self.lengths[rows])

    def fits(self, *, staging_bytes: int, arena_bytes: int) -> bool:
        """Return whether every block fits its slot, and every slot its memory.

        Offsets come from a worker's requests and are not trusted.
        """
        count = len(self.lengths)
        if not len(self.staging) == len(self.arena) == count:
            return False
        staging = np.ascontiguousarray(self.staging, np.int64)
        arena = np.ascontiguousarray(self.arena, np.int64)
        lengths = np.ascontiguousarray(self.lengths, np.uint32)
        longest = min(self.staging_slot_bytes, self.arena_slot_bytes)
        return bool(
            brief.ostraca_wave_fits(
                at(staging), staging_bytes, at(arena), arena_bytes, at(lengths), longest, count
            )
        )


def cut_into_waves(positions: NDArray[np.intp], blocks_per_wave: int) -> list[NDArray[np.intp]]:
    """Cut positions into waves, in order."""
    return [positions[at : at + blocks_per_wave] for at in range(0, len(positions), max(1, blocks_per_wave))]


_MOVES_AHEAD = 2
"""Waves of a stream under way at once."""

_NO_ROWS = np.empty(0, np.intp)


class WaveQueue:
    """Blocks of a stream: which form the next wave, and which are under way. Not thread-safe.

    Others change the states of blocks meanwhile, until ``freeze``.
    """

    def __init__(
        self, blocks: int, states: NDArray[np.uint8] | None, *, per_wave: int, per_later_wave: int = 0
    ) -> None:
        """Begin without a wave. *states* has a ``CheckState`` per block; None: all blocks are ready.

        A wave has at most *per_wave* blocks. Where all blocks are ready, waves after the first have up to
        *per_later_wave* if that is more, and at most half of the rest: little is then left after the last.
        """
        self._blocks = blocks
        self._states = states
        self._is_frozen = states is None
        self._is_stopped = False
        self._per_wave = per_wave
        self._per_later_wave = per_later_wave
        self._is_begun = np.zeros(0 if states is None else blocks, np.bool_)
        self._begun = 0
        self._waves = 0
        self._under_way: dict[int, NDArray[np.intp]] = {}

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self._blocks

    def take(self) -> tuple[int, NDArray[np.intp]] | None:
        """Take the next wave, if it may begin now; return its number and rows."""
        if self._is_stopped or len(self._under_way) >= _MOVES_AHEAD:
            return None
        rows = self._next_of_all() if self._states is None else self._next_ready(self._states)
        if not len(rows):
            return None
        self._begun += len(rows)
        self._waves += 1
        self._under_way[self._waves] = rows
        return self._waves, rows

    def _next_of_all(self) -> NDArray[np.intp]:
        left = self._blocks - self._begun
        later = min(self._per_later_wave, left // 2) if self._begun else 0
        return np.arange(self._begun, self._begun + min(left, max(self._per_wave, later)))

    def _next_ready(self, states: NDArray[np.uint8]) -> NDArray[np.intp]:
        ready = self._count_ready()
        # Usually more blocks will be there before the wave under way has settled. Waves become smaller at the
        # end, so that little is left to move when the last block is there.
        wanted = min(self._per_wave, self._blocks - self._begun) // 2
        if not ready or (self._under_way and not self._is_frozen and ready < wanted):
            return _NO_ROWS
        rows = np.nonzero((states == GOOD) & ~self._is_begun)[0][: self._per_wave]
        self._is_begun[rows] = True
        return rows

    def settle(self, wave: int) -> NDArray[np.intp]:
        """Note the end of a wave; return its rows."""
        return self._under_way.pop(wave)

    def freeze(self) -> NDArray[np.uint8]:
        """Let no further block become ready; return a copy of the states that count from now on."""
        if self._states is None:
            return np.full(self._blocks, GOOD, np.uint8)
        self._states = self._states.copy()
        self._is_frozen = True
        return self._states

    def stop(self) -> NDArray[np.intp]:
        """Give out no further wave; return the rows of waves under way."""
        self._is_stopped = True
        return np.concatenate((_NO_ROWS, *self._under_way.values()))

    @property
    def is_over(self) -> bool:
        """Whether all waves have settled, and no other will begin."""
        if self._under_way:
            return False
        return (
            self._is_stopped or self._begun == self._blocks or (self._is_frozen and not self._count_ready())
        )

    def _count_ready(self) -> int:
        ready = self._blocks if self._states is None else self._states.tobytes().count(GOOD)
        return ready - self._begun
