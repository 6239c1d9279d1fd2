"""A worker's arena where blocks cross inline, in frames of its connection, as the SDK's session does it.

Bytes land in slots that are open only: those of a get from before it is asked until its blocks are looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ostraca._memory.inline_arena import InlineArenaEnd
from ostraca_fabric.connection.framed import ExpectedParts

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca._memory.inline_arena import RequestRows
    from ostraca_fabric.connection import ClientConnection
    from ostraca_fabric.tables.slots import SlotPool
    from ostraca_fabric.wire.frames import BulkEnd
    from ostraca_fabric.wire.messages import ArenaOffer, Fetch


class _Slots(ExpectedParts):
    """A worker expects no transfer: its bytes are known by their places, as ``InlineArenaEnd.sink`` says."""

    def landed(self, bulk: BulkEnd) -> None:
        """Do nothing: the agent's next message tells of it."""


class InlineEnd:
    """One worker's: in place of a ``SimulatedArenaEnd``."""

    def __init__(self, memory: bytearray, slots: SlotPool) -> None:
        self.array = np.frombuffer(memory, np.uint8)
        self.on_submitted: Callable[[int], object] = lambda _: None
        self.on_landing: Callable[[int, object], None] = lambda _, __: None
        self._end = InlineArenaEnd(memoryview(memory), slots)

    def offer(self) -> ArenaOffer:
        return self._end.offer()

    def renew(self) -> None:
        self._end.renew()

    def close(self) -> None:
        self._end.close()

    def connected(self, connection: ClientConnection) -> None:
        """Let bulk frames of a connection land here."""
        connection._reader._sink = self._end.sink
        connection._expected = _Slots()

    def bind(self, request: int, slots: NDArray[np.int64], rows: RequestRows) -> None:
        self._end.bind(request, slots, rows)

    def leave(self, connection: ClientConnection, request: int) -> None:
        """End the use of a request's rows, if it has some, as the SDK's session and I/O loop do it."""
        rows = self._end.unbind(request)
        if rows is not None:
            connection._reader.divert(rows.memory)
            connection._outbox.blank(rows.memory)

    def open(self, slots: NDArray[np.int64], slot_bytes: int) -> None:
        self._end.open(slots, slot_bytes)

    def shut(self, slots: NDArray[np.int64]) -> None:
        self._end.shut(slots)

    def lost(self) -> None:
        """Note the end of the connection: nothing lands any more."""
        self._end.shut_all()

    def answer(self, connection: ClientConnection, fetch: Fetch) -> None:
        """Send what an agent fetches."""
        if connection.is_open:
            connection._outbox.add_bulk(self._end.answer(fetch), lambda: None)
            connection._write()
