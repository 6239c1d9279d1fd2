"""Opener of drives at their present place on this host: a device, a file, or a network path."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.paths import Namespace


class RawDrive(Protocol):
    """Drive accessed past any cache, in whole pages. Blocks: use in a thread."""

    size_bytes: int

    def read(self, offset: int, length: int) -> bytes:
        """Read whole pages. Raises DriveError."""

    def write(self, offset: int, data: bytes) -> None:
        """Write whole pages durably. Raises DriveError."""


class NamespaceOpener(Protocol):
    """Opener of the drives that ``Paths`` lists."""

    initiator: str
    """Host side of NVMe-oF for these drives: ``kernel`` or ``userspace``."""

    @property
    def flash_io(self) -> str:
        """Way of flash I/O: ``io_uring``, ``threads``, or empty for neither."""

    def open(self, drive: DriveId, device: str, *, flushes: bool = False) -> Drive:
        """Open the drive at *device* as *drive*; with *flushes*, files are flushed too.

        Raises DriveError with the reason for an unusable drive.
        """

    def open_raw(
        self, namespace: Namespace, *, is_writable: bool = False
    ) -> AbstractContextManager[RawDrive]:
        """Open a drive for an inspection, until the end of the context. Raises DriveError."""

    def close(self) -> None:
        """Stop threads of the opener, with all drives closed."""
