"""The worker's end without a data plane: where incoming bulk frames land, and what a Fetch is answered with.

What the agent names is held against the arena's bounds before a byte is read or written. Whether a slot is
the agent's to use now is the worker's own business; a slot in quarantine stays reachable until the connection
is closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.adapters.inline_transport import NAME
from ostraca_fabric.errors import MalformedError
from ostraca_fabric.wire import columns
from ostraca_fabric.wire.messages import ArenaOffer

if TYPE_CHECKING:
    from ostraca_fabric.slots import SlotPool
    from ostraca_fabric.wire.messages import Fetch


class InlineArenaEnd:
    """Offers the memory behind *arena*, cut into *slots*."""

    name = NAME

    def __init__(self, arena: memoryview, slots: SlotPool) -> None:
        assert slots.memory_bytes <= arena.nbytes
        self._arena = arena[: slots.memory_bytes]
        self._offer = ArenaOffer(
            transport=NAME, arena_bytes=slots.memory_bytes, chunk_bytes=slots.chunk_bytes
        )

    def offer(self) -> ArenaOffer:
        """As in the port."""
        return self._offer

    def progress(self) -> None:
        """As in the port: reading the connection is all the progress there is."""

    @property
    def needs_progress(self) -> bool:
        """As in the port."""
        return False

    def close(self) -> None:
        """As in the port: nothing lands any more."""
        self._arena = memoryview(b"")

    def sink(self, transfer: int, offset: int, length: int) -> memoryview | None:  # noqa: ARG002
        """Return where a bulk frame's bytes go: the arena at *offset*; None when that is not in the arena.

        It is a ``Sink`` of ``ostraca_fabric.wire.frames``.
        """
        if not 0 <= offset <= len(self._arena) - length:
            return None
        return self._arena[offset : offset + length]

    def answer(self, fetch: Fetch) -> list[tuple[int, memoryview]]:
        """Return the bulk frames that answer *fetch*, as (offset for the header, payload), in order.

        Raises MalformedError when it asks for anything outside the arena.
        """
        lengths = columns.u32(fetch.lengths, len(fetch.lengths) // columns.U32.itemsize)
        slots = columns.u64(fetch.slots, len(lengths))
        parts = []
        for index, (offset, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            part = self.sink(fetch.transfer, offset, length)
            if part is None:
                raise MalformedError(f"a fetch of {length} bytes at {offset}, outside the arena")
            parts.append((index, part))
        return parts
