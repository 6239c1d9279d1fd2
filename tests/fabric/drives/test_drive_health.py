"""What an agent believes of a drive: silence, failures, damage, and coming back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.invariants import check_health

from ostraca_fabric.drives.drive_health import (
    PLACE_BYTES,
    DriveCondition,
    DriveHealth,
    HealthSettings,
    IoKind,
)
from ostraca_fabric.errors import UsageError
from ostraca_fabric.policies.circuit_breaker import BreakerSettings

SETTINGS = HealthSettings()
TURN_S = DriveHealth(SETTINGS).turn_every_s
MIB = 1 << 20


class Watched:
    """A drive's health on a clock of its own, with turns taken as they should be."""

    def __init__(self, settings: HealthSettings = SETTINGS) -> None:
        self.health = DriveHealth(settings)
        self.now_s = 100.0

    def begin(self, kind: IoKind = IoKind.READ, size_bytes: int = MIB) -> int:
        number = self.health.begin(self.now_s, kind, size_bytes)
        assert number is not None
        return number

    def end(self, number: int, *, is_good: bool = True, failed_at: int = 0) -> None:
        self.health.end(self.now_s, number, is_good=is_good, failed_at=failed_at)
        check_health(self.health)

    def fail(self, kind: IoKind = IoKind.READ, failed_at: int = 0) -> None:
        self.end(self.begin(kind), is_good=False, failed_at=failed_at)

    def refuses_reads(self) -> bool:
        return self.health.refuses_reads

    def condition(self) -> DriveCondition:
        return self.health.condition

    def pass_s(self, seconds: float) -> set[IoKind]:
        """Take turns for so long; return the kinds of which something was given up."""
        until_s, given_up = self.now_s + seconds, set[IoKind]()
        while self.now_s < until_s - 1e-9:
            self.now_s = min(until_s, self.now_s + TURN_S)
            given_up |= self.health.turn(self.now_s)
            check_health(self.health)
        return given_up

    def probe(self, *, is_good: bool) -> None:
        while not self.health.is_probe_due(self.now_s):
            self.pass_s(TURN_S)
        number = self.health.begin(self.now_s, IoKind.READ, 4096, is_probe=True)
        assert number is not None
        self.end(number, is_good=is_good)


def test_a_drive_that_answers_parts_of_an_operation_is_good_until_it_stops() -> None:
    watched = Watched()
    number = watched.begin()
    for _ in range(100):
        assert not watched.pass_s(0.15)
        watched.health.hear()
    assert watched.pass_s(1.0) == {IoKind.READ}
    watched.end(number)


def test_a_drive_that_answers_within_its_time_is_good_however_much_it_has_to_do() -> None:
    watched = Watched()
    waiting = [watched.begin() for _ in range(100)]
    for number in waiting:  # the last one has waited for 15 s
        watched.pass_s(0.15)
        watched.end(number)
        assert not watched.refuses_reads()
        assert watched.health.why == ""
    assert not watched.health.needs_turns


def test_silence_holds_reads_off_within_a_quarter_of_a_second_and_is_one_fault() -> None:
    watched = Watched()
    numbers = [watched.begin(size_bytes=0) for _ in range(50)]
    watched.pass_s(0.15)
    assert not watched.refuses_reads()
    watched.pass_s(0.1)
    assert watched.refuses_reads()
    assert watched.health.begin(watched.now_s, IoKind.READ, 0) is None
    assert watched.health.faults(watched.now_s) == 1
    assert watched.health.counted == {"silences": 1, "refused": 1}
    assert watched.health.take_messages() == ("answered nothing for 0.25 s: reads are held off",)
    assert not watched.health.refuses_writes(watched.now_s), "nobody knows about writes"
    for number in numbers:
        watched.end(number)
    watched.probe(is_good=True)
    assert not watched.refuses_reads()
    assert watched.health.take_messages() == ("answers again: reads go on",)
    assert watched.health.why == ""


def test_a_drive_with_writes_to_do_may_be_silent_for_longer_and_for_what_they_move() -> None:
    watched = Watched()
    watched.begin(IoKind.WRITE, 25_000_000)  # half a second at slow_bytes_s
    watched.begin()
    watched.pass_s(1.45)
    assert not watched.refuses_reads()
    watched.pass_s(0.15)
    assert watched.refuses_reads()
    assert watched.health.refuses_writes(watched.now_s)


def test_a_drive_that_is_a_file_is_given_more_time_unless_all_drives_are() -> None:
    assert SETTINGS.for_files() == replace(SETTINGS, overdue_s=1.0, write_overdue_s=2.0)
    spinning = replace(SETTINGS, overdue_s=3.0, write_overdue_s=5.0)
    assert spinning.for_files() == spinning


