"""Blocks where they landed, and slots to fill: the ways past the copy between caller memory and arena.

Both are leases. What they lend is memory of the arena, and it must be given back: use them as context
managers. After that, their memoryviews raise ValueError when touched, and arrays made from them must be gone.

A view is made when it is asked for: a batch costs nothing for blocks that nobody looks at from Python.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Self

import numpy as np

from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from numpy.typing import NDArray

    from ostraca.results import GetResult


class Lent:
    """Slots lent to a caller, the views of them that were asked for, and what lives of these.

    Thread-safe. It keeps the arena's memory mapped until it is revoked, whatever becomes of the client.
    """

    def __init__(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.uint32],
        is_lent: NDArray[np.bool_],
        *,
        is_written: bool,
    ) -> None:
        """Lend those of the slots at *offsets* that *is_lent* names, for writing or only for reading."""
        self.offsets = offsets
        self.lengths = lengths
        self._memory = memory
        self._is_lent = is_lent
        self._is_written = is_written
        self._lock = threading.Lock()
        self._is_revoked = False
        self._views: dict[int, memoryview] = {}
        # A view's ``obj`` lives as long as anything that can see the slot: numpy and torch do not tell a view
        # that they use its memory, but they keep what it was made of.
        self._owners: dict[int, weakref.ref[object]] = {}

    @classmethod
    def nothing(cls, count: int) -> Self:
        """Lend none of *count* slots."""
        none = np.zeros(count, np.uint8)
        return cls(
            none, none.astype(np.int64), none.astype(np.uint32), none.astype(np.bool_), is_written=False
        )

    def __len__(self) -> int:
        """Count the slots, lent or not."""
        return len(self.offsets)

    def view(self, position: int) -> memoryview | None:
        """Return the view of a slot, the same one each time; None when it is not lent.

        Raises IndexError, and UsageError after ``revoke``.
        """
        position = range(len(self))[position]
        with self._lock:
            if self._is_revoked:
                raise UsageError("this memory was released: get or lease it again")
            if not self._is_lent[position]:
                return None
            found = self._views.get(position)
            if found is None:
                offset = int(self.offsets[position])
                slot = self._memory[offset : offset + int(self.lengths[position])]
                slot.flags.writeable = self._is_written
                found = self._views[position] = slot.data
                self._owners[position] = weakref.ref(slot)
            return found

    def revoke(self) -> None:
        """Make the views unusable, and make no more.

        Raises UsageError when an array or view made of one is alive: its slot can't be given back under it.
        """
        with self._lock:
            self._is_revoked = True
            for view in self._views.values():
                # An export that forbids this also keeps the owner, which is what is looked at below.
                with contextlib.suppress(BufferError):
                    view.release()
            alive = [position for position, owner in self._owners.items() if owner() is not None]
            if alive:
                raise UsageError(
                    f"an array, tensor or view still uses the slot of block {min(alive)}: drop what was "
                    "made of it, then release again"
                )
            self._memory = np.empty(0, np.uint8)


class BlockViews:
    """What ``get_views`` brought: ``result``, and a read-only view of each block that is a HIT.

    The others are None.

    The bytes stay as they are until ``release`` or the end of the ``with`` block.
    """

    def __init__(self, result: GetResult, lent: Lent, give_back: Callable[[], None]) -> None:
        self.result = result
        self._lent = lent
        self._give_back = give_back
        self._is_released = False

    def __len__(self) -> int:
        """Count the blocks, HITs or not."""
        return len(self._lent)

    def __getitem__(self, block: int) -> memoryview | None:
        """Return a block's bytes, or None."""
        return self._lent.view(block)

    def __iter__(self) -> Iterator[memoryview | None]:
        """Go through the blocks."""
        return map(self._lent.view, range(len(self)))

    def __enter__(self) -> Self:
        """Lend the views to the ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release them."""
        self.release()

    def release(self) -> None:
        """Give the slots back; a second time does nothing.

        Raises UsageError while arrays made from the views are alive.
        """
        if self._is_released:
            return
        self._lent.revoke()
        self._is_released = True
        self._give_back()

    def __repr__(self) -> str:
        """Tell what was brought."""
        return f"<BlockViews: {self.result!r}{', released' if self._is_released else ''}>"


class SlotLease:
    """Slots to fill: one writable memoryview each.

    Put them with ``Volume.put_slots``, which ends the lease, or release them.
    """

    def __init__(self, lent: Lent, give_back: Callable[[], None]) -> None:
        """Lend all slots of *lent*."""
        self._lent = lent
        self._give_back = give_back
        self._is_over = False

    def __len__(self) -> int:
        """Count the slots."""
        return len(self._lent)

    def __getitem__(self, slot: int) -> memoryview:
        """Return a slot's memory."""
        view = self._lent.view(slot)
        assert view is not None, "all slots are lent"
        return view

    def __iter__(self) -> Iterator[memoryview]:
        """Go through the slots."""
        return map(self.__getitem__, range(len(self)))

    def __enter__(self) -> Self:
        """Lend the slots to the ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release what was not put."""
        self.release()

    def release(self) -> None:
        """Give the slots back unused; does nothing when they were put.

        Raises UsageError while arrays of them are alive.
        """
        if not self._is_over:
            self._lent.revoke()
            self._is_over = True
            self._give_back()

    def taken_over(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """End the lease for a put, which owns the slots from here on; return their offsets and lengths."""
        if self._is_over:
            raise UsageError("these slots were put or released already: take new ones with volume.slots()")
        self._lent.revoke()
        self._is_over = True
        return self._lent.offsets, self._lent.lengths
