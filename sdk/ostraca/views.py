"""Blocks where they landed, and slots to fill: the ways past the copy between caller memory and arena.

Both are leases. What they lend is memory of the arena, and it must be given back: use them as context
managers. After that, their memoryviews raise ValueError when touched, and arrays made from them must be gone.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Self

import numpy as np

from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from ostraca.results import GetResult


class _Lent:
    """Views lent to a caller, and whether anything made of them is still alive."""

    def __init__(self, views: Sequence[memoryview | None]) -> None:
        self.views = tuple(views)
        # A view's ``obj`` lives as long as anything that can see the slot: numpy and torch do not tell a view
        # that they use its memory, but they keep what it was made of.
        self._owners = [None if view is None else weakref.ref(view.obj) for view in self.views]

    def revoke(self) -> None:
        """Make the views unusable.

        Raises UsageError when an array or view made of one is alive: its slot can't be given back under it.
        """
        for view in self.views:
            if view is not None:
                # An export that forbids this also keeps the owner, which is what is looked at below.
                with contextlib.suppress(BufferError):
                    view.release()
        alive = [
            block for block, owner in enumerate(self._owners) if owner is not None and owner() is not None
        ]
        if alive:
            raise UsageError(
                f"an array, tensor or view still uses the slot of block {alive[0]}: drop what was "
                "made of it, then release again"
            )


class BlockViews:
    """What ``get_views`` brought: ``result``, and a read-only view of each block that is a HIT.

    The others are None.

    The bytes stay as they are until ``release`` or the end of the ``with`` block.
    """

    def __init__(
        self, result: GetResult, views: Sequence[memoryview | None], give_back: Callable[[], None]
    ) -> None:
        self.result = result
        self._lent = _Lent(views)
        self._give_back = give_back
        self._is_released = False

    def __len__(self) -> int:
        """Count the blocks, HITs or not."""
        return len(self._lent.views)

    def __getitem__(self, block: int) -> memoryview | None:
        """Return a block's bytes, or None."""
        return self._lent.views[block]

    def __iter__(self) -> Iterator[memoryview | None]:
        """Go through the blocks."""
        return iter(self._lent.views)

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

    def __init__(
        self, views: Sequence[memoryview], offsets: NDArray[np.int64], give_back: Callable[[], None]
    ) -> None:
        self.views = tuple(views)
        self._lent = _Lent(views)
        self._offsets = offsets
        self._lengths = np.array([len(view) for view in views], np.uint32)
        self._give_back = give_back
        self._is_over = False

    def __len__(self) -> int:
        """Count the slots."""
        return len(self.views)

    def __getitem__(self, slot: int) -> memoryview:
        """Return a slot's memory."""
        return self.views[slot]

    def __iter__(self) -> Iterator[memoryview]:
        """Go through the slots."""
        return iter(self.views)

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
        return self._offsets, self._lengths
