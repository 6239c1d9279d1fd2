"""What an agent believes of a drive: whether it answers now, and whether it can be trusted. Pure.

Two things, kept apart:

- **Breakers**, one for reads and one for writes. They open when operations fail in a row, or when the drive
  has been silent for too long, and shut when a trial ends well: seconds. While one is open its operations are
  not even begun, so a drive that hangs holds no more memory than it did when that was noticed.
- **Condition**: GOOD, SUSPECT, FAILED, from *faults* within a window: half an hour. A SUSPECT drive takes
  no new blocks, and is read as before; it is GOOD again after a while without a fault. A FAILED one is left
  alone until the agent starts anew.

A fault is a read that failed, a block that its owner found damaged, a silence, or a trial read that failed;
and the opening of the breaker for writes. Failures in one place count once, because a bad sector that is
asked for again and again says nothing new; and what fails while the breaker is open counts no more, because a
path that is lost fails everything that was under way. So a dead path makes a drive SUSPECT soon, and FAILED
only when it stays dead for about half an hour. Failing to write is no fault beyond that: a drive that is full
or worn out can be read, and its open breaker keeps new blocks away.

The caller says when operations begin and end, and calls ``turn`` several times within ``overdue_s`` while
anything is under way or a breaker is open. A caller that was itself stopped comes late to its turn: then it
hears no more silence than one turn's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from ostraca_fabric.breaker import Breaker, BreakerSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.limits import check_above_zero

PLACE_BYTES: Final = 4 << 20
"""Faults this close to each other on a drive are one fault. A misdirected write of a whole wave spoils four
such places, and a segment that was written over sixteen."""


class Condition(Enum):
    """Whether a drive can be trusted."""

    GOOD = "good"
    SUSPECT = "suspect"
    FAILED = "failed"


class Kind(Enum):
    """What an operation does."""

    READ = "read"
    WRITE = "write"
    """Or flush."""


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """When an agent leaves a drive alone. A false alarm costs recomputing; only FAILED stays."""

    overdue_s: float = 0.2
    """How long a drive that has reads to do, and no writes, may end nothing. Healthy flash answers within a
    few ms; a get that waits longer than this for its first byte is seldom worth it. Drives that are files
    have ``file_overdue_s``."""

    write_overdue_s: float = 1.0
    """The same while it has writes to do: flash that collects garbage, and file systems that write their
    journal, are silent for longer, and nobody waits for a write as long as for a read."""

    file_overdue_s: float = 1.0
    """``overdue_s`` of a drive that is a file, unless that is longer. It shares its disk with whatever else
    the machine does: a disk that writes a few GB back can leave reads unanswered for a few tenths of a
    second, and is well. Raise it where files lie on disks that spin."""

    file_write_overdue_s: float = 2.0
    """``write_overdue_s`` of a drive that is a file, unless that is longer."""

    slow_bytes_s: float = 50e6
    """What an operation moves adds to both at this rate, bytes in a second. A drive slower than that is as
    good as silent."""

    stuck_s: float = 5.0
    """How long one operation may go on after one that was begun later has ended."""

    breaker: BreakerSettings = field(default_factory=BreakerSettings)

    window_s: float = 1800.0
    """How long a fault is held against a drive."""

    suspect_faults: int = 8
    """Faults within the window that make a drive SUSPECT. A few bad sectors in a life of years do not."""

    failed_faults: int = 64
    """Faults within the window that make it FAILED: more than one dead path gives in the quarter of an hour
    that an enclosure may take to start, because trials are 30 s apart by then."""

    clean_s: float = 600.0
    """How long after its last fault a SUSPECT drive is GOOD again."""

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        check_above_zero(self, "window_s")
        if not 0 < self.suspect_faults <= self.failed_faults:
            message = (
                f"suspect_faults is {self.suspect_faults} and failed_faults {self.failed_faults}: the first "
                "is at least 1, and the second no smaller"
            )
            raise UsageError(message)
        silences = self.overdue_s, self.write_overdue_s, self.file_overdue_s, self.file_write_overdue_s
        if min(*silences, self.slow_bytes_s, self.stuck_s) <= 0:
            message = (
                "overdue_s, write_overdue_s, file_overdue_s, file_write_overdue_s, slow_bytes_s and stuck_s "
                "are times and a rate above 0"
            )
            raise UsageError(message)

    def for_files(self) -> HealthSettings:
        """Return what holds for a drive that is a file: the longer patience of each pair."""
        return replace(
            self,
            overdue_s=max(self.overdue_s, self.file_overdue_s),
            write_overdue_s=max(self.write_overdue_s, self.file_write_overdue_s),
        )


@dataclass(slots=True)
class _Operation:
    kind: Kind
    begun_heard_s: float
    move_s: float
    """How long moving its bytes may take."""

    is_trial: bool
    overtaken_heard_s: float | None = None
    """When one that was begun later was found to have ended."""


class DriveHealth:
    """One drive, as one agent sees it."""

    def __init__(self, settings: HealthSettings) -> None:
        """Begin with a drive that is good."""
        self._settings = settings
        self.condition = Condition.GOOD
        self.counted: Counter[str] = Counter()
        """Since the agent started: failed ``reads``, failed ``writes``, ``silences``, ``damaged`` blocks, and
        ``refused`` operations."""

        self._breakers = {kind: Breaker(settings.breaker) for kind in Kind}
        self._reads = self._breakers[Kind.READ]
        self._faults: dict[int | str, float] = {}
        """When each place last failed, and when what has no place did. Fewer than ``failed_faults`` by far,
        since none is added to a drive that has failed."""

        self._fault_s = 0.0
        self._watched: dict[int, _Operation] = {}
        self._given_up: dict[int, _Operation] = {}
        """Under way as well, and their silence has been counted."""

        self._begun = self._newest_ended = 0
        self._turn_s = 0.0
        self._heard_s = 0.0
        """The time that turns have listened for. It is this that operations are overdue by."""

        self._ended_heard_s = 0.0
        self._why = ""
        self._said: list[str] = []

    @property
    def turn_every_s(self) -> float:
        """How often to call ``turn``."""
        return self._settings.overdue_s / 4

    @property
    def needs_turns(self) -> bool:
        """Whether ``turn`` has anything to look at."""
        if self.condition is Condition.FAILED:  # nothing new is begun, and somebody waits for the rest
            return bool(self._watched)
        return bool(self._watched) or self.held_off(Kind.READ) or self.condition is Condition.SUSPECT

    @property
    def why(self) -> str:
        """What is wrong with the drive, as the predicate of a sentence; empty when nothing is."""
        is_well = self.condition is Condition.GOOD and not any(map(self.held_off, Kind))
        return "" if is_well else self._why

    @property
    def refuses_reads(self) -> bool:
        """Whether reads fail at once."""
        return self.condition is Condition.FAILED or not self._reads.is_shut

    def refuses_writes(self, now_s: float) -> bool:
        """Whether no new block should go there now. False also when a write is wanted as a trial."""
        breaker = self._breakers[Kind.WRITE]
        return self.condition is not Condition.GOOD or not (breaker.is_shut or breaker.is_trial_due(now_s))

    def held_off(self, kind: Kind) -> bool:
        """Whether the breaker is open."""
        return not self._breakers[kind].is_shut

    def faults(self, now_s: float) -> int:
        """Count the faults within the window."""
        oldest_s = now_s - self._settings.window_s
        if any(at_s < oldest_s for at_s in self._faults.values()):
            self._faults = {place: at_s for place, at_s in self._faults.items() if at_s >= oldest_s}
        return len(self._faults)

    def begin(self, now_s: float, kind: Kind, size_bytes: int, *, is_probe: bool = False) -> int | None:
        """Begin an operation; returns its number for ``end``, or None when it must not be begun.

        A probe is a read that only tries; begin it when ``is_probe_due``.
        """
        breaker = self._breakers[kind]
        is_trial = is_probe or (kind is Kind.WRITE and breaker.is_trial_due(now_s))
        if self.condition is Condition.FAILED or not (breaker.is_shut or is_trial):
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
        """Whether a small read should be tried now, for whose end no request waits."""
        return self.condition is not Condition.FAILED and self._breakers[Kind.READ].is_trial_due(now_s)

    def end(
        self, now_s: float, number: int, *, is_good: bool, failed_at: int = 0, is_flush: bool = False
    ) -> None:
        """Say how an operation ended; *failed_at*: where on the drive the first failed piece begins.

        A flush that fails opens the breaker by itself: nobody knows which writes before it were lost.
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
            elif kind is Kind.READ:
                self._fault(now_s, f"read {self.counted['reads']}", "a trial read failed")
        elif is_good:
            breaker.succeed(now_s)
        else:
            self._fail(now_s, kind, failed_at, is_flush=is_flush)

    def withdraw(self, number: int) -> None:
        """Forget an operation that was not begun after all, and says nothing of the drive."""
        operation = self._watched.pop(number)
        if operation.is_trial:
            self._breakers[operation.kind].withdraw_trial()

    def damage(self, now_s: float, offset: int) -> None:
        """Count a block that its owner has found damaged, by where it begins on the drive."""
        self.counted["damaged"] += 1
        self._fault(now_s, offset // PLACE_BYTES, "a block was damaged")

    def turn(self, now_s: float) -> frozenset[Kind]:
        """Notice what is overdue, and what is over. Returns the kinds of which something under way was given
        up: a write that is stuck says nothing of reads that are answered.
        """
        # A turn that comes late was held up with its whole process: the drive is not to blame for that.
        given_up: set[Kind] = set()
        self._heard_s += min(now_s - self._turn_s, 2 * self.turn_every_s)
        self._turn_s = now_s
        if self._watched and self._heard_s - self._ended_heard_s > self._limit_s():
            given_up |= self._give_up(now_s, dict(self._watched), "answered nothing")
        stuck = self._stuck()
        if stuck:
            given_up |= self._give_up(now_s, stuck, "left something unanswered")
        is_over = now_s - self._fault_s > self._settings.clean_s
        if self.condition is Condition.SUSPECT and is_over:
            self.condition = Condition.GOOD
            self._say(f"is good again: no fault for {self._settings.clean_s:.0f} s")
        return frozenset(given_up)

    def take_said(self) -> tuple[str, ...]:
        """Return what has changed since the last call, as predicates of sentences about the drive."""
        said, self._said = tuple(self._said), []
        return said

    def check(self) -> None:
        """Assert what must be true after every call. For tests."""
        under_way = {**self._watched, **self._given_up}
        assert len(under_way) == len(self._watched) + len(self._given_up), "an operation is under way once"
        for kind, breaker in self._breakers.items():
            trials = [each for each in under_way.values() if each.is_trial and each.kind is kind]
            assert len(trials) == int(breaker.has_trial), "a breaker's trial is under way"
            assert not (breaker.is_shut and trials), "nothing is tried through a shut breaker"
        assert self._ended_heard_s <= self._heard_s, "silence is never negative"
        is_failed = len(self._faults) >= self._settings.failed_faults
        assert self.condition is Condition.FAILED or not is_failed, "so many faults are a drive that failed"

    def _stuck(self) -> dict[int, _Operation]:
        """Return operations that were overtaken long ago. A drive takes them about in order."""
        stuck = {}
        for number, each in self._watched.items():
            if each.overtaken_heard_s is None:
                each.overtaken_heard_s = self._heard_s if number < self._newest_ended else None
            elif self._heard_s - each.overtaken_heard_s > self._settings.stuck_s + each.move_s:
                stuck[number] = each
        return stuck

    def _limit_s(self) -> float:
        settings, watched = self._settings, self._watched.values()
        has_writes = any(operation.kind is Kind.WRITE for operation in watched)
        allowed_s = max(settings.overdue_s, settings.write_overdue_s) if has_writes else settings.overdue_s
        return allowed_s + max(operation.move_s for operation in watched)

    def _give_up(self, now_s: float, operations: dict[int, _Operation], what: str) -> set[Kind]:
        """Hold off the kinds of operation that are overdue, and return them; one silence is one fault. Of a
        drive that has failed nothing need be held off.
        """
        self.counted["silences"] += 1
        for number, operation in operations.items():
            self._given_up[number] = self._watched.pop(number)
            breaker, took_s = self._breakers[operation.kind], self._heard_s - operation.begun_heard_s
            if operation.is_trial:
                breaker.delay(now_s)
            elif breaker.is_shut and self.condition is not Condition.FAILED:
                breaker.open(now_s)
                self._say(f"{what} for {took_s:.2f} s: {operation.kind.value}s are held off")
        self._fault(now_s, f"silence {self.counted['silences']}", "it did not answer")
        return {operation.kind for operation in operations.values()}

    def _fail(self, now_s: float, kind: Kind, failed_at: int, *, is_flush: bool) -> None:
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
        if kind is Kind.READ and was_shut:
            self._fault(now_s, failed_at // PLACE_BYTES, "a read failed")
        elif has_opened:
            self._fault(now_s, f"writes {breaker.opened}", "writes failed")

    def _fault(self, now_s: float, place: int | str, what: str) -> None:
        if self.condition is Condition.FAILED:
            return
        self._faults[place] = self._fault_s = now_s
        count, settings = self.faults(now_s), self._settings
        if count >= settings.failed_faults:
            self.condition = Condition.FAILED
        elif count >= settings.suspect_faults and self.condition is Condition.GOOD:
            self.condition = Condition.SUSPECT
        else:
            return
        self._say(
            f"is {self.condition.value}: {count} faults within {settings.window_s:.0f} s, lately {what}"
        )

    def _say(self, what: str) -> None:
        self._why = what
        self._said.append(what)
