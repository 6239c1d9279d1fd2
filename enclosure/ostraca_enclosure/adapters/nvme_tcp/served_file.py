"""File behind a namespace, open while a command uses the file."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ostraca_enclosure.drives import uuid_of
from ostraca_enclosure.plan import Export
from ostraca_enclosure.ports import ExportError
from ostraca_fabric.drives.flash_files import FlashFileError, open_flash
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.sockets.nvme_tcp.identities import NamespaceIdentity, encode_descriptors


class ServedFile:
    """Open drive, shared by all connections."""

    def __init__(self, export: Export) -> None:
        """Open the drive of *export*. Raises ExportError."""
        try:
            self._descriptor = open_flash(export.device, os.O_RDWR | os.O_DIRECT)
        except FlashFileError as error:
            raise ExportError(f"the drive can't be exported: {error}") from error
        size_bytes = os.lseek(self._descriptor, 0, os.SEEK_END)
        self.export = export
        self.identity = NamespaceIdentity(export.nguid, size_bytes // PAGE_BYTES, PAGE_BYTES)
        self._changing = threading.Lock()
        self._users = 1  # the subsystem, until ``close``

    @property
    def descriptors(self) -> bytes:
        """Return the identification descriptors of the namespace."""
        return encode_descriptors(self.export.nguid, uuid_of(self.export.nguid))

    @contextmanager
    def used(self) -> Iterator[int]:
        """Yield the descriptor, open until the end of the context. Raises OSError once closed."""
        with self._changing:
            if not self._users:
                raise FileNotFoundError(f"{self.export.device} is exported no more")
            self._users += 1
        try:
            yield self._descriptor
        finally:
            self._release()

    def close(self) -> None:
        """End the export; the last command in progress closes the file."""
        self._release()

    def _release(self) -> None:
        with self._changing:
            self._users -= 1
            if not self._users:
                os.close(self._descriptor)
