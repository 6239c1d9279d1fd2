"""One process's path to a simulated drive: ``ports.drive.Drive`` on the event loop's clock, virtual or real.

What is submitted takes its time, and writes end in any order. Several paths may lead to one flash. The death
of a process is ``crash``, and touches what it has submitted; a power cut is the flash's own, and touches what
everybody has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from tests.support.simulated.drives.drive_faults import Befell, Mishap
from tests.support.simulated.drives.joined import io_of, ios, resolve
from tests.support.simulated.drives.simulated_flash import SimulatedFlash, WriteUnderWay

from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.tables.digests import TagCheck

_Ends = NDArray[np.bool_]


class _Batch:
    """The I/Os of one call; its future resolves with the last of them."""

    def __init__(self, pieces: int, on_end: Callable[[int], None]) -> None:
        self.future: asyncio.Future[_Ends] = asyncio.get_running_loop().create_future()
        self.left = 0
        self._ends = np.zeros(pieces, np.bool_)
        self._on_end = on_end

    def end(self, rows: slice, says: _Ends | bool) -> None:
        self._ends[rows] = says
        self.left -= 1
        self._on_end(rows.stop - rows.start)
        if not self.left:
            resolve(self.future, self._ends)


class SimulatedDrive:
    """A path to *flash*. Every delay and every fate comes from the flash's dice."""

    refuses_reads = False
    refuses_writes = False
    reads_given_up = writes_given_up = None

    def __init__(
        self,
        drive: DriveId,
        flash: SimulatedFlash,
        *,
        pieces_queued_max: int = 1 << 16,
        admits_its_cache: bool = True,
    ) -> None:
        """Open it. One that does not admit a volatile cache has it all the same."""
        self.id = drive
        self.flash = flash
        self.size_bytes = flash.size_bytes
        self.has_volatile_cache = flash.has_volatile_cache and admits_its_cache
        self.is_file = False
        self.is_alive = True
        self._pieces_queued_max = pieces_queued_max
        self._queued = 0
        self._writes: dict[int, WriteUnderWay] = {}

    @property
    def queued(self) -> int:
        """Pieces submitted and not ended."""
        return self._queued

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[_Ends]:
        """Read every piece, as the port says."""
        batch, rows_of_ios = self._begin(pieces)
        for rows in rows_of_ios:
            self._read(batch, pieces, rows, check)
        return batch.future

    def submit_write(self, pieces: Pieces, *, decided: int | None = None) -> asyncio.Future[_Ends]:
        """Write every piece, as the port says.

        *decided*: the flash's ``upcoming`` when the submitter decided on it, where that was before.
        """
        batch, rows_of_ios = self._begin(pieces)
        for rows in rows_of_ios:
            self._write(batch, pieces, rows, decided)
        return batch.future

    def submit_look(self) -> asyncio.Future[str | None]:
        """Do nothing: simulated flash has no other contents."""
        looked: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        looked.set_result("")
        return looked

    def submit_flush(self) -> asyncio.Future[bool]:
        """Make durable what was answered before."""
        assert self.is_alive, "the drive is closed"
        loop = asyncio.get_running_loop()
        flushed: asyncio.Future[bool] = loop.create_future()
        mark = self.flash.flush_mark()

        def end() -> None:
            if self.is_alive:
                resolve(flushed, self.flash.flush(mark))

        loop.call_later(self._delay_s(), end)
        return flushed

    def close(self) -> None:
        """Take nothing more."""
        self.is_alive = False

    def crash(self) -> None:
        """Cut off a dead process: the path reports nothing to it any more.

        Of what it was writing some pages land, now, or all or some of them later.
        """
        self.is_alive = False
        faults, flash, loop = self.flash.faults, self.flash, asyncio.get_running_loop()
        for number, write in self._writes.items():
            write.stop()
            flash.under_way.pop(number, None)
            write.parts = [write.data]  # the process's memory is gone: this is what was on its way
            if flash.chance(faults.late):
                self._land_late(write, loop.time() + self._late_s())
            else:
                flash.land(
                    write.decided, write.begin, write.data, self._is_submitter_alive, whole_in=PAGE_BYTES
                )
        self._writes.clear()

    def _is_submitter_alive(self) -> bool:
        return self.is_alive

    def _begin(self, pieces: Pieces) -> tuple[_Batch, list[slice]]:
        """Return the I/Os to do; none where the queue is full or nothing is asked for."""
        assert self.is_alive, "the drive is closed"
        pieces.check()
        batch = _Batch(len(pieces), self._ended)
        if not len(pieces) or self._queued + len(pieces) > self._pieces_queued_max:
            batch.future.set_result(np.zeros(len(pieces), np.bool_))
            return batch, []
        self._queued += len(pieces)
        rows_of_ios = ios(pieces)
        batch.left = len(rows_of_ios)
        return batch, rows_of_ios

    def _ended(self, pieces: int) -> None:
        self._queued -= pieces

    def _delay_s(self) -> float:
        faults, dice = self.flash.faults, self.flash.dice
        delay_s = faults.service_s * (0.5 + dice.random())
        return delay_s + (dice.uniform(0, faults.stall_s) if self.flash.chance(faults.stalls) else 0.0)

    def _late_s(self) -> float:
        faults = self.flash.faults
        return self.flash.dice.uniform(faults.late_from_s, faults.late_s)

    def _read(self, batch: _Batch, pieces: Pieces, rows: slice, check: TagCheck | None) -> None:
        begin, end, parts = io_of(pieces, rows)
        cuts = self.flash.cuts

        def done() -> None:
            if not self.is_alive:
                return
            if cuts != self.flash.cuts:
                self.flash.mishaps.append(Mishap(Befell.POWER_CUT, begin, end))
                batch.end(rows, says=False)
            elif end > self.size_bytes or not self.flash.read(begin, end, parts):
                batch.end(rows, says=False)
            else:
                batch.end(rows, check.run(rows) if check is not None else True)

        asyncio.get_running_loop().call_later(self._delay_s(), done)

    def _write(self, batch: _Batch, pieces: Pieces, rows: slice, decided: int | None) -> None:
        begin, end, parts = io_of(pieces, rows)
        loop, flash = asyncio.get_running_loop(), self.flash
        number = flash.next_number()

        def done() -> None:
            if end > self.size_bytes:
                batch.end(rows, says=False)
                return
            self._forget(number)
            is_good = flash.write(write.decided, begin, write.data, self._is_submitter_alive)
            if not is_good and flash.chance(flash.faults.late_failures):
                write.parts = [write.data]
                self._land_late(write, loop.time() + self._late_s())
            batch.end(rows, says=is_good)

        def fail() -> None:
            self._writes.pop(number, None)
            loop.call_soon(lambda: batch.end(rows, says=False))

        timer = loop.call_later(self._delay_s(), done)
        write = WriteUnderWay(
            number,
            begin,
            parts,
            decided=number if decided is None else decided,
            stop=timer.cancel,
            fail=fail,
        )
        if end <= self.size_bytes:
            self._writes[number] = flash.under_way[number] = write

    def _forget(self, number: int) -> None:
        self._writes.pop(number, None)
        self.flash.under_way.pop(number, None)

    def _land_late(self, write: WriteUnderWay, at_s: float) -> None:
        """Land a write of which nobody hears any more; a power cut may be sooner."""
        flash = self.flash
        orphan = replace(write, stop=_nothing, fail=_nothing)

        def land() -> None:
            flash.under_way.pop(write.number, None)
            whole_in = PAGE_BYTES if flash.dice.random() < _CUT_SHORT else 0
            flash.land(write.decided, write.begin, orphan.data, _nobody, whole_in=whole_in)

        orphan.stop = asyncio.get_running_loop().call_at(at_s, land).cancel
        flash.under_way[write.number] = orphan


_CUT_SHORT = 0.3
"""Of writes that land late: in part."""


def _nothing() -> None:
    """Nobody is told."""


def _nobody() -> bool:
    return False
