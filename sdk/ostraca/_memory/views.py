"""Views of landed blocks and writable slots, without a copy to caller memory.

Both are leases of arena memory. Use them as context managers, because the memory must be given back.
Afterwards memoryviews raise ValueError on access, and arrays made from views must be gone. A lease dropped
instead gives the slots back with the last view.

Views are made on demand: blocks never accessed from Python cost nothing. No method takes a lock, so an
exception of a signal handler leaves a lease unchanged.

Callers never touch the arena's bookkeeping. A hold posts a request to the driver, and the driver gives the
slots back, once per hold. Every view of a slot keeps the hold alive, and a dropped hold posts the same
request. So slots come back even if an exception ends a call just before the return.
"""

from __future__ import annotations

import contextlib
import operator
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ostraca.results import GetResult
from ostraca_fabric.errors import ClosedError, UsageError

_LEASE_OVER = "these slots were put or released already: take new ones with volume.slots()"


class SlotHold:
    """Slots of a caller. Any thread may release the slots; dropping the last reference does the same."""

    def __init__(self, item: Any, post: Callable[[Any], None], key: object = None) -> None:  # noqa: ANN401 (of the driver's queue)
        """Release the slots by posting *item*."""
        self.item, self._post, self.key = item, post, key

    def release(self) -> None:
        """Ask for the slots to be given back. Never blocks; a second time does nothing."""
        self._post(self.item)


class SlotHolds:
    """All live holds of a client. For the driver's thread alone."""

    def __init__(
        self, item: Callable[[Callable[[], None]], Any], post: Callable[[Any], None], queue: SimpleQueue[Any]
    ) -> None:
        """Begin with no hold.

        *item* makes an item of the driver's *queue* from an action, and *post* passes an item to the driver.
        Items of dropped holds go to the queue.
        """
        self._item, self._post, self._queue = item, post, queue
        self._held: dict[object, tuple[Callable[[], None], object]] = {}

    def new(self, give: Callable[[], None]) -> SlotHold:
        """Return a hold of slots that *give* gives back."""
        key = object()
        hold = SlotHold(self._item(partial(self._give_back, key)), self._post, key)
        # This callback is C from end to end, so no signal handler can raise inside. The dead reference is a
        # second argument, which the queue takes for "block" and ignores. A weak reference that is collected
        # itself calls nothing.
        self._held[key] = give, weakref.ref(hold, partial(self._queue.put, hold.item))
        return hold

    def _give_back(self, key: object) -> None:
        """Give slots back, once."""
        give, _ = self._held.pop(key, (lambda: None, None))
        give()

    def pass_on(self, hold: SlotHold) -> None:
        """Leave the slots of a hold to an operation, once. Raises UsageError."""
        if self._held.pop(hold.key, None) is None:
            raise UsageError(_LEASE_OVER)


class _Slot(np.ndarray):
    """View of one slot.

    Derived arrays keep the view alive, and the view keeps the slot's hold.
    """

    hold: SlotHold | None = None


class SlotLoan:
    """Slots lent to a caller, with the views made so far and their live owners.

    Thread-safe. The arena's memory stays mapped until the revocation, even after the end of the client.
    """

    def __init__(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.uint32],
        is_lent: NDArray[np.bool_],
        hold: SlotHold,
        *,
        is_written: bool,
    ) -> None:
        """Lend the slots selected by *is_lent*, for writing or only for reading.

        *hold* holds all slots at *offsets*, lent or not.
        """
        self.offsets = offsets
        self.lengths = lengths
        self._memory = memory
        self._is_lent = is_lent
        self._is_written = is_written
        self._hold: SlotHold | None = hold
        self._is_revoked = False
        self._pid = os.getpid()
        self._views: dict[int, memoryview] = {}
        # A view's ``obj`` lives as long as any object over the slot: numpy and torch don't register their use
        # with the view, but keep the object behind it.
        self._owners: dict[int, weakref.ref[object]] = {}

    def __len__(self) -> int:
        """Count the slots, lent or not."""
        return len(self.offsets)

    def view(self, position: int) -> memoryview | None:
        """Return the view of a slot, the same on each call; None if not lent.

        Raises IndexError, UsageError after ``revoke``, and ClosedError in a forked child.
        """
        position = self._position(position)
        self._check_lent()
        if not self._is_lent[position]:
            return None
        found = self._views.get(position)
        if found is None:
            offset = int(self.offsets[position])
            slot = self._memory[offset : offset + int(self.lengths[position])].view(_Slot)
            slot.hold = self._hold
            slot.flags.writeable = self._is_written
            self._owners[position] = weakref.ref(slot)
            made = slot.data
            found = self._views.setdefault(position, made)
            if found is not made:  # another thread made the view first
                self._owners[position] = weakref.ref(found.obj)  # the slot of the listed view
        self._check_lent()  # ``revoke`` may have passed by before this view was listed
        return found

    def _position(self, block: int) -> int:
        count = len(self)
        try:
            return range(count)[operator.index(block)]
        except TypeError as error:
            raise UsageError(
                f"a {type(block).__name__} is no index of a block: pass a whole number, or slice the chain"
            ) from error
        except IndexError as error:
            raise IndexError(f"there is no block {block} among {count}") from error

    def _check_lent(self) -> None:
        if self._is_revoked:
            raise UsageError("the memory was released: get or lease the blocks again")
        if os.getpid() != self._pid:
            raise ClosedError("the memory was lent before a fork, and the child lacks it: use the parent")

    def revoke(self) -> SlotHold:
        """Make the views unusable, make no more, and return the slots' hold.

        Raises UsageError while an array or view derived from a view is alive: the slot can't be given back
        then.
        """
        self._is_revoked = True
        for view in list(self._views.values()):
            # An export that forbids the release also keeps the owner alive, which is checked below.
            with contextlib.suppress(BufferError):
                view.release()
        alive = [position for position, owner in list(self._owners.items()) if owner() is not None]
        if alive:
            raise UsageError(
                f"an array, tensor or view still uses the slot of block {min(alive)}: drop the "
                "derived objects, then release again"
            )
        hold, self._memory = self._hold, np.empty(0, np.uint8)
        if hold is None:  # dropped by another thread meanwhile
            raise UsageError(_LEASE_OVER)
        return hold

    def drop(self) -> None:
        """Make no more views, and leave the slots to live ones."""
        self._is_revoked, self._views, self._hold = True, {}, None
        self._memory = np.empty(0, np.uint8)


