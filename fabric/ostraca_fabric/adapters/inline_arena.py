"""The worker's end without a data plane: where incoming bulk frames land, and what a Fetch is answered with.

What the agent names is held against the arena's bounds before a byte is read or written, and bytes land in
slots that are *open* only. The worker opens those of a get before it asks, and shuts each before it looks at
the bytes: what comes later, or was never asked for, is thrown away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.errors import MalformedError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.ports.transport import INLINE
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import ArenaOffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_fabric.slots import SlotPool
    from ostraca_fabric.wire.messages import Fetch

_TRANSFER_MAX = (1 << 64) - 1


class InlineArenaEnd:
    """Offers the memory behind *arena*, cut into *slots*.

    ``open`` and ``shut`` may be called by any thread, while the reader of the connection asks ``sink``.
    """

    name = INLINE

    def __init__(self, arena: memoryview, slots: SlotPool) -> None:
        assert slots.memory_bytes <= arena.nbytes
        self._arena = arena[: slots.memory_bytes]
        self._offer = ArenaOffer(
            transport=INLINE, arena_bytes=slots.memory_bytes, chunk_bytes=slots.chunk_bytes
        )
        self._open_bytes = np.zeros(slots.memory_bytes // PAGE_BYTES, np.uint32)
        """By the page a slot begins with: how many bytes may land there; 0 where none may."""

    def offer(self) -> ArenaOffer:
        """As in the port."""
        return self._offer

    def progress(self) -> None:
        """As in the port: reading the connection is all the progress there is."""

    @property
    def needs_progress(self) -> bool:
        """As in the port."""
        return False

    def renew(self) -> None:
        """As in the port: what came on an earlier connection ended with it."""

    def close(self) -> None:
        """As in the port: nothing lands any more."""
        self._arena = memoryview(b"")

    def open(self, slots: NDArray[np.int64], slot_bytes: int) -> None:
        """Let bytes land in these slots from now on."""
        self._open_bytes[slots // PAGE_BYTES] = slot_bytes

    def shut(self, slots: NDArray[np.int64]) -> None:
        """Let none land there any more. A frame whose bytes are coming in now still does."""
        self._open_bytes[slots // PAGE_BYTES] = 0

    def shut_all(self) -> None:
        """Let none land anywhere: the connection is gone."""
        self._open_bytes[:] = 0

    def sink(self, transfer: int, offset: int, length: int) -> memoryview | None:  # noqa: ARG002
        """Return where a bulk frame's bytes go: the open slot at *offset*; None when there is no such slot.

        It is a ``Sink`` of ``ostraca_fabric.wire.frames``.
        """
        page, within = divmod(offset, PAGE_BYTES)
        if within or page >= len(self._open_bytes) or length > self._open_bytes[page]:
            return None
        return self._piece(offset, length)

    def answer(self, fetch: Fetch) -> list[tuple[int, memoryview]]:
        """Return the bulk frames that answer *fetch*, as (offset for the header, payload), in order.

        Raises MalformedError when it asks for anything outside the arena, or can't be answered.
        """
        if not 0 <= fetch.transfer <= _TRANSFER_MAX:
            raise MalformedError(f"a fetch for transfer {fetch.transfer}, which no bulk frame can name")
        lengths = columns.u32(fetch.lengths, len(fetch.lengths) // columns.U32.itemsize)
        slots = columns.u64(fetch.slots, len(lengths))
        parts = []
        for index, (offset, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            part = self._piece(offset, length)
            if part is None:
                raise MalformedError(f"a fetch of {length} bytes at {offset}, outside the arena")
            parts.append((index, part))
        return parts

    def _piece(self, offset: int, length: int) -> memoryview | None:
        if offset > len(self._arena) - length:
            return None
        return self._arena[offset : offset + length]
