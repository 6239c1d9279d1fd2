"""Exponential backoff."""

from __future__ import annotations

import random

from ostraca_fabric.policies.backoff import Backoff


def test_waits_double_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 5.0)
    assert [backoff.next_s() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    for _ in range(10_000):
        backoff.next_s()
    assert backoff.next_s() == 5.0


def test_a_reset_starts_with_the_first_wait_again() -> None:
    backoff = Backoff(0.5, 5.0)
    for _ in range(3):
        backoff.next_s()
    backoff.reset()
    assert backoff.bound_s == 0.5
    assert backoff.next_s() == 0.5


def test_a_first_wait_above_the_longest_is_kept() -> None:
    backoff = Backoff(60.0, 30.0)
    assert [backoff.next_s() for _ in range(3)] == [60.0, 30.0, 30.0]


def test_random_waits_stay_within_half_of_the_bound_and_differ_between_callers() -> None:
    backoff = Backoff(0.1, 0.5, random.Random(1))
    waits = [backoff.next_s() for _ in range(5)]
    bounds = (0.1, 0.2, 0.4, 0.5, 0.5)
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    other = Backoff(0.1, 0.5, random.Random(2))
    assert waits != [other.next_s() for _ in range(5)]
