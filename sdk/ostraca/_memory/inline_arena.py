"""Arena end of the inline transport: bulk frames in, answers to Fetch out.

Offsets and lengths from the agent are checked against the arena's bounds before any byte is read or written.
Bytes land in *open* slots only. The worker opens the slots of a get before the request, and shuts each slot
before reading it. Late or unrequested bytes are discarded.

The blocks of a request may lie in caller memory instead (``ostraca._memory.regions``). The agent names slots
all the same: then a slot is only the name of a row, for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import MalformedError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.ports.transport import INLINE, RegionPlace
from ostraca_fabric.tables.slots import SlotPool
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.frames import BulkFrame, Passage, bulk_frames
from ostraca_fabric.wire.messages import ArenaOffer, Fetch

_TRANSFER_MAX = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class RequestRows:
    """Rows of caller memory for the blocks of one request.

    *memory* is an array object of this request alone, and so identifies the request's bytes in transit.
    """

    memory: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    row_bytes: int


class InlineArenaEnd:
    """Inline offer of the memory behind *arena*, cut into *slots*.

    Any thread may call ``open`` and ``shut`` while the connection's reader calls ``sink``.
    """

    name = INLINE
    has_offer = True
    needs_progress = False

    def __init__(self, arena: memoryview | NDArray[np.uint8], slots: SlotPool) -> None:
        assert slots.memory_bytes <= arena.nbytes
        self._slots = slots
        self._arena = np.frombuffer(arena, np.uint8, slots.memory_bytes)
        self._offer = ArenaOffer(
            transport=INLINE, arena_bytes=slots.memory_bytes, chunk_bytes=slots.chunk_bytes
        )
        self._open_bytes = np.zeros(slots.memory_bytes // PAGE_BYTES, np.uint32)
        """Bytes that may land in a slot, by the slot's first page; 0 for a closed slot."""

        self._rows_of_request: dict[int, tuple[NDArray[np.int64], RequestRows]] = {}
        self._request_of = np.zeros(len(self._open_bytes), np.int64)
        """Request whose row the slot is a name of, by the slot's first page; 0 for memory of the arena."""

        self._row_offsets = np.zeros(len(self._open_bytes), np.int64)

    def offer(self) -> ArenaOffer:
        """Return the offer."""
        return self._offer

    def offer_region(self, region: RegionPlace) -> None:
        """Offer nothing: this process itself moves bytes from and to regions."""

    def progress(self) -> None:
        """Do nothing: reading the connection is the only progress."""

    def prepare_renewal(self) -> None:
        """Do nothing: a renewal needs no preparation."""

    def renew(self) -> None:
        """Do nothing: transfers of an earlier connection ended with it."""

    def successor(self) -> InlineArenaEnd:
        """Return another end without open slots."""
        return InlineArenaEnd(self._arena, self._slots)

    def close(self) -> None:
        """Release the arena: no bytes land any more."""
        self._arena = np.empty(0, np.uint8)

    cut_off = close

    def bind(self, request: int, slots: NDArray[np.int64], rows: RequestRows) -> None:
        """Make the slots of a request names of *rows*, until ``unbind``. Request ids are positive."""
        pages = slots // PAGE_BYTES
        self._row_offsets[pages] = rows.offsets
        self._rows_of_request[request] = pages, rows
        self._request_of[pages] = request

    def unbind(self, request: int) -> RequestRows | None:
        """Shut the slots that are names of a request's rows, and forget the rows; return them, if any.

        Frames under way still use the memory.
        """
        pages, rows = self._rows_of_request.pop(request, (None, None))
        if pages is not None:
            self._open_bytes[pages] = 0
            self._request_of[pages] = 0
        return rows

    def open(self, slots: NDArray[np.int64], slot_bytes: int) -> None:
        """Allow bytes in these slots from now on."""
        self._open_bytes[slots // PAGE_BYTES] = slot_bytes

    def shut(self, slots: NDArray[np.int64]) -> None:
        """Allow no bytes in these slots any more.

        A frame with bytes arriving right now still lands.
        """
        self._open_bytes[slots // PAGE_BYTES] = 0

    def shut_all(self) -> None:
        """Allow no bytes anywhere, after the loss of the connection."""
        self._open_bytes[:] = 0

    def sink(
        self,
        transfer: int,  # noqa: ARG002 (places identify a worker's bytes)
        places: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
    ) -> Passage | None:
        """Return the destination of a bulk frame: for each block, its open slot.

        Returns None unless each place names another open slot with enough room. Implements ``Sink`` of
        ``ostraca_fabric.wire.frames``.
        """
        if not self._holds(places, lengths):
            return None
        offsets = places.astype(np.int64)
        pages, within = np.divmod(offsets, PAGE_BYTES)
        if within.any() or (lengths > self._open_bytes[pages]).any() or not codec.are_distinct(pages):
            return None
        found = self._locate(offsets, lengths)
        return None if found is None else Passage(*found, lengths)

    def answer(self, fetch: Fetch) -> list[BulkFrame]:
        """Return the bulk frames that answer *fetch*, in order.

        Raises MalformedError for a request beyond the arena, or without a possible answer.
        """
        if not 0 <= fetch.transfer <= _TRANSFER_MAX:
            raise MalformedError(f"a fetch for transfer {fetch.transfer}, a number without a bulk frame")
        lengths = codec.u32(fetch.lengths, len(fetch.lengths) // codec.U32.itemsize)
        slots = codec.u64(fetch.slots, len(lengths))
        found = None
        if lengths.all() and self._holds(slots, lengths):
            found = self._locate(slots.astype(np.int64), lengths)
        if found is None:
            raise MalformedError(
                f"a fetch of {len(lengths)} blocks with an empty block, or a block outside of the arena"
            )
        memory, offsets = found
        return bulk_frames(
            fetch.transfer,
            memory,
            places=np.arange(len(lengths), dtype=codec.U64),
            offsets=offsets,
            lengths=lengths,
        )

    def _locate(
        self, offsets: NDArray[np.int64], lengths: NDArray[np.uint32]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
        """Return the memory of blocks in the arena, and their offsets there: in rows where those are bound.

        None unless all blocks lie in the arena, or in whole rows of a single request.
        """
        pages, within = np.divmod(offsets, PAGE_BYTES)
        requests = self._request_of[pages]
        if not requests.any():
            return self._arena, offsets
        _, rows = self._rows_of_request.get(int(requests[0]), (None, None))
        if (
            rows is None
            or within.any()
            or (requests != requests[0]).any()
            or (lengths > rows.row_bytes).any()
        ):
            return None
        return rows.memory, self._row_offsets[pages]

    def _holds(self, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> bool:
        """Tell whether all these bytes lie in the arena."""
        size_bytes = self._arena.nbytes
        return bool(((offsets <= size_bytes) & (lengths <= size_bytes - offsets)).all())