def test_one_operation_that_hangs_while_others_end_is_noticed_too() -> None:
    watched = Watched()
    watched.begin(size_bytes=0)
    for _ in range(49):
        watched.end(watched.begin())
        watched.pass_s(0.1)
    assert not watched.refuses_reads()
    for _ in range(3):
        if not watched.refuses_reads():
            watched.end(watched.begin())
        watched.pass_s(0.1)
    assert watched.refuses_reads()
    watched.probe(is_good=True)
    watched.pass_s(60)
    assert not watched.refuses_reads(), "one silence counts once, however long it lasts"


@pytest.mark.parametrize(("hangs", "ends"), [(IoKind.WRITE, IoKind.READ), (IoKind.READ, IoKind.WRITE)])
def test_what_is_stuck_is_given_up_by_its_kind_alone(hangs: IoKind, ends: IoKind) -> None:
    watched, given_up = Watched(), set[IoKind]()
    watched.begin(hangs)
    until_s = watched.now_s + SETTINGS.stuck_s + 1.0
    while watched.now_s < until_s:
        number = watched.begin(ends)
        given_up |= watched.pass_s(TURN_S)
        watched.end(number)
    assert given_up == {hangs}
    assert (watched.health.held_off(hangs), watched.health.held_off(ends)) == (True, False)


def test_a_drive_that_answers_nothing_has_all_that_is_under_way_given_up() -> None:
    watched = Watched()
    watched.begin(IoKind.READ)
    assert watched.pass_s(0.3) == {IoKind.READ}
    watched.begin(IoKind.WRITE)
    assert watched.pass_s(1.3) == {IoKind.WRITE}
    both = Watched()
    both.begin(IoKind.READ)
    both.begin(IoKind.WRITE)
    assert both.pass_s(1.3) == {IoKind.READ, IoKind.WRITE}


def test_what_a_drive_has_under_way_when_it_fails_is_watched_until_it_is_given_up() -> None:
    watched = Watched()
    ends, _ = watched.begin(), watched.begin()
    for place in range(SETTINGS.failed_faults):
        watched.health.damage(watched.now_s, place * PLACE_BYTES)
    assert watched.condition() is DriveCondition.FAILED
    is_watched = watched.health.needs_turns
    assert watched.pass_s(0.15) == set(), "it may answer yet"
    watched.end(ends)
    assert watched.pass_s(0.15) == set()
    assert watched.pass_s(0.15) == {IoKind.READ}
    assert (is_watched, watched.health.needs_turns) == (True, False)
    assert watched.health.why.startswith("is failed: 64 faults"), "which is for good, and says more"


def test_an_agent_that_was_stopped_itself_blames_no_drive() -> None:
    watched = Watched()
    number = watched.begin()
    watched.now_s += 60
    watched.health.turn(watched.now_s)
    assert not watched.refuses_reads()
    watched.end(number)


def test_failures_in_a_row_hold_off_only_what_failed() -> None:
    watched = Watched()
    for _ in range(3):
        watched.fail(IoKind.WRITE)
    assert watched.health.refuses_writes(watched.now_s)
    assert not watched.refuses_reads()
    assert watched.health.take_messages() == ("failed 3 writes in a row: writes are held off",)
    watched.end(watched.begin())
    watched.now_s += 1.0
    assert not watched.health.refuses_writes(watched.now_s), "a write is wanted as a trial"
    trial = watched.begin(IoKind.WRITE)
    assert watched.health.refuses_writes(watched.now_s)
    assert watched.health.begin(watched.now_s, IoKind.WRITE, 0) is None
    watched.end(trial)
    assert not watched.health.refuses_writes(watched.now_s)


def test_a_bad_sector_that_is_read_again_and_again_is_one_fault() -> None:
    watched = Watched()
    for _ in range(1000):
        watched.fail(failed_at=7 * MIB)
        watched.end(watched.begin())
        watched.now_s += 1
    assert watched.condition() is DriveCondition.GOOD
    assert watched.health.faults(watched.now_s) == 1
    assert watched.health.counted["reads"] == 1000


def test_faults_in_several_places_make_a_drive_suspect_and_then_failed() -> None:
    watched = Watched()
    seen = []
    for place in range(SETTINGS.failed_faults):
        watched.fail(failed_at=place * PLACE_BYTES)
        if not watched.refuses_reads():
            watched.end(watched.begin())
        seen.append(watched.condition())
    suspect_at, failed_at = SETTINGS.suspect_faults - 1, SETTINGS.failed_faults - 1
    assert seen == [
        *[DriveCondition.GOOD] * suspect_at,
        *[DriveCondition.SUSPECT] * (failed_at - suspect_at),
        DriveCondition.FAILED,
    ]
    assert watched.refuses_reads()
    assert watched.health.refuses_writes(watched.now_s)
    assert watched.health.begin(watched.now_s, IoKind.READ, 0) is None
    said = watched.health.take_messages()
    assert said == (
        "is suspect: 8 faults within 1800 s, lately a read failed",
        "is failed: 64 faults within 1800 s, lately a read failed",
    )
    watched.pass_s(2000)
    assert watched.condition() is DriveCondition.FAILED, "until the agent starts anew"


