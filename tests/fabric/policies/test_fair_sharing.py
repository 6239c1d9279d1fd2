from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ostraca_fabric.policies.fair_sharing import is_guaranteed, may_take, plan_evictions

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


FAR = 1 << 40
ROUNDING = len(NAMES)
"""Levels are whole bytes."""

sizes = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 100))


def asks(
    parts: dict[str, int],
    members: str,
    wanted: int,
    *,
    asker: str | None = None,
    beside: dict[str, int] | None = None,
    equal: float = FAR,
) -> list[tuple[str, int]]:
    return plan_evictions(parts, beside or {}, members, asker=asker, wanted_bytes=wanted, equal_bytes=equal)


def test_those_who_are_gone_give_way_first_the_largest_before_the_others() -> None:
    parts = {"a": 50, "gone": 10, "away": 20}
    assert asks(parts, "a", 25) == [("away", 20), ("gone", 5)]
    assert asks(parts, "a", 40) == [("away", 20), ("gone", 10), ("a", 10)]


def test_the_largest_is_brought_down_to_the_next_and_then_both() -> None:
    parts = {"a": 50, "b": 30, "c": 10}
    assert asks(parts, "abc", 20) == [("a", 20)]
    assert asks(parts, "abc", 30) == [("a", 25), ("b", 5)]
    assert asks(parts, "abc", 90) == [("a", 50), ("b", 30), ("c", 10)]


def test_what_room_is_wanted_for_counts_for_who_wants_it() -> None:
    parts = {"a": 50, "b": 50}
    assert asks(parts, "ab", 10, asker="a", beside={"a": 10}, equal=50) == [("a", 10)]
    assert asks({"a": 70, "b": 30}, "ab", 10, asker="b", beside={"b": 10}, equal=50) == [("a", 10)]


def test_nobody_at_an_equal_part_gives_way_to_one_who_has_more_and_can_give_none_of_it() -> None:
    parts = {"b": 50, "c": 60}
    assert asks(parts, "abc", 20, asker="a", beside={"a": 80}, equal=50) == [("c", 10)]
    assert asks(parts, "abc", 20, asker="b", beside={"a": 80, "b": 5}, equal=50) == [("c", 10), ("b", 10)], (
        "but what it asks for is its own"
    )
    assert asks(parts, "abc", 20, asker="a", beside={"a": 40}, equal=50) == [("c", 15), ("b", 5)]


def test_who_is_gone_gets_nothing_from_those_who_are_here() -> None:
    assert asks({"a": 80, "gone": 20}, "a", 30, asker="gone", beside={"gone": 30}) == [("gone", 20)]


@given(sizes, sizes, st.sets(st.sampled_from(NAMES)), st.sampled_from([None, *NAMES]), st.integers(0, 600))
def test_as_much_as_is_wanted_gives_way_and_never_from_the_poor_for_the_rich(
    parts: dict[str, int], beside: dict[str, int], members: set[str], asker: str | None, wanted: int
) -> None:
    equal = 40
    gives = dict(plan_evictions(parts, beside, members, asker=asker, wanted_bytes=wanted, equal_bytes=equal))
    assert all(0 < give <= parts[each] for each, give in gives.items())
    assert sum(gives.values()) <= wanted
    after = {each: parts.get(each, 0) - gives.get(each, 0) + beside.get(each, 0) for each in members}
    for each, left in after.items():
        if gives.get(each) and each != asker:
            for other in members:
                could_give = parts.get(other, 0) - gives.get(other, 0) > ROUNDING
                assert not could_give or after[other] <= left + ROUNDING, "a larger one kept more"
            if left < equal:
                assert all(beside.get(other, 0) <= equal for other in members)
    if sum(gives.values()) < wanted and (asker is None or asker in members):
        kept = {each for each in members if parts.get(each, 0) > gives.get(each, 0)}
        assert asker not in kept
        assert all(after[each] <= equal for each in kept)
    if any(each in members for each in gives):
        assert all(gives.get(each, 0) == size for each, size in parts.items() if each not in members)
