"""The library kvikio, which this machine lacks: real reads of files into memory of stand-in devices."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

ADAPTER = "ostraca._direct.kvikio_file"


class StandInKvikio:
    """Stands for the module. Files named in ``hangs`` are read only after ``release``."""

    def __init__(self) -> None:
        self.opened = 0
        self.open = 0
        self.reads: list[tuple[int, int]] = []
        """Offset and length of each read so far, in the order of their begin."""
        self.error = ""
        """Message of all reads' errors; empty for none."""
        self.loses_bytes = 0
        """Bytes that each read leaves out at its end."""
        self.cached: list[bool] = []
        """For each read, whether its first page was in the page cache, where the kernel tells."""
        self._hangs: set[int] = set()
        self._may_read = threading.Event()
        self.news = threading.Condition()

    def hang(self, path: Path) -> None:
        self._hangs.add(path.stat().st_ino)

    def release(self) -> None:
        self._may_read.set()

    def wait_reads(self, count: int) -> None:
        """Wait for the begin of so many reads."""
        with self.news:
            assert self.news.wait_for(lambda: len(self.reads) >= count, 30)

    def begin_read(self, descriptor: int, offset: int, length: int) -> None:
        with self.news:
            self.reads.append((offset, length))
            self.cached.append(is_cached(descriptor, offset))
            self.news.notify_all()
        if os.fstat(descriptor).st_ino in self._hangs:
            assert self._may_read.wait(30)


class StandInCuFile:
    """Stands for ``kvikio.CuFile``, with the errors of its compatibility mode."""

    def __init__(self, library: StandInKvikio, path: str, flags: str) -> None:
        assert flags == "r"
        self._library = library
        self._descriptor = os.open(path, os.O_RDONLY)
        library.opened += 1
        library.open += 1

    def raw_read(self, buf: NDArray[np.uint8], size: int, file_offset: int = 0, dev_offset: int = 0) -> int:
        if size > buf.nbytes:
            raise ValueError("Size is greater than the size of the buffer")
        self._library.begin_read(self._descriptor, file_offset, size)
        if self._library.error:
            raise RuntimeError(self._library.error)
        target, done = buf[dev_offset : dev_offset + size - self._library.loses_bytes], 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:].data], file_offset + done)
            if not count:
                raise RuntimeError("KvikIO failure at: posix_io.hpp: POSIX error on pread: EOF")
            done += count
        return done

    def close(self) -> None:
        os.close(self._descriptor)
        self._library.open -= 1


def is_cached(descriptor: int, offset: int) -> bool:
    """Whether a byte of a file is in the page cache; False where the kernel does not tell."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:
        return False


@contextmanager
def kvikio_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInKvikio]:
    """Let the adapter import the stand-in."""
    library, module = StandInKvikio(), ModuleType("kvikio")
    module.CuFile = lambda path, flags: StandInCuFile(library, path, flags)  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "kvikio", module)
        patch.delitem(sys.modules, ADAPTER, raising=False)
        try:
            yield library
        finally:
            library.release()
            sys.modules.pop(ADAPTER, None)
