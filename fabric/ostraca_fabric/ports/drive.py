"""Drive: bytes at offsets, read and written in whole pages.

I/O runs beside the event loop. A submitted read or write cannot be cancelled: its future
resolves when the operation is known to have ended. Memory and extent are in use until then, whatever the
caller's deadline.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.tables.digests import TagCheck


class Drive(Protocol):
    """NVMe namespace, or a file in place of a namespace."""

    id: DriveId
    size_bytes: int

    @property
    def has_volatile_cache(self) -> bool:
        """Whether written pages can be lost at a power cut until ``flush`` has ended."""

    @property
    def is_file(self) -> bool:
        """Whether the drive is a file, subject to delays by other use of the same disk."""

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[NDArray[np.bool_]]:
        """Read every piece, and check the tags of pieces in memory, outside of the event loop.

        *check* is made from the same *pieces*. The drive checks each piece read exactly once, and no other
        piece. The drive may tell the listeners of *check* about pieces checked before the end of the read.

        The future gives per piece whether the read was complete and the tag fits. The future never raises. An
        I/O error, a short read, an offset beyond the drive's end or a full queue gives False. The result
        applies to all pieces of the I/O. Only pieces read are True in ``check.was_read``, damaged blocks
        included.
        """

    def submit_write(self, pieces: Pieces) -> asyncio.Future[NDArray[np.bool_]]:
        """Write every piece; the future gives per piece whether all was written.

        Never raises.
        """

    def submit_flush(self) -> asyncio.Future[bool]:
        """Make all earlier writes durable."""

    def submit_look(self) -> asyncio.Future[str | None]:
        """Check whether a restart would find the drive unchanged.

        The future gives a change of the drive as the predicate of a sentence, or an empty string without a
        change. None means that no answer is possible now. Never raises.
        """

    @property
    def queued(self) -> int:
        """Number of submitted pieces that have not ended."""

    @property
    def refuses_reads(self) -> bool:
        """Whether reads fail at once for now, after earlier failures of the drive.

        Ask before waiting for read memory.
        """

    @property
    def refuses_writes(self) -> bool:
        """Whether to begin no new writes for now, after earlier failures of the drive.

        The owner may complete work already begun, such as the summary of blocks already written.
        """

    @property
    def reads_given_up(self) -> asyncio.Future[None] | None:
        """Future that resolves when pending reads are not worth waiting for.

        The drive then leaves the reads unanswered, and their memory stays in use. None for a drive without a
        health monitor.
        """

    @property
    def writes_given_up(self) -> asyncio.Future[None] | None:
        """Like ``reads_given_up``, for writes and flushes."""

    def close(self) -> None:
        """Wait for operations under way, then close the drive."""
