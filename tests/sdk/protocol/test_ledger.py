"""The ledger: a slot is free when both its users are done with it, and at no other time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray
from tests.support.invariants import check_ledger

from ostraca._protocol.ledger import Ledger
from ostraca_fabric.tables.slots import SlotPool

PAGE = 4096
SLOTS = 16
AGENT, FIRST_START, NEXT_START = "agent-1", b"a" * 16, b"b" * 16


def positions(*values: int) -> NDArray[np.uint32]:
    return np.array(values, np.uint32)


NONE = positions()


class Books:
    """A ledger over 16 slots of a page."""

    def __init__(self) -> None:
        self.pool = SlotPool(SLOTS * PAGE, 4 * PAGE)
        self.ledger = Ledger(self.pool, quarantine_bytes_max=8 * PAGE)

    def send(self, request: int, slots: int = 4) -> None:
        taken = self.ledger.take(slots, PAGE)
        assert taken is not None
        self.ledger.add(request, taken, agent=AGENT, start_id=FIRST_START)

    @property
    def free(self) -> int:
        check_ledger(self.ledger)
        return self.pool.free_bytes // PAGE

    @property
    def is_stranded(self) -> bool:
        return bool(self.ledger.owing_agents)

    @property
    def quarantined(self) -> int:
        return self.pool.quarantined_bytes // PAGE


@pytest.fixture
def books() -> Books:
    made = Books()
    made.send(1)
    return made


def test_slots_of_an_answered_request_are_the_callers_until_it_leaves(books: Books) -> None:
    books.ledger.answer(1, NONE)
    assert (books.free, books.quarantined) == (12, 0)
    books.ledger.leave(1)
    assert (books.free, books.quarantined) == (16, 0)
    assert not books.ledger.is_due()


def test_unsettled_slots_stay_in_quarantine_until_they_settle(books: Books) -> None:
    books.ledger.answer(1, positions(1, 3))
    books.ledger.leave(1)
    assert (books.free, books.quarantined) == (14, 2)
    assert books.ledger.is_due()
    books.ledger.settle(1)
    assert (books.free, books.quarantined) == (16, 0)


def test_settling_before_the_caller_leaves_frees_only_what_it_does_not_hold(books: Books) -> None:
    books.ledger.answer(1, positions(1, 3))
    books.ledger.settle(1)
    assert (books.free, books.quarantined) == (14, 0)
    books.ledger.leave(1)
    assert books.free == 16


def test_a_caller_that_leaves_before_the_answer_leaves_all_slots_in_quarantine(books: Books) -> None:
    books.ledger.leave(1)
    assert (books.free, books.quarantined) == (12, 4)
    books.ledger.answer(1, NONE)
    assert (books.free, books.quarantined) == (16, 0)


def test_a_late_answer_with_unsettled_slots_keeps_all_until_they_settle(books: Books) -> None:
    books.ledger.leave(1)
    books.ledger.answer(1, positions(2))
    assert books.quarantined == 4
    books.ledger.settle(1)
    assert books.free == 16


def settled_calls(books: Books) -> list[int]:
    """Return the list that says when no transfer of request 1 is under way."""
    calls: list[int] = []
    assert books.ledger.when_settled(1, lambda: calls.append(1))
    return calls


def test_who_waits_for_the_end_of_transfers_is_called_once(books: Books) -> None:
    slots = books.ledger.slots(1)
    assert not books.ledger.are_settled(1, slots).any()
    calls = settled_calls(books)
    books.ledger.answer(1, positions(1, 3))
    assert books.ledger.are_settled(1, slots).tolist() == [True, False, True, False]
    books.ledger.leave(1)
    assert calls == []
    books.ledger.settle(1)
    assert calls == [1]
    assert books.ledger.are_settled(1, slots).all()
    assert not books.ledger.when_settled(1, lambda: calls.append(1)), "nothing is under way"
    assert calls == [1]


@pytest.mark.parametrize("leaves", [True, False])
def test_who_waits_is_called_by_a_last_answer_and_by_another_start_of_the_agent(
    books: Books, leaves: bool
) -> None:
    calls = settled_calls(books)
    if leaves:
        books.ledger.leave(1)
    books.ledger.answer(1, NONE)
    assert calls == [1]
    books.send(2)
    assert books.ledger.when_settled(2, lambda: calls.append(2))
    books.ledger.lose_connection(is_drained=False)
    assert calls == [1]
    books.ledger.meet_agent(AGENT, NEXT_START)
    assert calls == [1, 2]


def test_settled_before_the_answer_means_nothing(books: Books) -> None:
    books.ledger.leave(1)
    books.ledger.settle(1)
    assert books.quarantined == 4


def test_a_lost_connection_settles_nothing_when_others_moved_the_bytes(books: Books) -> None:
    books.ledger.lose_connection(is_drained=False)
    books.ledger.leave(1)
    assert (books.free, books.quarantined) == (12, 4)
    assert not books.ledger.is_due()
    books.ledger.meet_agent(AGENT, FIRST_START)
    books.ledger.meet_agent("agent-2", NEXT_START)
    assert books.quarantined == 4
    books.ledger.meet_agent(AGENT, NEXT_START)
    assert books.free == 16


def test_a_lost_connection_settles_what_it_carried_itself(books: Books) -> None:
    books.send(2)
    books.ledger.leave(2)
    books.ledger.lose_connection(is_drained=True)
    assert (books.free, books.quarantined) == (12, 0)
    books.ledger.leave(1)
    assert books.free == 16


def test_of_two_connections_only_the_lost_one_has_slots_in_doubt(books: Books) -> None:
    taken = books.ledger.take(4, PAGE)
    assert taken is not None
    books.ledger.add(2, taken, agent="agent-2", start_id=FIRST_START, connection="second")
    for request in (1, 2):
        books.ledger.leave(request)
    books.ledger.lose_connection(is_drained=False)
    assert books.ledger.owing_agents == {AGENT}
    assert (books.ledger.is_due(), books.ledger.is_due("second")) == (False, True)
    assert books.quarantined == 8
    books.ledger.answer(2, NONE)
    assert books.quarantined == 4


def test_what_a_lost_connection_carried_itself_says_nothing_of_what_others_move(books: Books) -> None:
    books.ledger.leave(1)
    books.ledger.lose_connection(is_drained=False)
    books.ledger.lose_connection(is_drained=True, connection="second")
    assert books.quarantined == 4


def test_a_new_start_of_the_agent_does_not_take_slots_from_a_caller_who_looks_at_them(books: Books) -> None:
    books.ledger.lose_connection(is_drained=False)
    books.ledger.meet_agent(AGENT, NEXT_START)
    assert books.free == 12
    books.ledger.leave(1)
    assert books.free == 16


def test_the_same_start_of_the_agent_is_asked_about_slots_and_frees_them_with_its_word(books: Books) -> None:
    books.send(2)
    books.ledger.leave(1)
    books.ledger.answer(2, positions(0, 3))
    books.ledger.leave(2)
    assert (books.free, books.quarantined) == (10, 6)
    assert not books.is_stranded
    books.ledger.lose_connection(is_drained=False)
    assert books.quarantined == 6
    books.send(3)
    asked = books.ledger.meet_agent(AGENT, FIRST_START)
    assert asked == (1, 2), "what is sent on the new connection is none of the past"
    assert books.free == 6
    books.ledger.settle_past(asked)
    assert (books.free, books.quarantined, books.is_stranded) == (12, 0, False)


def test_only_the_agent_that_a_request_went_to_is_asked_about_it(books: Books) -> None:
    books.ledger.leave(1)
    books.ledger.lose_connection(is_drained=False)
    assert books.ledger.meet_agent("agent-2", NEXT_START) == ()
    assert (books.free, books.is_stranded) == (12, True)


def test_slots_that_a_caller_looks_at_are_settled_by_the_agents_word_and_free_when_it_leaves(
    books: Books,
) -> None:
    books.ledger.lose_connection(is_drained=False)
    books.ledger.settle_past(books.ledger.meet_agent(AGENT, FIRST_START))
    assert books.free == 12
    books.ledger.leave(1)
    assert books.free == 16


def test_at_the_quarantine_limit_the_ledger_is_closed(books: Books) -> None:
    was_open = []
    books.ledger.leave(1)
    was_open.append(books.ledger.is_open)
    books.send(2)
    books.ledger.leave(2)
    was_open.append(books.ledger.is_open)
    books.ledger.answer(1, NONE)
    was_open.append(books.ledger.is_open)
    assert was_open == [True, False, True]


def test_requests_without_slots_are_not_in_the_books(books: Books) -> None:
    books.ledger.answer(5, NONE)
    books.ledger.settle(5)
    books.ledger.leave(5)
    assert not len(books.ledger.slots(5))
    assert len(books.ledger.slots(1)) == 4
    assert books.free == 12


class AnyOrder(RuleBasedStateMachine):
    """Whatever the order of events: no slot is free that the caller or the agent may still use."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.requests = 0
        self.held: dict[int, int] = {}
        self.open: dict[int, int] = {}
        self.unsettled: dict[int, int] = {}

    @precondition(lambda self: self.books.pool.free_bytes >= 4 * PAGE)
    @rule(slots=st.integers(1, 4))
    def send(self, slots: int) -> None:
        self.requests += 1
        self.books.send(self.requests, slots)
        self.held[self.requests] = self.open[self.requests] = slots

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.open)))
        slots = self.open.pop(request)
        unsettled = data.draw(st.lists(st.integers(0, slots - 1), unique=True))
        self.books.ledger.answer(request, positions(*unsettled))
        if unsettled:
            self.unsettled[request] = len(unsettled)

    @precondition(lambda self: self.unsettled)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.unsettled)))
        del self.unsettled[request]
        self.books.ledger.settle(request)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[request]
        self.books.ledger.leave(request)

    @rule(is_drained=st.booleans(), is_restarted=st.booleans())
    def lose(self, is_drained: bool, is_restarted: bool) -> None:
        self.books.ledger.lose_connection(is_drained=is_drained)
        if not is_drained:
            self.nothing_in_use_is_free()
            start = NEXT_START if is_restarted else FIRST_START
            self.books.ledger.settle_past(self.books.ledger.meet_agent(AGENT, start))
        self.open.clear()
        self.unsettled.clear()

    @invariant()
    def nothing_in_use_is_free(self) -> None:
        used = SLOTS - self.books.free
        at_least = sum(self.open.values()) + sum(
            count for request, count in self.unsettled.items() if request not in self.held
        )
        assert used >= at_least
        if not self.held and not self.open and not self.unsettled:
            assert used == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
