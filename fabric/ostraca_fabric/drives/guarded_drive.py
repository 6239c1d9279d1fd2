"""Drive with health supervision by one agent.

Every operation passes here and reports begin and end to ``drive_health``. Operations refused by the health
are not submitted: their future is done at once, as failed. Submitted operations are never delayed here; their
future is the drive's own.

While operations are in progress, a timer checks for overdue ones: a hanging drive sends no sign. While reads
are held off, the timer occasionally reads one page as a probe. Each probe uses another part of the drive,
because one page may be bad.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.drives.drive_health import DriveCondition, DriveHealth, HealthSettings, IoKind
from ostraca_fabric.model.extent import PAGE_BYTES, Pieces
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.tables.digests import TagCheck
from ostraca_fabric.telemetry.status import DriveStatus

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_PROBED_PARTS = 8


class GuardedDrive:
    """Implements ``ports.drive.Drive`` around another drive. Lives on one event loop."""

    def __init__(self, drive: Drive, settings: HealthSettings, clock: Callable[[], float]) -> None:
        """Watch *drive*; *clock* is monotonic, in seconds, of the event loop's time."""
        self.id = drive.id
        self.size_bytes = drive.size_bytes
        self.is_file = drive.is_file
        self.health = DriveHealth(settings.for_files() if drive.is_file else settings)
        self._drive = drive
        self._clock = clock
        self._turn: asyncio.TimerHandle | None = None
        self._given_up: dict[IoKind, asyncio.Future[None]] = {}
        self._checks: dict[int, TagCheck] = {}
        """Checked reads in progress, by number."""

        self._checked = 0
        """Pieces of these reads that were read at the last turn."""

        self._probes = 0
        self._is_closed = False
        self.is_identified = True
        """Whether the drive's identity is confirmed: otherwise writes are refused."""

        self.displacement = ""
        """Change of the drive's file while open, as the predicate of a sentence; see ``look``."""

    @property
    def has_volatile_cache(self) -> bool:
        """Whether a power cut can lose written pages."""
        return self._drive.has_volatile_cache

    @property
    def queued(self) -> int:
        """Pieces submitted and not ended, by all users of the drive."""
        return self._drive.queued

    @property
    def refuses_reads(self) -> bool:
        """Whether reads fail at once for now."""
        return self.health.refuses_reads

    @property
    def refuses_writes(self) -> bool:
        """Whether new writes should go elsewhere for now."""
        return not self.is_identified or self.health.refuses_writes(self._clock())

    @property
    def reads_given_up(self) -> asyncio.Future[None]:
        """Future that is done once the drive leaves current reads unanswered."""
        return self._when_given_up(IoKind.READ)

    @property
    def writes_given_up(self) -> asyncio.Future[None]:
        """Future that is done once the drive leaves current writes or flushes unanswered."""
        return self._when_given_up(IoKind.WRITE)

    def submit_read(self, pieces: Pieces, check: TagCheck | None = None) -> asyncio.Future[NDArray[np.bool_]]:
        """Read every piece, as defined by the port; fails while reads are held off.

        A damaged block is no failure of the drive until the shard owner confirms the damage.
        """
        number = self._begin(IoKind.READ, pieces)
        if number is None:
            return _refused(np.zeros(len(pieces), np.bool_))
        return self._watched(number, self._drive.submit_read(pieces, check), pieces, check)

    def submit_write(self, pieces: Pieces) -> asyncio.Future[NDArray[np.bool_]]:
        """Write every piece, as defined by the port.

        Fails while writes are held off, or without a confirmed identity.
        """
        number = self._begin(IoKind.WRITE, pieces) if self.is_identified else None
        if number is None:
            return _refused(np.zeros(len(pieces), np.bool_))
        return self._watched(number, self._drive.submit_write(pieces), pieces, None)

    def submit_flush(self) -> asyncio.Future[bool]:
        """Make all earlier writes durable, as defined by the port; fails while writes are held off."""
        number = None if self._is_closed else self.health.begin(self._clock(), IoKind.WRITE, 0)
        if number is None:
            return _refused(False)  # noqa: FBT003 - the result
        flushed = self._drive.submit_flush()
        flushed.add_done_callback(partial(self._flushed, number))
        self._see_to_turns()
        return flushed

    def submit_look(self) -> asyncio.Future[str | None]:
        """Compare the drive with the state a restart would find, as defined by the port."""
        return self._drive.submit_look()

    async def look(self) -> None:
        """Check the drive's file and log changes. Waits for the drive."""
        if self._is_closed:
            return
        found = await self.submit_look()
        if found is None or found == self.displacement:
            return
        self.displacement = found
        if found:
            log.warning("Drive %s %s", self.id, found)
        else:
            log.info("Drive %s lies at its place again", self.id)

    @property
    def why(self) -> str:
        """Defect of the drive, as the predicate of a sentence; empty for a healthy drive."""
        why = self.health.why
        if not self.displacement:
            return why
        return f"{why}; it {self.displacement}" if why else self.displacement

    def note_damage(self, offset: int) -> None:
        """Count a damaged block at *offset*, found by its shard owner."""
        self.health.damage(self._clock(), offset)
        self._tell()

    def status(self) -> DriveStatus:
        """Return the current health of the drive."""
        health = self.health
        counted = health.counted
        return DriveStatus(
            drive=self.id,
            condition=health.condition.value,
            why=self.why,
            reads_held_off=health.held_off(IoKind.READ),
            writes_held_off=health.held_off(IoKind.WRITE),
            faults=health.faults(self._clock()),
            failed_reads=counted["reads"],
            failed_writes=counted["writes"],
            silences=counted["silences"],
            damaged_blocks=counted["damaged"],
            refused=counted["refused"],
            queued_blocks=self.queued,
        )

    def close(self) -> None:
        """Wait for operations in progress, then close the drive."""
        self.unwatch()
        self._drive.close()

    def unwatch(self) -> None:
        """End supervision, refuse new operations, and leave the drive open for its owner to close.

        Operations in progress are given up, as a hang would remain undetected.
        """
        self._is_closed = True
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._give_up(IoKind)

    def _when_given_up(self, kind: IoKind) -> asyncio.Future[None]:
        if kind not in self._given_up:
            self._given_up[kind] = asyncio.get_running_loop().create_future()
        return self._given_up[kind]

    def _give_up(self, kinds: Iterable[IoKind]) -> None:
        for kind in kinds:
            waited_for = self._given_up.pop(kind, None)
            if waited_for is not None:
                waited_for.set_result(None)

    def _begin(self, kind: IoKind, pieces: Pieces) -> int | None:
        if self._is_closed:
            return None
        return self.health.begin(self._clock(), kind, int(pieces.lengths.sum(dtype=np.int64)))

    def _watched(
        self,
        number: int,
        ends: asyncio.Future[NDArray[np.bool_]],
        pieces: Pieces,
        check: TagCheck | None,
    ) -> asyncio.Future[NDArray[np.bool_]]:
        if ends.done():  # not submitted: no pieces, or a full queue
            self.health.withdraw(number)
            return ends
        if check is not None:
            self._checks[number] = check
        ends.add_done_callback(partial(self._ended, number, pieces, check))
        self._see_to_turns()
        return ends

    def _ended(
        self,
        number: int,
        pieces: Pieces,
        check: TagCheck | None,
        ends: asyncio.Future[NDArray[np.bool_]],
    ) -> None:
        self._checks.pop(number, None)
        # A caller may have cancelled the future, against the rules of the port: the result is unknown.
        good = None if ends.cancelled() else ends.result()
        if good is not None and check is not None and not good.all():
            good = check.was_read
        if good is None or good.all():
            self.health.end(self._clock(), number, is_good=True)
        else:
            failed_at = int(pieces.drive_offsets[int(np.argmin(good))])
            self.health.end(self._clock(), number, is_good=False, failed_at=failed_at)
        self._tell()

    def _flushed(self, number: int, flushed: asyncio.Future[bool]) -> None:
        self.health.end(self._clock(), number, is_good=flushed.cancelled() or flushed.result(), is_flush=True)
        self._tell()

    def _see_to_turns(self) -> None:
        if self._turn is None and not self._is_closed and self.health.needs_turns:
            self._turn = asyncio.get_running_loop().call_later(self.health.turn_every_s, self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        now_s = self._clock()
        self._hear_progress()
        self._give_up(self.health.turn(now_s))
        self._tell()
        if self.health.is_probe_due(now_s) and not self._is_closed:
            self._probe(now_s)
        self._see_to_turns()

    def _hear_progress(self) -> None:
        """Hear the drive if reads in progress have advanced since the last turn."""
        checked = sum(int(np.count_nonzero(check.states)) for check in self._checks.values())
        if checked > self._checked:
            self.health.hear()
        self._checked = checked

    def _probe(self, now_s: float) -> None:
        """Read a page as a trial: the first page of each part of the drive in turn."""
        number = self.health.begin(now_s, IoKind.READ, PAGE_BYTES, is_probe=True)
        assert number is not None, "a probe that is due may begin"
        part_bytes = self.size_bytes // _PROBED_PARTS // PAGE_BYTES * PAGE_BYTES
        at = self._probes % _PROBED_PARTS * part_bytes
        self._probes += 1
        page = Pieces.one(np.frombuffer(mmap.mmap(-1, PAGE_BYTES), np.uint8), drive_offset=at)
        ends = self._drive.submit_read(page)
        if ends.done():
            self.health.end(now_s, number, is_good=False)
        else:
            ends.add_done_callback(partial(self._ended, number, page, None))

    def _tell(self) -> None:
        for said in self.health.take_messages():
            level = logging.ERROR if self.health.condition is DriveCondition.FAILED else logging.WARNING
            log.log(level, "Drive %s %s", self.id, said)
        self._see_to_turns()


def _refused(result: _Result) -> asyncio.Future[_Result]:
    refused: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
    refused.set_result(result)
    return refused
