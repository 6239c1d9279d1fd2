"""A drive: bytes at offsets, read and written in whole pages by a bounded number of threads.

A read or write that has been submitted can't be called back. Its future resolves when the operation is known
to have ended, so its memory and its extent are in use until then, whatever the caller's deadline says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from ostraca_fabric.ids import DriveId


@dataclass(frozen=True, slots=True)
class Run:
    """One contiguous piece of a drive and the memory it is read into or written from, in order.

    ``offset`` and every view's length are multiples of 4096; views start at page-aligned addresses.
    """

    offset: int
    views: tuple[memoryview, ...]


class Drive(Protocol):
    """One NVMe namespace, or a file that stands for one."""

    id: DriveId
    size_bytes: int
    has_volatile_cache: bool
    """Whether written pages can be lost at a power cut until ``flush`` has ended."""

    def submit_read(
        self, runs: Sequence[Run], then: Callable[[int], bool] | None = None
    ) -> asyncio.Future[list[bool]]:
        """Read every run; *then* is called with a run's index, in the drive's thread, once that run is in
        memory.

        The future gives for each run whether it was read whole and *then* (a check that releases the GIL)
        said yes. It never raises: an I/O error, a short read and a full queue all give False.
        """

    def submit_write(self, runs: Sequence[Run]) -> asyncio.Future[list[bool]]:
        """Write every run; the future gives for each whether it was written whole. Never raises."""

    def submit_flush(self) -> asyncio.Future[bool]:
        """Make everything written before durable."""

    @property
    def queued(self) -> int:
        """Runs submitted and not ended."""

    def close(self) -> None:
        """Wait for operations under way, then let the drive go."""
