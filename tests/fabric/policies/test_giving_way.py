from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ostraca_fabric.policies.giving_way import giving_way

FAR = 1 << 40
NAMES = "abcde"
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
    return giving_way(parts, beside or {}, members, asker=asker, wanted_bytes=wanted, equal_bytes=equal)


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
    gives = dict(giving_way(parts, beside, members, asker=asker, wanted_bytes=wanted, equal_bytes=equal))
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
