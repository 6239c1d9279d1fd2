"""Opener of block devices and files of this host."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ostraca_fabric.drives.file_drive import DriveSettings, FileDrive, LoopIoEngine
from ostraca_fabric.drives.flash_files import FlashFileError, open_flash
from ostraca_fabric.drives.io_engine import FlashIoSettings
from ostraca_fabric.errors import DriveError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.ports.paths import Namespace


class DeviceOpener:
    """Implements ``ports.opener.NamespaceOpener`` for paths in the file system."""

    initiator = "kernel"

    def __init__(self, settings: FlashIoSettings | None = None) -> None:
        """Start no engine before the first drive."""
        self._settings = settings or FlashIoSettings()
        self._engine: LoopIoEngine | None = None

    def open(self, drive: DriveId, device: str, *, flushes: bool = False) -> FileDrive:
        """Open a drive as the port defines, on the one engine of the process."""
        if self._engine is None:
            self._engine = LoopIoEngine(self._settings)
        settings = DriveSettings(has_volatile_cache=True if flushes else None)
        return FileDrive.open(drive, device, settings, engine=self._engine)

    @property
    def flash_io(self) -> str:
        """Return the way of flash I/O; empty before the first drive."""
        return "" if self._engine is None else self._engine.mode

    def close(self) -> None:
        """Stop the engine, with all drives closed."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @contextmanager
    def open_raw(self, namespace: Namespace, *, is_writable: bool = False) -> Iterator[_RawDevice]:
        """Open a drive for an inspection as the port defines."""
        flags = os.O_RDWR if is_writable else os.O_RDONLY
        try:
            descriptor = open_flash(namespace.device, flags | os.O_DIRECT)
        except FlashFileError as error:
            raise DriveError(f"the drive is not usable: {error}") from error
        try:
            size_bytes = os.lseek(descriptor, 0, os.SEEK_END)
            yield _RawDevice(descriptor, size_bytes // PAGE_BYTES * PAGE_BYTES)
        finally:
            os.close(descriptor)


class _RawDevice:
    """A device accessed past the page cache, in whole pages."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self.size_bytes = size_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Read whole pages. Raises DriveError."""
        with mmap.mmap(-1, length) as memory:
            try:
                count = os.preadv(self._descriptor, [memory], offset)
            except OSError as error:
                raise DriveError(f"read error at {offset}: {error.strerror}") from error
            if count != length:
                raise DriveError(f"the drive ends at {offset + count}, before its reported size")
            return memory[:]

    def write(self, offset: int, data: bytes) -> None:
        """Write whole pages durably. Raises DriveError."""
        with mmap.mmap(-1, len(data)) as memory:
            memory[:] = data
            try:
                count = os.pwritev(self._descriptor, [memory], offset)
                os.fsync(self._descriptor)
            except OSError as error:
                raise DriveError(f"write error at {offset}: {error.strerror}") from error
        if count != len(data):
            raise DriveError(f"only {count} of {len(data)} bytes were written")
