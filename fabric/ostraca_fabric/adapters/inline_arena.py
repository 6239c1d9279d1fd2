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
from ostraca_fabric.wire.frames import bulk_frames
from ostraca_fabric.wire.messages import ArenaOffer
from ostraca_fabric.wire.passage import Passage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_fabric.slots import SlotPool
    from ostraca_fabric.wire.frames import BulkFrame
    from ostraca_fabric.wire.messages import Fetch

_TRANSFER_MAX = (1 << 64) - 1


class InlineArenaEnd:
    """Offers the memory behind *arena*, cut into *slots*.

    ``open`` and ``shut`` may be called by any thread, while the reader of the connection asks ``sink``.
    """

    name = INLINE

    def __init__(self, arena: memoryview | NDArray[np.uint8], slots: SlotPool) -> None:
        assert slots.memory_bytes <= arena.nbytes
        self._slots = slots
        self._arena = np.frombuffer(arena, np.uint8, slots.memory_bytes)
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

    def prepare_renewal(self) -> None:
        """As in the port: there is nothing to prepare."""

    def renew(self) -> None:
        """As in the port: what came on an earlier connection ended with it."""

    def successor(self) -> InlineArenaEnd:
        """As in the port: none of its slots is open yet."""
        return InlineArenaEnd(self._arena, self._slots)

    def cut_off(self) -> None:
        """As in the port."""
        self.close()

    def close(self) -> None:
        """As in the port: nothing lands any more."""
        self._arena = np.empty(0, np.uint8)

    def open(self, slots: NDArray[np.int64], slot_bytes: int) -> None:
        """Let bytes land in these slots from now on."""
        self._open_bytes[slots // PAGE_BYTES] = slot_bytes

    def shut(self, slots: NDArray[np.int64]) -> None:
        """Let none land there any more. A frame whose bytes are coming in now still does."""
        self._open_bytes[slots // PAGE_BYTES] = 0

    def shut_all(self) -> None:
        """Let none land anywhere: the connection is gone."""
        self._open_bytes[:] = 0

    def sink(
        self,
        transfer: int,  # noqa: ARG002 (a worker's bytes are known by their places)
        places: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
    ) -> Passage | None:
        """Return where a bulk frame's blocks go: each to the open slot at its place.

        None unless there are such slots for all of them, each named once. It is a ``Sink`` of
        ``ostraca_fabric.wire.frames``.
        """
        if not self._holds(places, lengths):
            return None
        offsets = places.astype(np.int64)
        pages, within = np.divmod(offsets, PAGE_BYTES)
        if within.any() or (lengths > self._open_bytes[pages]).any() or len(np.unique(pages)) < len(pages):
            return None
        return Passage(self._arena, offsets, lengths)

    def answer(self, fetch: Fetch) -> list[BulkFrame]:
        """Return the bulk frames that answer *fetch*, in order.

        Raises MalformedError when it asks for anything outside the arena, or can't be answered.
        """
        if not 0 <= fetch.transfer <= _TRANSFER_MAX:
            raise MalformedError(f"a fetch for transfer {fetch.transfer}, which no bulk frame can name")
        lengths = columns.u32(fetch.lengths, len(fetch.lengths) // columns.U32.itemsize)
        slots = columns.u64(fetch.slots, len(lengths))
        if not (lengths.all() and self._holds(slots, lengths)):
            raise MalformedError(f"a fetch of {len(lengths)} blocks, one of them empty or outside the arena")
        return bulk_frames(
            fetch.transfer,
            self._arena,
            places=np.arange(len(lengths), dtype=columns.U64),
            offsets=slots.astype(np.int64),
            lengths=lengths,
        )

    def _holds(self, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> bool:
        """Tell whether all these bytes are the arena's."""
        size_bytes = self._arena.nbytes
        return bool(((offsets <= size_bytes) & (lengths <= size_bytes - offsets)).all())
