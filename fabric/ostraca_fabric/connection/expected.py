"""What the other end was asked for: parts of transfers, and where each belongs.

A bulk frame lands whole or not at all. One of a transfer that is not under way is thrown away. One that names
a part that its transfer does not lack, or twice, or gives it another length, breaks the rules of the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.errors import ProtocolError
from ostraca_fabric.wire.passage import Passage

if TYPE_CHECKING:
    import asyncio

    from numpy.typing import NDArray

    from ostraca_fabric.errors import ConnectError
    from ostraca_fabric.wire.frames import BulkEnd


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of one transfer; a part's place is its index."""

    memory: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    is_missing: NDArray[np.bool_]
    ended: asyncio.Future[None]

    def have(self, places: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> bool:
        """Tell whether these parts are missing, named once each, and as long as said."""
        if int(places.max()) >= len(self.lengths):
            return False
        parts = places.astype(np.intp)
        is_named = np.zeros_like(self.is_missing)
        is_named[parts] = True
        return np.count_nonzero(is_named & self.is_missing) == len(parts) and bool(
            (self.lengths[parts] == lengths).all()
        )


class ExpectedParts:
    """Parts of transfers, by transfer."""

    def __init__(self) -> None:
        self._transfers: dict[int, _Parts] = {}

    def expect(
        self,
        transfer: int,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.uint32],
        ended: asyncio.Future[None],
    ) -> None:
        """Let one or more parts land at *offsets* of *memory*; *ended* ends with the last of them."""
        assert transfer not in self._transfers, f"transfer {transfer} is expected already"
        self._transfers[transfer] = _Parts(memory, offsets, lengths, np.ones(len(lengths), np.bool_), ended)

    def destination(
        self, transfer: int, places: NDArray[np.uint64], lengths: NDArray[np.uint32]
    ) -> Passage | None:
        """Return where a bulk frame's blocks go: a ``Sink`` of ``ostraca_fabric.wire.frames``."""
        parts = self._transfers.get(transfer)
        if parts is None:
            return None
        if not parts.have(places, lengths):
            raise ProtocolError(
                f"a bulk frame of {len(places)} parts that transfer {transfer} does not lack, or not so long"
            )
        return Passage(parts.memory, parts.offsets[places.astype(np.intp)], lengths)

    def landed(self, bulk: BulkEnd) -> None:
        """Note what has come."""
        if not bulk.landed:
            return
        parts = self._transfers[bulk.transfer]
        parts.is_missing[bulk.places.astype(np.intp)] = False
        if not parts.is_missing.any():
            del self._transfers[bulk.transfer]
            if not parts.ended.done():
                parts.ended.set_result(None)

    def give_up(self, error: ConnectError) -> None:
        """Let go of all memory: nothing lands any more."""
        transfers, self._transfers = self._transfers, {}
        for parts in transfers.values():
            fail(parts.ended, error)


def fail(ended: asyncio.Future[None], error: ConnectError) -> None:
    """End a future with an error that nobody need ask for."""
    if not ended.done():
        ended.set_exception(error)
        ended.exception()
