"""Blocks where they landed, and slots to fill: the ways past the copy between caller memory and arena.

Both are leases. What they lend is memory of the arena, and it must be given back: use them as context
managers. After that, their memoryviews raise ValueError when touched, and arrays made from them must be gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from ostraca.results import GetResult


def _revoke(views: Sequence[memoryview | None]) -> None:
    """Make views unusable.

    Raises UsageError when someone made an array of one: the slot can't be given back under it.
    """
    for position, view in enumerate(views):
        if view is not None:
            try:
                view.release()
            except BufferError as error:
                raise UsageError(
                    f"an array or tensor still uses block {position}'s slot: drop what was made from the "
                    "view, then release again"
                ) from error


class BlockViews:
    """What ``get_views`` brought: ``result``, and a read-only view of each block that is a HIT.

    The others are None.

    The bytes stay as they are until ``release`` or the end of the ``with`` block.
    """

    def __init__(
        self, result: GetResult, views: Sequence[memoryview | None], give_back: Callable[[], None]
    ) -> None:
        self.result = result
        self._views = views
        self._give_back = give_back
        self._is_released = False

    def __len__(self) -> int:
        """Count the blocks, HITs or not."""
        return len(self._views)

    def __getitem__(self, block: int) -> memoryview | None:
        """Return a block's bytes, or None."""
        return self._views[block]

    def __iter__(self) -> Iterator[memoryview | None]:
        """Go through the blocks."""
        return iter(self._views)

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
        _revoke(self._views)
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
        self._offsets = offsets
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
            _revoke(self.views)
            self._is_over = True
            self._give_back()

    def taken_over(self) -> NDArray[np.int64]:
        """End the lease for a put, which owns the slots from here on; return their offsets."""
        if self._is_over:
            raise UsageError("these slots were put or released already: take new ones with volume.slots()")
        _revoke(self.views)
        self._is_over = True
        return self._offsets
