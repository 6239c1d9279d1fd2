"""Agent's reads out of the memory of workers on its host, for puts.

The kernel copies the bytes, and names the process: a worker can't have this agent read another process. A
flash I/O engine does the copies, with each worker's memory as a drive. So threads in C copy and check blocks,
without the interpreter lock, and a worker with slow memory occupies few threads. Blocks of a failed copy stay
unchecked, and are not stored.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.drives.file_drive import LoopIoEngine
from ostraca_fabric.drives.io_engine import FlashIoSettings, IoEnd, IoOperation
from ostraca_fabric.errors import DriveError
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.runtime.process_memory import PROOF_BYTES
from ostraca_fabric.tables.digests import CheckState, TagCheck
from ostraca_fabric.wire.messages import WorkerMemory

log = logging.getLogger(__name__)

SETTINGS = FlashIoSettings(io_uring=False, drive_bytes_max=2 << 20, bytes_max=16 << 20)
"""Copies under way: 2 MiB for each worker, 16 MiB in all. Threads copy 1 MiB at a time."""

_MEMORY_BYTES = (1 << 63) - 1
"""Addresses of a process, which are offsets on its drive."""


class WorkerMemories:
    """Memory of all workers on this host. Use on the event loop's thread only, and close it."""

    def __init__(self, open_engine: Callable[[], LoopIoEngine] = lambda: LoopIoEngine(SETTINGS)) -> None:
        """Start no thread before the first worker."""
        self._open_engine = open_engine
        self._engine: LoopIoEngine | None = None
        self._readers: set[WorkerMemoryReader] = set()
        """Readers that are open, or have copies under way."""

    async def reader(self, process: int, offer: WorkerMemory) -> WorkerMemoryReader | None:
        """Return a reader of the worker that made an offer, or None if this agent may not read it.

        *process* is the worker according to the kernel, 0 if unknown. Slow memory delays no other connection.
        """
        why = "another process namespace hides it"
        if process:
            try:
                reader = self._open(process)
            except DriveError as error:
                why = str(error)
            else:
                try:
                    why = await reader.why_not(offer)
                except asyncio.CancelledError:
                    reader.close()
                    raise
                if not why:
                    return reader
                reader.close()
        log.info("The memory of worker process %d is not read: %s", process, why)
        return None

    def close(self) -> None:
        """End the threads; with copies under way, only the process ends the threads."""
        if self._engine is not None and not self._readers:
            self._engine.close()
            self._engine = None

    def _open(self, process: int) -> WorkerMemoryReader:
        """Return a reader. Raises DriveError if no thread can start."""
        if self._engine is None:
            self._engine = self._open_engine()
        reader = WorkerMemoryReader(self._engine, process, self._readers)
        self._readers.add(reader)
        return reader


class WorkerMemoryReader:
    """Reader of one worker's memory. Close it."""

    def __init__(self, engine: LoopIoEngine, process: int, readers: set[WorkerMemoryReader]) -> None:
        """Read from *process*, and leave *readers* after the last copy."""
        self._engine = engine
        self._drive = engine.attach_process(process, _MEMORY_BYTES)
        self._readers = readers
        self._under_way = 0
        self._is_closed = False

    async def why_not(self, offer: WorkerMemory) -> str:
        """Read the proof of an offer; return why this agent can't, or the empty string."""
        if not 0 <= offer.proof_address < _MEMORY_BYTES or len(offer.proof) != PROOF_BYTES:
            return "its proof is not there"
        found = np.zeros(PROOF_BYTES, np.uint8)
        end: asyncio.Future[IoEnd] = asyncio.get_running_loop().create_future()
        if not self._submit(Pieces.one(found, drive_offset=offer.proof_address), None, end):
            return "no memory is left"
        ended = await asyncio.shield(end)
        if ended.failed:
            return _text_of(ended)
        return "" if found.tobytes() == offer.proof else "its proof is not there"

    def fetch(self, check: TagCheck, addresses: NDArray[np.int64]) -> MemoryFetch:
        """Start copying the blocks of *check* from *addresses*, and checking each: shape (n,).

        After ``close``, nothing is copied.
        """
        end: asyncio.Future[IoEnd] = asyncio.get_running_loop().create_future()
        fetch, places = MemoryFetch(check.states, end), check.pieces
        pieces = Pieces(places.memory, places.memory_offsets, addresses, check.lengths)
        if self._is_closed or not len(pieces) or not self._submit(pieces, check, end):
            end.set_result(IoEnd(0, 0, 0))
        return fetch

    def close(self) -> None:
        """Begin no other copy. Copies under way end by themselves."""
        self._is_closed = True
        self._leave()

    def _submit(self, pieces: Pieces, check: TagCheck | None, end: asyncio.Future[IoEnd]) -> bool:
        def ended(result: IoEnd) -> None:
            self._under_way -= 1
            self._leave()
            end.set_result(result)

        states = None if check is None else check.states
        has_begun = self._engine.submit(self._drive, IoOperation.READ, pieces, check, ended, states=states)
        self._under_way += has_begun
        return has_begun

    def _leave(self) -> None:
        """Release the engine, once closed and without copies."""
        if self._is_closed and not self._under_way and self in self._readers:
            self._readers.remove(self)
            self._engine.detach(self._drive)


class MemoryFetch:
    """Blocks on their way out of a worker's memory: implements ``ports.transport.BlockStream``."""

    def __init__(self, states: NDArray[np.uint8], end: asyncio.Future[IoEnd]) -> None:
        """Follow a copy until its *end*."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._states = states
        end.add_done_callback(self._end)

    def stop(self) -> NDArray[np.intp]:
        """Return the rows that may still be copied: a copy can't be stopped."""
        is_left = self._states == CheckState.PENDING
        return np.zeros(0, np.intp) if self.ended.done() else np.flatnonzero(is_left)

    def _end(self, end: asyncio.Future[IoEnd]) -> None:
        if end.result().failed:
            log.warning("Blocks can't be read from a worker's memory: %s", _text_of(end.result()))
        self.ended.set_result(None)


def _text_of(end: IoEnd) -> str:
    return os.strerror(end.error or errno.EFAULT)  # 0: beyond all addresses