class _LoanHolder:
    """Base of context managers over a loan of slots, released at their end."""

    def __init__(self, loan: SlotLoan) -> None:
        """Hand out the slots of *loan*."""
        self._loan = loan
        self._is_released = False

    def __len__(self) -> int:
        """Count the slots, lent or not."""
        return len(self._loan)

    def __enter__(self) -> Self:
        """Return the memory to the ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the slots, unless stored by a put.

        If the block raised, memory still referenced by its frames goes when dropped.
        """
        if error is None:
            self.release()
            return
        with contextlib.suppress(UsageError):
            self.release()
        self._is_released = True
        self._loan.drop()

    def release(self) -> None:
        """Give the slots back; repeated calls do nothing, nor does a call after a put.

        Raises UsageError while arrays made from the memory are alive.
        """
        if not self._is_released:
            self._loan.revoke().release()
            self._is_released = True


class BlockViews(_LoanHolder):
    """Result of ``get_views``: ``result``, and a read-only view of each HIT.

    Other blocks are None. The bytes stay unchanged until ``release`` or the end of the ``with`` block. A
    forked child lacks the memory: views made before the fork crash the child.
    """

    def __init__(self, result: GetResult, loan: SlotLoan) -> None:
        super().__init__(loan)
        self.result = result

    def __getitem__(self, block: int) -> memoryview | None:
        """Return a block's bytes, or None."""
        return self._loan.view(block)

    def __iter__(self) -> Iterator[memoryview | None]:
        """Iterate over the blocks."""
        return map(self._loan.view, range(len(self)))

    def __repr__(self) -> str:
        """Show the result."""
        return f"<BlockViews: {self.result!r}{', released' if self._is_released else ''}>"


class SlotLease(_LoanHolder):
    """Slots to fill: a writable memoryview each.

    Store them with ``Volume.put_slots``, which ends the lease, or release them. A forked child lacks the
    memory: views made before the fork crash the child.
    """

    def __init__(self, loan: SlotLoan, owner: object, slot_bytes: int) -> None:
        """Hand out the slots of *loan*, of *slot_bytes* each, in the arena of *owner*."""
        super().__init__(loan)
        self._owner = owner
        self._slot_bytes = slot_bytes

    def __getitem__(self, slot: int) -> memoryview:
        """Return a slot's memory."""
        view = self._loan.view(slot)
        assert view is not None, "all slots are lent"
        return view

    def __iter__(self) -> Iterator[memoryview]:
        """Iterate over the slots."""
        return map(self.__getitem__, range(len(self)))

    def end_for_put(
        self, owner: object, slot_bytes: int
    ) -> tuple[SlotHold, NDArray[np.int64], NDArray[np.uint32]]:
        """End the lease for a put; return the hold, the offsets and the lengths.

        Raises UsageError if the lease is over, belongs to another *owner*, or has slots of another size.
        Raises UsageError as well if arrays made from the slots are alive.
        """
        if self._is_released:
            raise UsageError(_LEASE_OVER)
        if self._owner is not owner:
            raise UsageError(
                "these slots belong to another client: put them with the client that leased them"
            )
        if self._slot_bytes != slot_bytes:
            raise UsageError(
                f"these slots have {self._slot_bytes} bytes and this volume's {slot_bytes}: "
                "take new ones with volume.slots()"
            )
        hold = self._loan.revoke()
        self._is_released = True
        self._loan.drop()
        return hold, self._loan.offsets, self._loan.lengths
