"""Drive on a device of the reference engine."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray
from tests.support.simulated.drives.reference_engine import Done, ReferenceEngine, ReferenceIo
from tests.support.simulated.futures import resolve

from ostraca_fabric.drives.io_engine import IoEnd, IoOperation
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.tables.digests import CheckState, TagCheck


class DeviceDrive:
    """Implements ``ports.drive.Drive``; a subclass is the device, and performs I/Os by ``begin``."""

    refuses_reads = False
    refuses_writes = False
    reads_given_up = writes_given_up = None
    is_file = False
    has_crashed = False
    """Whether the process of the drive has died: the drive reports nothing."""

    def __init__(
        self,
        drive: DriveId,
        size_bytes: int,
        *,
        pieces_queued_max: int,
        has_volatile_cache: bool,
        engine: ReferenceEngine | None = None,
    ) -> None:
        """Use *engine*, or an engine of its own."""
        self.id = drive
        self.size_bytes = size_bytes
        self.has_volatile_cache = has_volatile_cache
        self.is_open = True
        self._pieces_queued_max = pieces_queued_max
        self._queued = 0
        self._engine = engine or ReferenceEngine()
        self._handle = self._engine.add(self, size_bytes)

    def begin(self, io: ReferenceIo, done: Done) -> None:
        """Begin an I/O, as defined by ``Device``."""
        raise NotImplementedError

    @property
    def queued(self) -> int:
        """Pieces submitted and not ended."""
        return self._queued

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[NDArray[np.bool_]]:
        """Read every piece, as defined by the port."""
        return self._submit(IoOperation.READ, pieces, check)

    def submit_write(self, pieces: Pieces) -> asyncio.Future[NDArray[np.bool_]]:
        """Write every piece, as defined by the port."""
        return self._submit(IoOperation.WRITE, pieces)

    def submit_flush(self) -> asyncio.Future[bool]:
        """Make all earlier writes durable."""
        assert self.is_open, "the drive is closed"
        flushed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def end(ended: IoEnd) -> None:
            if not self.has_crashed:
                resolve(flushed, not ended.failed)

        self._engine.submit(self._handle, IoOperation.FLUSH, None, None, end)
        return flushed

    def submit_look(self) -> asyncio.Future[str | None]:
        """Find no change: a device in memory has no path."""
        looked: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        looked.set_result("")
        return looked

    def close(self) -> None:
        """Take nothing more. I/O submitted before goes on."""
        self.is_open = False
        self._engine.detach(self._handle)

    def _submit(
        self, operation: IoOperation, pieces: Pieces, check: TagCheck | None = None, user_data: int = 0
    ) -> asyncio.Future[NDArray[np.bool_]]:
        assert self.is_open, "the drive is closed"
        pieces.check()
        future: asyncio.Future[NDArray[np.bool_]] = asyncio.get_running_loop().create_future()
        count = len(pieces)
        states = np.zeros(count, np.uint8) if check is None else check.states
        if not count or self._queued + count > self._pieces_queued_max:
            future.set_result(np.zeros(count, np.bool_))
            return future
        self._queued += count

        def end(_: IoEnd) -> None:
            self._queued -= count
            if not self.has_crashed:
                resolve(future, states == CheckState.GOOD)

        is_submitted = self._engine.submit(
            self._handle, operation, pieces, check, end, states=states, user_data=user_data
        )
        assert is_submitted, "a piece lies outside of its memory"
        return future
