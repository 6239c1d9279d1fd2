"""Files under a reference engine, with blocking calls on the event loop."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections import deque

from tests.support.simulated.drives.reference_engine import END_OF_DRIVE, Done, ReferenceEngine, ReferenceIo

from ostraca_fabric.drives.io_engine import IoOperation


class FileReferenceEngine(ReferenceEngine):
    """Reference engine for open files, in place of ``IoEngine``."""

    def attach(self, descriptor: int, size_bytes: int) -> int:
        """Add a drive at an open *descriptor*, as ``IoEngine.attach`` does."""
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        return self.add(PipeDevice(descriptor) if is_pipe else FileDevice(descriptor), size_bytes)


class FileDevice:
    """File or block device: I/Os are done at once."""

    def __init__(self, descriptor: int) -> None:
        """Use an open descriptor of the caller."""
        self._descriptor = descriptor

    def begin(self, io: ReferenceIo, done: Done) -> None:
        """Perform an I/O."""
        try:
            failure = self._move(io)
        except OSError as error:
            failure = error.errno or errno.EIO
        done(failure)

    def _move(self, io: ReferenceIo) -> int | None:
        if io.operation is IoOperation.FLUSH:
            os.fdatasync(self._descriptor)
            return None
        call = os.pwritev if io.operation is IoOperation.WRITE else os.preadv
        while io.moved < io.size_bytes:
            step = call(self._descriptor, _rest(io), io.offset + io.moved)
            if not step:
                return END_OF_DRIVE
            io.moved += step
        return None


class PipeDevice(FileDevice):
    """Pipe: reads wait for bytes, and take them in the order of the reads."""

    def __init__(self, descriptor: int) -> None:
        """Use an open descriptor of the caller."""
        super().__init__(descriptor)
        self._reads: deque[tuple[ReferenceIo, Done]] = deque()

    def begin(self, io: ReferenceIo, done: Done) -> None:
        """Perform a flush, or have a read wait."""
        if io.operation is not IoOperation.READ:
            super().begin(io, done)
            return
        if not self._reads:
            asyncio.get_running_loop().add_reader(self._descriptor, self._take)
        self._reads.append((io, done))

    def _take(self) -> None:
        io, done = self._reads[0]
        io.moved += os.readv(self._descriptor, _rest(io))
        if io.moved < io.size_bytes:
            return
        self._reads.popleft()
        if not self._reads:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        done(None)


def _rest(io: ReferenceIo) -> list[memoryview]:
    """Return the memory that is left to move."""
    rest, skipped = list[memoryview](), io.moved
    for part in io.parts:
        if skipped < len(part):
            rest.append(part[skipped:].data)
        skipped = max(0, skipped - len(part))
    return rest
