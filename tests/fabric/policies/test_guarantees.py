from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ostraca_fabric.policies.guarantees import is_guaranteed, may_take

TOTAL = 120
NAMES = "abcde"

steps = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, TOTAL // 2), st.booleans()), max_size=60)


def test_two_members_may_have_three_quarters_each() -> None:
    assert may_take(TOTAL, {"a": 80}, "ab", "a", 10)
    assert not may_take(TOTAL, {"a": 80}, "ab", "a", 11)
    assert may_take(TOTAL, {"a": 90}, "ab", "b", 30)
    assert not may_take(TOTAL, {"a": 90, "b": 30}, "ab", "b", 1)


@given(st.integers(0, 10 * TOTAL), st.integers(0, 10 * TOTAL), st.sampled_from(["a", ""]))
def test_a_single_member_is_held_to_nothing(held: int, wanted: int, members: str) -> None:
    assert may_take(TOTAL, {"a": held, "gone": held}, members, "a", wanted)
    assert not is_guaranteed(TOTAL, {"a": held}, members, "a", wanted)


@given(st.integers(1, len(NAMES)), steps)
def test_what_is_guaranteed_is_never_refused_and_always_free(
    count: int, steps: list[tuple[str, int, bool]]
) -> None:
    assume(count > 1)
    members, held, part = NAMES[:count], Counter[str](), TOTAL / (2 * count)
    for who, wanted, takes in steps:
        if who not in members:
            continue
        if not takes:
            held[who] = max(0, held[who] - wanted)
        elif may_take(TOTAL, held, members, who, wanted):
            held[who] += wanted
        assert held.total() <= TOTAL
        for each in members:
            unclaimed = int(max(0, part - held[each]))
            assert may_take(TOTAL, held, members, each, unclaimed)
            assert held.total() + unclaimed <= TOTAL
        # Not even when all claim their parts one after the other.
        assert held.total() + sum(max(0, part - held[each]) for each in members) <= TOTAL


@given(steps)
def test_what_one_gives_back_another_may_take(steps: list[tuple[str, int, bool]]) -> None:
    """Nothing is kept from everybody: who wants no more than is free beyond the others' parts gets it."""
    held, part = Counter[str](), TOTAL / 4
    for who, wanted, _ in steps:
        if who in "ab" and may_take(TOTAL, held, "ab", who, wanted):
            held[who] += wanted
    for who, other in ("ab", "ba"):
        free = TOTAL - held.total() - max(0, part - held[other])
        assert may_take(TOTAL, held, "ab", who, int(free))


def test_who_comes_when_all_is_taken_is_served_before_those_who_took_it() -> None:
    held = {"a": TOTAL}
    assert not may_take(TOTAL, held, "abc", "a", 1)
    assert may_take(TOTAL, held, "abc", "b", 20), "its part, though nothing is free just now"
    assert not may_take(TOTAL, held, "abc", "b", 21)


def test_who_is_no_member_yet_is_one_by_asking() -> None:
    assert not may_take(TOTAL, {"b": 1}, "a", "b", 90)
    assert may_take(TOTAL, {"b": 1}, "a", "b", 89)


def test_what_others_hold_who_are_no_members_is_not_free() -> None:
    assert not may_take(TOTAL, {"a": 30, "drive": 40}, "ab", "a", 21)
    assert may_take(TOTAL, {"a": 30, "drive": 40}, "ab", "a", 20)


@pytest.mark.parametrize("wanted", [91, TOTAL])
def test_what_could_never_be_free_is_given_to_one_who_holds_nothing(wanted: int) -> None:
    assert may_take(TOTAL, {"b": 5}, "ab", "a", wanted)
    assert not may_take(TOTAL, {"a": 1}, "ab", "a", wanted)