def test_damage_counts_as_faults_and_damage_in_one_place_as_one() -> None:
    watched = Watched()
    for block in range(64):  # a wave was written to a wrong place
        watched.health.damage(watched.now_s, block * MIB // 4)
    assert watched.health.counted["damaged"] == 64
    assert watched.health.faults(watched.now_s) == 4
    for place in range(8):
        watched.health.damage(watched.now_s, place * PLACE_BYTES)
    assert watched.condition() is DriveCondition.SUSPECT
    assert watched.health.refuses_writes(watched.now_s)
    assert not watched.refuses_reads(), "what is there can be got, and is checked"


def test_a_suspect_drive_is_good_again_after_a_while_and_suspect_at_once_when_it_goes_on() -> None:
    watched = Watched()
    for place in range(8):
        watched.health.damage(watched.now_s, place * PLACE_BYTES)
    watched.pass_s(SETTINGS.clean_s - 1)
    assert watched.condition() is DriveCondition.SUSPECT
    watched.pass_s(2)
    assert watched.condition() is DriveCondition.GOOD
    assert watched.health.take_messages()[-1] == "is good again: no fault for 600 s"
    watched.health.damage(watched.now_s, 9 * PLACE_BYTES)
    assert watched.condition() is DriveCondition.SUSPECT


def test_a_lost_path_fails_everything_under_way_and_is_few_faults() -> None:
    watched = Watched()
    numbers = [watched.begin() for _ in range(200)]
    for place, number in enumerate(numbers):
        watched.end(number, is_good=False, failed_at=place * PLACE_BYTES)
    assert watched.refuses_reads()
    assert watched.health.faults(watched.now_s) == SETTINGS.breaker.failures_max
    assert watched.condition() is DriveCondition.GOOD


def dead_for_s(condition: DriveCondition) -> float:
    """How long a drive that fails every trial is dead before it is in this condition."""
    watched = Watched()
    for _ in range(3):
        watched.fail()
    begun_s = watched.now_s
    while watched.condition() is not condition:
        watched.probe(is_good=False)
    return watched.now_s - begun_s


def test_a_dead_drive_is_suspect_within_minutes_and_failed_after_half_an_hour() -> None:
    assert 30 < dead_for_s(DriveCondition.SUSPECT) < 120
    assert 25 * 60 < dead_for_s(DriveCondition.FAILED) < 35 * 60


def test_a_drive_that_can_be_read_and_not_written_never_fails() -> None:
    watched = Watched()
    until_s = watched.now_s + 2 * 3600
    while watched.now_s < until_s:
        number = watched.health.begin(watched.now_s, IoKind.WRITE, MIB)
        if number is not None:
            watched.end(number, is_good=False)
        watched.pass_s(1.0)
    assert watched.condition() is DriveCondition.GOOD
    assert watched.health.held_off(IoKind.WRITE)
    assert "held off" in watched.health.why


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError, match="suspect_faults is 9"):
        HealthSettings(suspect_faults=9, failed_faults=8)
    with pytest.raises(UsageError, match="above 0"):
        HealthSettings(overdue_s=0)
    with pytest.raises(UsageError, match="above 0"):
        HealthSettings(file_overdue_s=0)
    with pytest.raises(UsageError, match="above 0"):
        HealthSettings(file_write_overdue_s=-1)


@given(st.integers(0, 2**32))
def test_whatever_a_drive_does_its_health_stays_in_order(seed: int) -> None:
    dice = random.Random(seed)
    settings = HealthSettings(
        breaker=BreakerSettings(failures_max=2), suspect_faults=3, failed_faults=40, clean_s=5.0, window_s=30
    )
    health, now_s, under_way = DriveHealth(settings), 0.0, list[int]()
    for _ in range(200):
        now_s += dice.choice([0, 0.01, 0.05, 0.3, 3.0])
        what = dice.random()
        if what < 0.4:
            kind = dice.choice(list(IoKind))
            number = health.begin(now_s, kind, dice.choice([0, MIB]))
            assert number is None or not (kind is IoKind.READ and health.refuses_reads)
            under_way += [] if number is None else [number]
        elif what < 0.7 and under_way:
            number = under_way.pop(dice.randrange(len(under_way)))
            health.end(now_s, number, is_good=dice.random() < 0.6, failed_at=dice.randrange(1 << 30))
        elif what < 0.8 and health.is_probe_due(now_s):
            number = health.begin(now_s, IoKind.READ, 4096, is_probe=True)
            assert number is not None
            under_way.append(number)
        elif what < 0.85:
            health.damage(now_s, dice.randrange(1 << 30))
        else:
            health.turn(now_s)
        check_health(health)
        assert health.condition is not DriveCondition.FAILED or (
            health.refuses_reads and health.refuses_writes(now_s)
        )
        assert (health.why == "") == (
            health.condition is DriveCondition.GOOD and not any(map(health.held_off, IoKind))
        )
