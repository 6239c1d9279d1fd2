"""Drives as kvikio reads them into memory of NVIDIA's GPUs.

Needs kvikio: import this module only where a client asked for such reads. With the kernel module nvidia-fs,
the drive writes to GPU memory. Otherwise kvikio reads into host memory of its own, and copies from there
(its compatibility mode).
"""

from __future__ import annotations

import os
from typing import Any

import kvikio


class KvikioFile:
    """kvikio's implementation of ``ostraca._direct.device_reads.DeviceFile``."""

    def __init__(self, descriptor: int) -> None:
        """Open the drive of *descriptor* again, for kvikio.

        The path names the open file itself, even if another file has taken its place.
        """
        self._descriptor = descriptor
        self._file = kvikio.CuFile(f"/proc/self/fd/{descriptor}", "r")

    def read(self, memory: Any, at: int, length: int, offset: int) -> None:  # noqa: ANN401 (as the port)
        """Read in this thread, as the port defines; ``pread`` would share one thread with all drives."""
        # In its compatibility mode, kvikio reads through the page cache, which may be older than the drive.
        # All of it goes: the kernel keeps large folios of which a range covers only a part.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        count = self._file.raw_read(memory[at : at + length], length, offset)
        if count != length:
            raise OSError(f"{count} of {length} bytes were read")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
