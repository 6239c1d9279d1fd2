"""Health of a drive as seen by one agent: responsive now, and trustworthy. Pure.

Two independent states:

- **Breakers**, one for reads and one for writes. A breaker opens after consecutive failures or a long silence
  of the drive, and shuts after a successful trial: seconds. While a breaker is open, its operations are not
  begun, so a hanging drive holds no more memory than at the time of detection.
- **Condition**: GOOD, SUSPECT, FAILED, from *faults* within a window of half an hour. A SUSPECT drive takes
  no new blocks, but is read as before; after some time without a fault it is GOOD again. A FAILED drive is
  not used until the agent restarts.

Faults are: a failed read, a damaged block found by the shard owner, a silence, a failed trial read, and the
opening of the breaker for writes. Failures in one place count once, because repeated reads of a bad sector
add no information. Failures with an open breaker do not count, because a lost path fails all operations in
progress. So a dead path soon makes a drive SUSPECT, and FAILED only after about half an hour. Other write
failures are no faults: a full or worn-out drive can be read, and the open breaker keeps new blocks away.

The caller reports begin and end of operations. While operations are in progress or a breaker is open, the
caller calls ``turn`` several times within ``overdue_s``. After a stop of the caller's process, a late turn
counts only one turn's silence.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Final

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.limits import check_above_zero
from ostraca_fabric.policies.circuit_breaker import Breaker, BreakerSettings

PLACE_BYTES: Final = 4 << 20
"""Faults within this distance on a drive are one fault. A misdirected write of a whole wave damages four such
places, an overwritten segment sixteen."""


class DriveCondition(Enum):
    """Trustworthiness of a drive."""

    GOOD = "good"
    SUSPECT = "suspect"
    FAILED = "failed"


class IoKind(StrEnum):
    """Kind of an operation."""

    READ = "read"
    WRITE = "write"
    """Or flush."""


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """When an agent stops using a drive. A false alarm costs recomputing; only FAILED stays."""

    overdue_s: float = 0.2
    """Longest silence of a drive with pending reads and no writes. Healthy flash answers within a few ms.
    Files have ``file_overdue_s``."""

    write_overdue_s: float = 1.0
    """The same with pending writes: garbage collection of flash and journals of file systems take longer."""

    file_overdue_s: float = 1.0
    """``overdue_s`` of a drive that is a file, unless ``overdue_s`` is longer. Writeback delays reads on a
    shared disk. Raise the limit for files on spinning disks."""

    file_write_overdue_s: float = 2.0
    """``write_overdue_s`` of a drive that is a file, unless ``write_overdue_s`` is longer."""

    slow_bytes_s: float = 50e6
    """Transfer rate below which a drive counts as silent: an operation's bytes extend both limits at this
    rate."""

    stuck_s: float = 5.0
    """Longest time that one operation may outlast an operation begun later."""

    breaker: BreakerSettings = field(default_factory=BreakerSettings)

    window_s: float = 1800.0
    """Time that a fault counts against a drive."""

    suspect_faults: int = 8
    """Faults within the window that make a drive SUSPECT. A few bad sectors over years do not."""

    failed_faults: int = 64
    """Faults within the window that make a drive FAILED: more than a dead path causes in a quarter of an hour
    of an enclosure's start, with trials 30 s apart."""

    clean_s: float = 600.0
    """Time after the last fault until a SUSPECT drive is GOOD again."""

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        check_above_zero(self, "window_s")
        if not 0 < self.suspect_faults <= self.failed_faults:
            raise UsageError(
                f"suspect_faults is {self.suspect_faults} and failed_faults {self.failed_faults}: the first "
                "is at least 1, and the second no smaller"
            )
        silences = self.overdue_s, self.write_overdue_s, self.file_overdue_s, self.file_write_overdue_s
        if min(*silences, self.slow_bytes_s, self.stuck_s) <= 0:
            raise UsageError(
                "overdue_s, write_overdue_s, file_overdue_s, file_write_overdue_s, slow_bytes_s and stuck_s "
                "are times and a rate above 0"
            )

    def for_files(self) -> HealthSettings:
        """Return the settings of a drive that is a file: the longer limit of each pair."""
        return replace(
            self,
            overdue_s=max(self.overdue_s, self.file_overdue_s),
            write_overdue_s=max(self.write_overdue_s, self.file_write_overdue_s),
        )


@dataclass(slots=True)
class _Operation:
    kind: IoKind
    begun_heard_s: float
    move_s: float
    """Allowance for the transfer of the operation's bytes."""

    is_trial: bool
    overtaken_heard_s: float | None = None
    """Listening time at which a later operation was first seen to have ended."""


