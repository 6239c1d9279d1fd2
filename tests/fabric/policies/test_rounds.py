"""Items in turn, at a bounded rate."""

from __future__ import annotations

import pytest

from ostraca_fabric.policies.rounds import Rounds


def test_each_item_has_its_turn_before_the_first_has_another() -> None:
    rounds = Rounds[str](round_s=1.0, rate_per_s=100.0)
    for item in "abcde":
        rounds.add(item)
    turns = [rounds.take_due(lambda _: 1, most=2, total=5) for _ in range(5)]
    assert ["".join(items) for items, _ in turns] == ["ab", "cd", "ea", "bc", "de"]
    assert {pause_s for _, pause_s in turns} == {0.4}, "five items in a second"


def test_many_items_take_longer_than_a_round() -> None:
    rounds = Rounds[int](round_s=1.0, rate_per_s=100.0)
    for item in range(1000):
        rounds.add(item)
    passed_s = sum(rounds.take_due(lambda _: 1, most=50, total=1000)[1] for _ in range(20))
    assert passed_s == pytest.approx(10.0)


def test_items_without_size_are_dropped_and_large_items_are_taken_whole() -> None:
    sizes = {"a": 0, "b": 7, "c": 1, "d": 1}
    rounds = Rounds[str](round_s=1.0, rate_per_s=1000.0)
    for item in sizes:
        rounds.add(item)
    assert rounds.take_due(sizes.__getitem__, most=2, total=9)[0] == ["b"]
    assert rounds.take_due(sizes.__getitem__, most=2, total=9)[0] == ["c", "d"]
    sizes |= dict.fromkeys("bcd", 0)
    assert rounds.take_due(sizes.__getitem__, most=2, total=0) == ([], 1.0)
