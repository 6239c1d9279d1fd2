"""The order in which rows give way, against a model of ordered dicts."""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.invariants import check_order

from ostraca_fabric.tables.segmented_lru import SegmentedLru

PAGE = 4096
PROTECTED_MAX = 4 * PAGE
ROWS = 12


class Model:
    """What is promised, row by row."""

    def __init__(self) -> None:
        self.protected_max_bytes = PROTECTED_MAX
        self.bytes: dict[int, int] = {}
        self.uses: Counter[int] = Counter()
        self.users: Counter[int] = Counter()
        self.probation: OrderedDict[int, None] = OrderedDict()
        self.protected: OrderedDict[int, None] = OrderedDict()

    def enter(self, row: int, row_bytes: int, uses: int) -> None:
        self.bytes[row], self.uses[row] = row_bytes, uses
        self.probation[row] = None

    def hold(self, rows: list[int]) -> None:
        for row in rows:
            self.probation.pop(row, None)
            self.protected.pop(row, None)
            self.users[row] += 1
            self.uses[row] += 1

    def let_go(self, rows: list[int]) -> None:
        for row in rows:
            self.users[row] -= 1
            if not self.users[row]:
                (self.protected if self.uses[row] > 1 else self.probation)[row] = None
        while sum(self.bytes[row] for row in self.protected) > self.protected_max_bytes:
            self.probation[self.protected.popitem(last=False)[0]] = None

    def demote(self, rows: list[int]) -> None:
        for row in rows:
            self.uses[row] = min(self.uses[row], 1)
        for row in sorted(set(rows) & self.protected.keys()):
            del self.protected[row]
            self.probation[row] = None

    def evict(self, wanted_bytes: int) -> list[int]:
        gone = []
        while wanted_bytes > 0 and (self.probation or self.protected):
            row, _ = (self.probation or self.protected).popitem(last=False)
            wanted_bytes -= self.bytes.pop(row)
            gone.append(row)
        return gone


def array(rows: list[int]) -> NDArray[np.int64]:
    return np.array(rows, np.int64)


steps = st.lists(
    st.tuples(
        st.sampled_from(["enter", "hold", "let go", "demote", "evict", "grow"]),
        st.lists(st.integers(0, ROWS - 1), max_size=5),
        st.integers(1, 3),
    ),
    max_size=60,
)


@given(steps)
@settings(deadline=None, max_examples=300)
def test_rows_give_way_as_two_queues_say(steps: list[tuple[str, list[int], int]]) -> None:
    order, model = SegmentedLru(ROWS, protected_max_bytes=PROTECTED_MAX), Model()
    size, held = ROWS, list[int]()
    for step, named, number in steps:
        if step == "enter":
            rows = [row for row in dict.fromkeys(named) if row not in model.bytes]
            order.enter(array(rows), number * PAGE, uses=number % 2)
            for row in rows:
                model.enter(row, number * PAGE, number % 2)
        elif step == "hold":
            rows = [row for row in named if row in model.bytes]
            order.hold(array(rows))
            model.hold(rows)
            held += rows
        elif step == "let go":
            rows, held = held[:number], held[number:]
            order.let_go(array(rows))
            model.let_go(rows)
        elif step == "demote":
            rows = [row for row in named if row in model.bytes]
            order.demote(array(rows))
            model.demote(rows)
        elif step == "evict":
            assert order.evict((number - 1) * 2 * PAGE + 1).tolist() == model.evict(
                (number - 1) * 2 * PAGE + 1
            )
        else:
            size += number
            order.grow(size)
        check_order(order)
        assert order.entered.tolist() == sorted(model.bytes)
        assert order.held.tolist() == sorted(set(held))
        assert order.entered_bytes == sum(model.bytes.values())


def test_blocks_that_pass_once_do_not_push_out_those_used_again() -> None:
    order = SegmentedLru(1000, protected_max_bytes=3 * PAGE)
    used_again = array([0, 1, 2])
    order.enter(used_again, PAGE, uses=1)
    order.hold(used_again)
    order.let_go(used_again)
    for row in range(3, 1000):
        order.enter(array([row]), PAGE, uses=1)
        if row >= 10:
            assert order.evict(PAGE).tolist() == [row - 7]
    assert set(used_again) <= set(order.entered.tolist())


def test_the_first_use_of_what_was_prefetched_is_no_second_use() -> None:
    order = SegmentedLru(4, protected_max_bytes=PAGE)
    prefetched, got = array([0]), array([1])
    order.enter(prefetched, PAGE, uses=0)
    order.enter(got, PAGE, uses=1)
    for row in (got, prefetched):
        order.hold(row)
        order.let_go(row)
    assert order.evict(2 * PAGE).tolist() == [0, 1]


def test_what_is_demoted_goes_before_what_was_used_again_and_a_use_makes_up_for_it() -> None:
    order, again = SegmentedLru(4, protected_max_bytes=4 * PAGE), array([0, 1, 2])
    order.enter(again, PAGE, uses=1)
    order.hold(again)
    order.let_go(again)
    order.demote(array([2, 0, 2]))
    order.hold(array([0]))
    order.let_go(array([0]))
    check_order(order)
    assert order.evict(3 * PAGE).tolist() == [2, 1, 0]


PARTS = 3

part_steps = st.lists(
    st.tuples(
        st.sampled_from(["hold", "let_go", "demote", "evict"]),
        st.lists(st.integers(0, ROWS - 1), max_size=8),
    ),
    max_size=60,
)


@given(part_steps)
@settings(deadline=None, max_examples=300)
def test_each_part_has_an_order_of_its_own(steps: list[tuple[str, list[int]]]) -> None:
    """Rows of three parts in each call, against three models that know nothing of each other."""
    order, models, held = (
        SegmentedLru(ROWS, protected_max_bytes=2 * PAGE),
        [Model() for _ in range(PARTS)],
        [],
    )
    for part, model in enumerate(models):
        model.protected_max_bytes = 2 * PAGE
        assert part == 0 or order.add_part(protected_max_bytes=2 * PAGE) == part
        its = list(range(part, ROWS, PARTS))
        order.enter(array(its), PAGE, uses=1, part=part)
        for row in its:
            model.enter(row, PAGE, 1)
    for step, named in steps:
        if step == "evict":
            for part, model in enumerate(models):
                wanted = named.count(part) * PAGE
                assert order.evict(wanted, part=part).tolist() == model.evict(wanted)
        else:
            rows = [row for row in named if row in models[row % PARTS].bytes]
            if step == "hold":
                held += rows
            elif step == "let_go":
                rows, held = held[: len(named)], held[len(named) :]
            getattr(order, step)(array(rows))
            for part, model in enumerate(models):
                getattr(model, step)([row for row in rows if row % PARTS == part])
        check_order(order)
        assert order.part_bytes.tolist() == [sum(model.bytes.values()) for model in models]
        assert order.held.tolist() == sorted(set(held))


def test_what_protected_may_no_longer_have_goes_back_the_oldest_first() -> None:
    order = SegmentedLru(4, protected_max_bytes=4 * PAGE)
    order.add_part(protected_max_bytes=4 * PAGE)
    for part, rows in enumerate((array([0, 1]), array([2, 3]))):
        order.enter(rows, PAGE, uses=1, part=part)
        order.hold(rows)
        order.let_go(rows)
    order.protect(array([2 * PAGE, PAGE]))
    check_order(order)
    order.demote(array([3]))
    assert order.evict(2 * PAGE, part=1).tolist() == [2, 3]
    assert order.evict(PAGE).tolist() == [0]
