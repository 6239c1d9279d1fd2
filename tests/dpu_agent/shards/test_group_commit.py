"""Tickets: every row of a commit is told its own end, however calls and summary writes overlap."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca_dpu_agent.shards.core import CommitResults, slots_in
from ostraca_dpu_agent.shards.group_commit import Ticket, Tickets
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.wire.codec import Outcomes

SLOTS = 64
ENDS = [(PutState.COMMITTED, Reason.NONE), (PutState.DECLINED, Reason.DRIVE_ERROR)]


def issued(tickets: Tickets, slots: list[int], waits: list[bool]) -> Ticket:
    """Commit reservations in these slots, of which the core took some."""
    states = np.where(waits, PutState.STAGED, PutState.DECLINED).astype(np.uint8)
    reasons = np.where(waits, Reason.NONE, Reason.EXPIRED).astype(np.uint8)
    return tickets.issue(numbers_of(slots), Outcomes(states, reasons))


def numbers_of(slots: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    numbers = np.array(slots, np.uint64) + np.uint64(7 << 24)
    assert slots_in(numbers).tolist() == slots
    return numbers


def ended(slots: list[int], ends: list[tuple[PutState, Reason]]) -> CommitResults:
    states, reasons = [state for state, _ in ends], [reason for _, reason in ends]
    return CommitResults(numbers_of(slots), np.array(states, np.uint8), np.array(reasons, np.uint8))


@given(
    calls=st.lists(st.lists(st.booleans(), max_size=6), max_size=8),
    seed=st.integers(0, 1 << 30),
    cut=st.integers(1, 9),
)
def test_each_call_ends_with_its_last_row_and_each_row_as_its_write_ended(
    calls: list[list[bool]], seed: int, cut: int
) -> None:
    async def scenario() -> None:
        roll, tickets = random.Random(seed), Tickets(SLOTS)
        free = list(range(SLOTS))
        roll.shuffle(free)
        taken = [[free.pop() for _ in waits] for waits in calls]
        made = [issued(tickets, slots, waits) for slots, waits in zip(taken, calls, strict=True)]
        expected = [[(PutState.DECLINED, Reason.EXPIRED)] * len(waits) for waits in calls]
        rows = [(call, row) for call, waits in enumerate(calls) for row, is_on in enumerate(waits) if is_on]
        roll.shuffle(rows)
        for begin in range(0, len(rows), cut):
            write, left = rows[begin : begin + cut], rows[begin + cut :]
            ends = roll.choices(ENDS, k=len(write))
            tickets.answer(ended([taken[call][row] for call, row in write], ends))
            for (call, row), end in zip(write, ends, strict=True):
                expected[call][row] = end
            waiting = {call for call, _ in left}
            assert [ticket.done.done() for ticket in made] == [
                call not in waiting for call in range(len(made))
            ]
        told = [list(zip(ticket.states.tolist(), ticket.reasons.tolist(), strict=True)) for ticket in made]
        assert told == expected
        assert len(tickets) == 0

    asyncio.run(scenario())


async def test_declining_all_leaves_what_was_answered_before() -> None:
    tickets = Tickets(SLOTS)
    split, other = issued(tickets, [1, 2, 3], [True, False, True]), issued(tickets, [9], [True])
    tickets.answer(ended([3], ENDS[:1]))
    assert not split.done.done()
    tickets.decline_all(Reason.DRIVE_ERROR)
    assert split.done.done()
    assert other.done.done()
    assert split.states.tolist() == [PutState.DECLINED, PutState.DECLINED, PutState.COMMITTED]
    assert split.reasons.tolist() == [Reason.DRIVE_ERROR, Reason.EXPIRED, Reason.NONE]
    assert len(tickets) == 0


async def test_answering_what_nobody_asked_is_a_broken_call() -> None:
    with pytest.raises(KeyError):
        Tickets(SLOTS).answer(ended([5], ENDS[:1]))
