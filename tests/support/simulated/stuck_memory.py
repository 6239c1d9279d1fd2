"""Memory that whoever touches waits for: a stand-in for a device that does not answer a blocking call."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct
from typing import Self

import numpy as np
import pytest
from numpy.typing import NDArray

_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_API = 0xC018AA3F
_REGISTER = 0xC020AA00
_ZERO = 0xC020AA04
_MODE_MISSING = 1
_VERSION = 0xAA


class StuckMemory:
    """Pages without contents until ``release``: a thread that touches them sleeps in userfaultfd(2)."""

    def __init__(self, size_bytes: int, *, within: NDArray[np.uint8] | None = None) -> None:
        """Map the memory, or take whole pages *within* other memory, and drop their contents.

        Skips the test where the kernel refuses userfaultfd.
        """
        number = _USERFAULTFD.get(platform.machine(), -1)
        self._descriptor = ctypes.CDLL(None, use_errno=True).syscall(number, os.O_CLOEXEC)
        if self._descriptor < 0:
            pytest.skip(f"userfaultfd: {os.strerror(ctypes.get_errno())}")
        self.array = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8) if within is None else within
        address = ctypes.c_void_p(self.array.ctypes.data)
        assert not ctypes.CDLL(None).madvise(address, ctypes.c_size_t(size_bytes), mmap.MADV_DONTNEED)
        fcntl.ioctl(self._descriptor, _API, struct.pack("QQQ", _VERSION, 0, 0))
        fcntl.ioctl(
            self._descriptor,
            _REGISTER,
            struct.pack("QQQQ", self.array.ctypes.data, size_bytes, _MODE_MISSING, 0),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release_first(self, size_bytes: int) -> None:
        """Let sleepers on the first pages go on, with memory of zeroes."""
        fcntl.ioctl(self._descriptor, _ZERO, struct.pack("QQQq", self.array.ctypes.data, size_bytes, 0, 0))

    def release(self) -> None:
        """Let all sleepers go on, with memory of zeroes."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