class DriveHealth:
    """Health of one drive, as seen by one agent."""

    def __init__(self, settings: HealthSettings) -> None:
        """Begin with a good drive."""
        self._settings = settings
        self.condition = DriveCondition.GOOD
        self.counted: Counter[str] = Counter()
        """Counts since the start of the agent: failed ``reads``, failed ``writes``, ``silences``, ``damaged``
        blocks, and ``refused`` operations."""

        self._breakers = {kind: Breaker(settings.breaker) for kind in IoKind}
        self._reads, self._writes = self._breakers[IoKind.READ], self._breakers[IoKind.WRITE]
        self._faults: dict[int | str, float] = {}
        """Time of the last failure of each place, and of each fault without a place. Bounded by
        ``failed_faults``: a FAILED drive gets no more."""

        self._fault_s = 0.0
        self._watched: dict[int, _Operation] = {}
        self._given_up: dict[int, _Operation] = {}
        """Also in progress, with the silence already counted."""

        self._begun = self._newest_ended = 0
        self._turn_s = 0.0
        self._heard_s = 0.0
        """Total listening time of all turns: the clock for overdue operations."""

        self._ended_heard_s = 0.0
        self._why = ""
        self._said: list[str] = []

    @property
    def turn_every_s(self) -> float:
        """Interval for calls of ``turn``."""
        return self._settings.overdue_s / 4

    @property
    def needs_turns(self) -> bool:
        """Whether ``turn`` has work."""
        if self.condition is DriveCondition.FAILED:  # no new operations, but callers wait for the rest
            return bool(self._watched)
        return bool(self._watched) or self.held_off(IoKind.READ) or self.condition is DriveCondition.SUSPECT

    @property
    def why(self) -> str:
        """Defect of the drive, as the predicate of a sentence; empty for a healthy drive."""
        is_well = self.condition is DriveCondition.GOOD and self._reads.is_shut and self._writes.is_shut
        return "" if is_well else self._why

    @property
    def refuses_reads(self) -> bool:
        """Whether reads fail at once."""
        return self.condition is DriveCondition.FAILED or not self._reads.is_shut

    def refuses_writes(self, now_s: float) -> bool:
        """Whether new blocks should go elsewhere now. False also if a write is due as a trial."""
        breaker = self._breakers[IoKind.WRITE]
        return self.condition is not DriveCondition.GOOD or not (
            breaker.is_shut or breaker.is_trial_due(now_s)
        )

    def held_off(self, kind: IoKind) -> bool:
        """Whether the breaker is open."""
        return not self._breakers[kind].is_shut

    def faults(self, now_s: float) -> int:
        """Count the faults within the window."""
        oldest_s = now_s - self._settings.window_s
        if any(at_s < oldest_s for at_s in self._faults.values()):
            self._faults = {place: at_s for place, at_s in self._faults.items() if at_s >= oldest_s}
        return len(self._faults)

    def begin(self, now_s: float, kind: IoKind, size_bytes: int, *, is_probe: bool = False) -> int | None:
        """Begin an operation; return its number for ``end``, or None if refused.

        A probe is a trial read; begin a probe when ``is_probe_due``.
        """
        breaker = self._breakers[kind]
        is_trial = is_probe or (kind is IoKind.WRITE and breaker.is_trial_due(now_s))
        if self.condition is DriveCondition.FAILED or not (breaker.is_shut or is_trial):
            self.counted["refused"] += 1
            return None
        if is_trial:
            breaker.begin_trial()
        if not self._watched:
            self._ended_heard_s, self._turn_s = self._heard_s, now_s
        self._begun += 1
        move_s = size_bytes / self._settings.slow_bytes_s
        self._watched[self._begun] = _Operation(kind, self._heard_s, move_s, is_trial)
        return self._begun

    def is_probe_due(self, now_s: float) -> bool:
        """Whether to try a small read now, without a waiting request."""
        return self.condition is not DriveCondition.FAILED and self._breakers[IoKind.READ].is_trial_due(now_s)

    def end(
        self, now_s: float, number: int, *, is_good: bool, failed_at: int = 0, is_flush: bool = False
    ) -> None:
        """Record the end of an operation.

        *failed_at*: position of the first failed piece on the drive. A single failed flush opens the breaker:
        any earlier write may be lost.
        """
        operation = self._given_up.pop(number, None) or self._watched.pop(number)
        self._ended_heard_s = self._heard_s
        self._newest_ended = max(self._newest_ended, number)
        kind, breaker = operation.kind, self._breakers[operation.kind]
        if not is_good:
            self.counted[f"{kind.value}s"] += 1
        if operation.is_trial:
            breaker.end_trial(now_s, is_good=is_good)
            if is_good:
                self._say(f"answers again: {kind.value}s go on")
            elif kind is IoKind.READ:
                self._fault(now_s, f"read {self.counted['reads']}", "a trial read failed")
        elif not is_good:
            self._fail(now_s, kind, failed_at, is_flush=is_flush)
        elif breaker.failures or not breaker.is_shut:
            breaker.succeed(now_s)

    def hear(self) -> None:
        """Note that the drive has answered a part of an operation."""
        self._ended_heard_s = self._heard_s

    def withdraw(self, number: int) -> None:
        """Forget an operation that was never submitted; the drive's health is unaffected."""
        operation = self._watched.pop(number)
        if operation.is_trial:
            self._breakers[operation.kind].withdraw_trial()

    def damage(self, now_s: float, offset: int) -> None:
        """Count a damaged block found by its shard owner; the block begins at *offset*."""
        self.counted["damaged"] += 1
        self._fault(now_s, offset // PLACE_BYTES, "a block was damaged")

    def turn(self, now_s: float) -> frozenset[IoKind]:
        """Detect overdue operations and the end of suspicion.

        Return the kinds of operations given up now: a stuck write says nothing about answered reads.
        """
        # A late turn means a stopped process, not a silent drive: cap the listening time.
        given_up: set[IoKind] = set()
        self._heard_s += min(now_s - self._turn_s, 2 * self.turn_every_s)
        self._turn_s = now_s
        if self._watched and self._heard_s - self._ended_heard_s > self._limit_s():
            given_up |= self._give_up(now_s, dict(self._watched), "answered nothing")
        stuck = self._stuck()
        if stuck:
            given_up |= self._give_up(now_s, stuck, "left something unanswered")
        is_over = now_s - self._fault_s > self._settings.clean_s
        if self.condition is DriveCondition.SUSPECT and is_over:
            self.condition = DriveCondition.GOOD
            self._say(f"is good again: no fault for {self._settings.clean_s:.0f} s")
        return frozenset(given_up)

    def take_messages(self) -> tuple[str, ...]:
        """Return the changes since the last call, as predicates of sentences about the drive."""
        said, self._said = tuple(self._said), []
        return said

    def _stuck(self) -> dict[int, _Operation]:
        """Return operations overtaken long ago: a drive processes operations roughly in order."""
        stuck = {}
        for number, each in self._watched.items():
            if each.overtaken_heard_s is None:
                each.overtaken_heard_s = self._heard_s if number < self._newest_ended else None
            elif self._heard_s - each.overtaken_heard_s > self._settings.stuck_s + each.move_s:
                stuck[number] = each
        return stuck

    def _limit_s(self) -> float:
        settings, watched = self._settings, self._watched.values()
        has_writes = any(operation.kind is IoKind.WRITE for operation in watched)
        allowed_s = max(settings.overdue_s, settings.write_overdue_s) if has_writes else settings.overdue_s
        return allowed_s + max(operation.move_s for operation in watched)

    def _give_up(self, now_s: float, operations: dict[int, _Operation], what: str) -> set[IoKind]:
        """Open the breakers of the overdue kinds, and return the kinds.

        A silence is a single fault. A FAILED drive needs no open breaker.
        """
        self.counted["silences"] += 1
        for number, operation in operations.items():
            self._given_up[number] = self._watched.pop(number)
            breaker, took_s = self._breakers[operation.kind], self._heard_s - operation.begun_heard_s
            if operation.is_trial:
                breaker.delay(now_s)
            elif breaker.is_shut and self.condition is not DriveCondition.FAILED:
                breaker.open(now_s)
                self._say(f"{what} for {took_s:.2f} s: {operation.kind.value}s are held off")
        self._fault(now_s, f"silence {self.counted['silences']}", "it did not answer")
        return {operation.kind for operation in operations.values()}

    def _fail(self, now_s: float, kind: IoKind, failed_at: int, *, is_flush: bool) -> None:
        breaker = self._breakers[kind]
        was_shut = breaker.is_shut
        has_opened = breaker.fail(now_s)
        if is_flush and was_shut:
            breaker.open(now_s)
            has_opened = True
        if has_opened:
            count = self._settings.breaker.failures_max
            failed = "failed a flush" if is_flush else f"failed {count} {kind.value}s in a row"
            self._say(f"{failed}: {kind.value}s are held off")
        if kind is IoKind.READ and was_shut:
            self._fault(now_s, failed_at // PLACE_BYTES, "a read failed")
        elif has_opened:
            self._fault(now_s, f"writes {breaker.opened}", "writes failed")

    def _fault(self, now_s: float, place: int | str, what: str) -> None:
        if self.condition is DriveCondition.FAILED:
            return
        self._faults[place] = self._fault_s = now_s
        count, settings = self.faults(now_s), self._settings
        if count >= settings.failed_faults:
            self.condition = DriveCondition.FAILED
        elif count >= settings.suspect_faults and self.condition is DriveCondition.GOOD:
            self.condition = DriveCondition.SUSPECT
        else:
            return
        self._say(
            f"is {self.condition.value}: {count} faults within {settings.window_s:.0f} s, lately {what}"
        )

    def _say(self, what: str) -> None:
        self._why = what
        self._said.append(what)
