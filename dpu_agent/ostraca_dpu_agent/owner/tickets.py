"""Commits that wait for their summary writes: one *ticket* for each call, whatever the number of its blocks.

Blocks of one call may be listed by several writes, and one write may list those of many calls. Each
reservation under way knows its ticket and its row there; a ticket is done when its last row is answered.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core import slots_in
from ostraca_fabric.outcome import PutState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_dpu_agent.owner.core import CommitAnswer, CommitsDone
    from ostraca_fabric.outcome import Reason


@dataclass(slots=True, eq=False)
class Ticket:
    """What one call of commit is told in the end. Rows that wait are STAGED."""

    states: NDArray[np.uint8]
    reasons: NDArray[np.uint8]
    waiting: int
    """Rows not answered yet."""

    done: asyncio.Future[None]

    def answer(self, rows: NDArray[np.intp], states: NDArray[np.uint8], reasons: NDArray[np.uint8]) -> None:
        """Fill rows in that have waited, each once."""
        self.states[rows], self.reasons[rows] = states, reasons
        self.waiting -= len(rows)
        # Whoever waited may have gone away, which cancels what it waited for.
        if not self.waiting and not self.done.done():
            self.done.set_result(None)


class Tickets:
    """Tickets of one shard, for reservations in *slots_max* slots."""

    def __init__(self, slots_max: int) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._last = 0
        self._ticket_of = np.zeros(slots_max, np.int64)
        self._row_of = np.zeros(slots_max, np.intp)

    def __len__(self) -> int:
        return len(self._tickets)

    def issue(self, reservations: NDArray[np.uint64], answer: CommitAnswer) -> Ticket:
        """Take over what the core said at once; the ticket is done already when nothing waits."""
        rows = np.flatnonzero(answer.states == PutState.STAGED)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = Ticket(answer.states, answer.reasons, len(rows), done)
        if len(rows):
            self._last += 1
            self._tickets[self._last] = ticket
            slots = slots_in(reservations[rows])
            self._ticket_of[slots], self._row_of[slots] = self._last, rows
        else:
            done.set_result(None)
        return ticket

    def answer(self, ended: CommitsDone) -> None:
        """Tell the tickets how these commits ended."""
        slots = slots_in(ended.reservations)
        order = np.argsort(self._ticket_of[slots], kind="stable")
        numbers, rows = self._ticket_of[slots][order], self._row_of[slots][order]
        states, reasons = ended.states[order], ended.reasons[order]
        bounds = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1)).tolist()
        for begin, end in itertools.pairwise(bounds):
            number, own = int(numbers[begin]), slice(begin, end)
            ticket = self._tickets[number]
            ticket.answer(rows[own], states[own], reasons[own])
            if not ticket.waiting:
                del self._tickets[number]

    def decline_all(self, reason: Reason) -> None:
        """Answer every row that waits: no write will."""
        for ticket in self._tickets.values():
            rows = np.flatnonzero(ticket.states == PutState.STAGED)
            ticket.answer(
                rows,
                np.full(len(rows), PutState.DECLINED, np.uint8),
                np.full(len(rows), reason, np.uint8),
            )
        self._tickets.clear()
