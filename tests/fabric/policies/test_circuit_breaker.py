"""When a breaker opens, and when it shuts."""

from __future__ import annotations

from ostraca_fabric.policies.circuit_breaker import Breaker, BreakerSettings

SETTINGS = BreakerSettings(failures_max=3, open_s=1.0, open_max_s=4.0)


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    breaker.open(now_s)
    return breaker


def test_failures_in_a_row_open_it_and_others_do_not() -> None:
    breaker = Breaker(SETTINGS)
    assert [breaker.fail(0.0), breaker.fail(0.0)] == [False, False]
    breaker.succeed(0.0)
    assert [breaker.fail(0.0), breaker.fail(0.0), breaker.fail(0.0)] == [False, False, True]
    assert (breaker.is_shut, breaker.opened) == (False, 1)
    assert not breaker.fail(0.0), "it has opened already"


def test_one_trial_at_a_time_may_pass_once_the_while_is_over_and_shuts_it() -> None:
    breaker = opened()
    assert [breaker.is_trial_due(at_s) for at_s in (0.0, 0.9, 1.0)] == [False, False, True]
    breaker.begin_trial()
    assert not breaker.is_trial_due(5.0)
    breaker.end_trial(1.1, is_good=True)
    assert breaker.is_shut


def test_trials_that_fail_are_further_and_further_apart_up_to_a_limit() -> None:
    breaker, now_s, waits = opened(), 0.0, []
    for _ in range(4):
        begun_s = now_s
        while not breaker.is_trial_due(now_s):
            now_s += 0.5
        waits.append(now_s - begun_s)
        breaker.begin_trial()
        breaker.end_trial(now_s, is_good=False)
    assert waits == [1.0, 2.0, 4.0, 4.0]


def test_it_begins_with_a_short_while_each_time_it_opens() -> None:
    breaker = opened()
    breaker.begin_trial()
    breaker.end_trial(1.0, is_good=False)
    breaker.begin_trial()
    breaker.end_trial(3.0, is_good=True)
    breaker.open(3.0)
    assert breaker.is_trial_due(4.0)


def test_a_trial_that_is_overdue_keeps_it_open_and_its_good_end_shuts_it_all_the_same() -> None:
    breaker = opened()
    breaker.begin_trial()
    breaker.delay(2.0)
    assert not breaker.is_trial_due(100.0), "one trial at a time, however long it takes"
    breaker.end_trial(100.0, is_good=True)
    assert breaker.is_shut


def test_a_good_end_of_what_was_begun_before_makes_a_trial_due_at_once() -> None:
    breaker = opened()
    breaker.succeed(0.1)
    assert not breaker.is_shut
    assert breaker.is_trial_due(0.1)


def test_a_trial_that_is_withdrawn_may_be_begun_again() -> None:
    breaker = opened()
    breaker.begin_trial()
    breaker.withdraw_trial()
    assert breaker.is_trial_due(1.0)
