"""Path of a process to a simulated drive: ``ports.drive.Drive`` on the event loop's clock, virtual or real.

A reference engine of the process decides when an I/O reaches the drive. I/Os last a while there, and end in
any order. Several paths may lead to the same flash. ``SimulatedDrive.crash`` is the death of a process, for
the process's I/Os alone. ``SimulatedFlash.power_cut`` is for all I/Os that have reached the drive.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from tests.support.simulated.drives.device_drive import DeviceDrive
from tests.support.simulated.drives.drive_faults import Befell, Mishap
from tests.support.simulated.drives.reference_engine import Done, ReferenceEngine, ReferenceIo
from tests.support.simulated.drives.simulated_flash import SimulatedFlash, WriteUnderWay

from ostraca_fabric.drives.io_engine import IoOperation
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.model.ids import DriveId


class SimulatedDrive(DeviceDrive):
    """A path to *flash*. Every delay and every fate comes from the flash's dice."""

    def __init__(
        self,
        drive: DriveId,
        flash: SimulatedFlash,
        *,
        pieces_queued_max: int = 1 << 16,
        admits_its_cache: bool = True,
        engine: ReferenceEngine | None = None,
    ) -> None:
        """Open the path. A drive that does not admit a volatile cache has the cache all the same."""
        super().__init__(
            drive,
            flash.size_bytes,
            pieces_queued_max=pieces_queued_max,
            has_volatile_cache=flash.has_volatile_cache and admits_its_cache,
            engine=engine,
        )
        self.flash = flash
        self._writes: list[WriteUnderWay] = []

    def submit_write(
        self, pieces: Pieces, *, decided: int | None = None
    ) -> asyncio.Future[NDArray[np.bool_]]:
        """Write every piece, as defined by the port.

        *decided*: the flash's ``upcoming`` at the submitter's decision, if the decision came earlier.
        """
        number = self.flash.next_number()
        return self._submit(IoOperation.WRITE, pieces, user_data=number if decided is None else decided)

    def crash(self) -> None:
        """Cut off a dead process: the path reports nothing from now on.

        Pages of writes under way land in part now, or in part or all later. I/Os that the engine had not
        begun never reach the drive.
        """
        self.is_open, self.has_crashed = False, True
        faults, flash, loop = self.flash.faults, self.flash, asyncio.get_running_loop()
        for write in self._writes:
            write.stop()
            flash.under_way.remove(write)
            write.parts = [write.data]  # the process's memory is gone
            if flash.chance(faults.late):
                self._land_late(write, loop.time() + self._late_s())
            else:
                flash.land(
                    write.decided, write.begin, write.data, self._is_submitter_alive, whole_in=PAGE_BYTES
                )
        self._writes.clear()

    def begin(self, io: ReferenceIo, done: Done) -> None:
        """Have an I/O end after a delay. I/Os of a dead process never begin."""
        if self.has_crashed:
            return
        begins = {
            IoOperation.READ: self._read,
            IoOperation.WRITE: self._write,
            IoOperation.FLUSH: self._flush,
        }
        begins[io.operation](io, done)

    def _delay_s(self) -> float:
        faults, dice = self.flash.faults, self.flash.dice
        delay_s = faults.service_s * (0.5 + dice.random())
        return delay_s + (dice.uniform(0, faults.stall_s) if self.flash.chance(faults.stalls) else 0.0)

    def _late_s(self) -> float:
        faults = self.flash.faults
        return self.flash.dice.uniform(faults.late_from_s, faults.late_s)

    def _is_submitter_alive(self) -> bool:
        return self.is_open

    def _read(self, io: ReferenceIo, done: Done) -> None:
        begin, end, flash = io.offset, io.offset + io.size_bytes, self.flash
        cuts = flash.cuts

        def land() -> None:
            if self.has_crashed:
                return
            if cuts != flash.cuts:
                flash.mishaps.append(Mishap(Befell.POWER_CUT, begin, end))
                done(errno.EIO)
            else:
                done(None if flash.read(begin, end, io.parts) else errno.EIO)

        asyncio.get_running_loop().call_later(self._delay_s(), land)

    def _write(self, io: ReferenceIo, done: Done) -> None:
        loop, flash = asyncio.get_running_loop(), self.flash

        def land() -> None:
            self._writes.remove(write)
            flash.under_way.remove(write)
            is_good = flash.write(write.decided, write.begin, write.data, self._is_submitter_alive)
            if not is_good and flash.chance(flash.faults.late_failures):
                write.parts = [write.data]
                self._land_late(write, loop.time() + self._late_s())
            done(None if is_good else errno.EIO)

        def fail() -> None:
            self._writes.remove(write)
            loop.call_soon(done, errno.EIO)

        stop = loop.call_later(self._delay_s(), land).cancel
        write = WriteUnderWay(io.offset, io.parts, decided=io.user_data, stop=stop, fail=fail)
        self._writes.append(write)
        flash.under_way.append(write)

    def _flush(self, _: ReferenceIo, done: Done) -> None:
        mark = self.flash.flush_mark()

        def land() -> None:
            if not self.has_crashed:
                done(None if self.flash.flush(mark) else errno.EIO)

        asyncio.get_running_loop().call_later(self._delay_s(), land)

    def _land_late(self, write: WriteUnderWay, at_s: float) -> None:
        """Land a write without a report; a power cut may be sooner."""
        flash = self.flash
        orphan = replace(write, stop=_nothing, fail=_nothing)

        def land() -> None:
            flash.under_way.remove(orphan)
            whole_in = PAGE_BYTES if flash.dice.random() < _CUT_SHORT else 0
            flash.land(write.decided, write.begin, orphan.data, _nobody, whole_in=whole_in)

        orphan.stop = asyncio.get_running_loop().call_at(at_s, land).cancel
        flash.under_way.append(orphan)


_CUT_SHORT = 0.3
"""Share of late writes that land in part."""


def _nothing() -> None:
    """Report to no process."""


def _nobody() -> bool:
    return False
