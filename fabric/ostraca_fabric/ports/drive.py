"""A drive: bytes at offsets, read and written in whole pages by a bounded number of threads.

A read or write that has been submitted can't be called back. Its future resolves when the operation is known
to have ended, so its memory and its extent are in use until then, whatever the caller's deadline says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ostraca_fabric.extent import PAGE_BYTES

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ostraca_fabric.ids import DriveId


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of a drive, and the memory they are read into or written from: columns of shape (n,).

    A piece that begins where the one before it ends goes with it in one I/O: give them in the order in which
    they lie on the drive. Memory begins at a page; offsets and lengths are multiples of 4096. The columns
    must not change until the operation has ended.
    """

    memory: NDArray[np.uint8]
    """Flat. It must stay mapped until the operation has ended."""

    memory_offsets: NDArray[np.int64]
    drive_offsets: NDArray[np.int64]
    lengths: NDArray[np.uint32]

    @classmethod
    def one(cls, memory: NDArray[np.uint8], *, drive_offset: int) -> Pieces:
        """All of some memory, in one piece."""
        lengths = np.array([memory.nbytes], np.uint32)
        return cls(memory, np.zeros(1, np.int64), np.array([drive_offset], np.int64), lengths)

    def __len__(self) -> int:
        """Count the pieces."""
        return len(self.lengths)

    def some(self, rows: slice) -> Pieces:
        """Return some of the pieces."""
        return Pieces(self.memory, self.memory_offsets[rows], self.drive_offsets[rows], self.lengths[rows])

    def check(self) -> None:
        """Assert that they are columns of whole pages. It costs a few microseconds, so drives always ask."""
        offsets, lengths = self.drive_offsets, self.lengths
        assert len(self.memory_offsets) == len(offsets) == len(lengths), "columns of one length"
        assert self.memory_offsets.dtype == offsets.dtype == np.int64, "offsets are i64"
        assert lengths.dtype == np.uint32, "lengths are u32"
        assert self.memory.dtype == np.uint8, "memory is bytes"
        whole = (self.memory_offsets | offsets | lengths) % PAGE_BYTES
        assert not whole.any(), "pieces begin at a page, of memory and of the drive, and are whole pages"


class Drive(Protocol):
    """One NVMe namespace, or a file that stands for one."""

    id: DriveId
    size_bytes: int

    @property
    def has_volatile_cache(self) -> bool:
        """Whether written pages can be lost at a power cut until ``flush`` has ended."""

    @property
    def is_file(self) -> bool:
        """Whether it is a file, which may be held up by what else is done on its disk."""

    def submit_read(
        self, pieces: Pieces, then: Callable[[slice], NDArray[np.bool_]] | None = None
    ) -> asyncio.Future[NDArray[np.bool_]]:
        """Read every piece; *then* is called with consecutive pieces once they are in memory, in the drive's
        thread.

        The future gives for each piece whether it was read whole and *then* (a check that releases the GIL)
        said yes to it. *then* hears of each piece that was read exactly once, and of no other. The future
        never raises: an I/O error, a short read, an offset beyond the drive's end and a full queue all give
        False, to all pieces of the I/O.
        """

    def submit_write(self, pieces: Pieces) -> asyncio.Future[NDArray[np.bool_]]:
        """Write every piece; the future gives for each whether it was written whole. Never raises."""

    def submit_flush(self) -> asyncio.Future[bool]:
        """Make everything written before durable."""

    @property
    def queued(self) -> int:
        """Pieces submitted and not ended."""

    @property
    def refuses_reads(self) -> bool:
        """Whether reads fail at once for now, because the drive has been failing: ask before waiting for
        memory to read into.
        """

    @property
    def refuses_writes(self) -> bool:
        """Whether nothing new should be written for now, because the drive has been failing. What was begun
        may be ended: a summary of blocks that are written already.
        """

    @property
    def reads_given_up(self) -> asyncio.Future[None] | None:
        """Done once reads that are under way now are not worth waiting for: the drive leaves them unanswered.
        Their memory is in use all the same. None of a drive that nobody watches.
        """

    @property
    def writes_given_up(self) -> asyncio.Future[None] | None:
        """The same of writes and flushes."""

    def close(self) -> None:
        """Wait for operations under way, then let the drive go."""
