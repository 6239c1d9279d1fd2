"""Drive in memory, with faults planted by tests."""

from __future__ import annotations

import errno
from dataclasses import dataclass

import numpy as np
from tests.support.simulated.drives.device_drive import DeviceDrive
from tests.support.simulated.drives.reference_engine import Done, ReferenceIo

from ostraca_fabric.drives.io_engine import IoOperation
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.ids import DriveId


@dataclass(frozen=True, slots=True)
class _Fault:
    """Fault of I/Os that touch some bytes."""

    offset: int
    length: int
    fails_reads: bool
    written_bytes: int | None
    """Bytes of a write that arrive before the failure; None: writes are not concerned."""

    def touches(self, begin: int, end: int) -> bool:
        return begin < self.offset + self.length and self.offset < end


class MemoryDrive(DeviceDrive):
    """Implements ``ports.drive.Drive`` on the event loop's own thread, in the order of submission.

    An I/O is done at once, and the future resolves in a later turn of the loop. A fault befalls all pieces of
    an I/O, as with a drive of flash.
    """

    def __init__(
        self,
        drive: DriveId,
        size_bytes: int,
        *,
        pieces_queued_max: int = 1 << 16,
        has_volatile_cache: bool = False,
    ) -> None:
        assert size_bytes % PAGE_BYTES == 0, "a drive has whole pages"
        super().__init__(
            drive, size_bytes, pieces_queued_max=pieces_queued_max, has_volatile_cache=has_volatile_cache
        )
        self.bytes = bytearray(size_bytes)
        """Contents of the drive. Change them at will, as bit rot does."""

        self._faults: list[_Fault] = []

    def fail_reads(self, offset: int, length: int) -> None:
        """Fail every read of these bytes from now on."""
        self._faults.append(_Fault(offset, length, fails_reads=True, written_bytes=None))

    def fail_writes(self, offset: int, length: int, *, written_bytes: int = 0) -> None:
        """Fail every write of these bytes from now on. The first *written_bytes* arrive: a torn write."""
        self._faults.append(_Fault(offset, length, fails_reads=False, written_bytes=written_bytes))

    def flip_bit(self, offset: int, bit: int = 0) -> None:
        """Change a bit on the drive."""
        self.bytes[offset] ^= 1 << bit

    def mend(self) -> None:
        """Take the planted faults away."""
        self._faults.clear()

    def begin(self, io: ReferenceIo, done: Done) -> None:
        """Perform an I/O, or a planted fault."""
        at, end = io.offset, io.offset + io.size_bytes
        faults = [fault for fault in self._faults if fault.touches(at, end)]
        if io.operation is IoOperation.READ:
            if any(fault.fails_reads for fault in faults):
                done(errno.EIO)
                return
            for part in io.parts:
                part[:] = np.frombuffer(self.bytes, np.uint8, len(part), at)
                at += len(part)
            done(None)
        elif io.operation is IoOperation.WRITE:
            torn = [fault.written_bytes for fault in faults if fault.written_bytes is not None]
            arrives = min(torn, default=io.size_bytes)
            self.bytes[at : at + arrives] = np.concatenate(io.parts).tobytes()[:arrives]
            done(errno.EIO if torn else None)
        else:
            done(None)  # memory is as durable as it gets
