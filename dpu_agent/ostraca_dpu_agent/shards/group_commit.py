"""Group commit of a shard: commits share summary writes, and are answered at the end of a write.

A commit waits for others: a few milliseconds, and only while open reservations could join. A write taken from
the core is submitted soon or never: after a stop of the agent longer than ``pause_max_s`` the write is
dropped. A successor relies on the drop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_dpu_agent.shards.core import CommitResults, ShardCore, SummaryWrite, slots_in
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.runtime.tasks import set_within
from ostraca_fabric.wire.codec import Outcomes

log = logging.getLogger(__name__)


class GroupCommit:
    """Summary writes of a shard, and the waiting commits. Call ``run`` in a task."""

    def __init__(
        self,
        core: ShardCore,
        record: ShardRecord,
        drive: Drive,
        clock: Callable[[], float],
        settings: OwnerSettings,
        *,
        reservations_max: int,
        on_end: Callable[[], None],
    ) -> None:
        """Call *on_end* after each change of *source* by the end of a write."""
        self._core = core
        self._record = record
        self._drive = drive
        self._clock = clock
        self._group_commit_s = settings.group_commit_s
        self._pause_max_s = settings.pause_max_s
        self._on_end = on_end
        self._tickets = Tickets(reservations_max)
        self._is_due = asyncio.Event()
        self._has_all_commits = asyncio.Event()
        """Set when no open reservation is left to share the next write."""

        self._ended = asyncio.Event()
        self._is_closing = False
        self.has_failed = False
        """Whether a write has failed."""

        self.pages = HugeMemory(1 << 20, prefault=False)
        """Memory of writes, which the user closes or leaks in the end."""

    def issue(self, reservations: NDArray[np.uint64], answer: Outcomes) -> Ticket:
        """Return the ticket of a commit with this immediate answer."""
        return self._tickets.issue(reservations, answer)

    def answer(self, results: CommitResults) -> None:
        """Answer the tickets of these commits."""
        self._tickets.answer(results)
        self._wake_waiting()

    def begin_due(self) -> None:
        """Begin the writes that are due."""
        if self._core.has_writes_due:
            self._is_due.set()
            if not self._core.reservations.has_held:
                self._has_all_commits.set()

    async def ended_within(self, seconds: float) -> bool:
        """Wait for the end of a write, at most *seconds*; return whether one ended."""
        return await set_within(self._ended, seconds)

    def close(self) -> None:
        """Let ``run`` return after the writes that are due."""
        self._is_closing = True
        self._is_due.set()
        self._has_all_commits.set()

    def fail(self) -> None:
        """Decline all waiting commits, after a crash of ``run``."""
        self._tickets.decline_all(Reason.DRIVE_ERROR)
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Let callers that wait for space try again."""
        ended, self._ended = self._ended, asyncio.Event()
        ended.set()

    async def run(self) -> None:
        """Write whenever writes are due, until ``close``."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            await self._gather()
            begun_s = self._clock()
            while writes := self._core.writes_due(begun_s):
                await self._write(writes, begun_s)
                begun_s = self._clock()
            if self._is_closing:
                return

    async def _gather(self) -> None:
        """Wait for commits that may share the next write."""
        self._has_all_commits.clear()
        if self._core.reservations.has_held and not self._is_closing:
            await set_within(self._has_all_commits, self._group_commit_s)

    async def _write(self, writes: list[SummaryWrite], begun_s: float) -> None:
        if not await self._flushed():  # the blocks to list may still be lost
            for write in writes:
                self._end(write, is_ok=False)
            return
        is_ok, is_dropped = [True] * len(writes), [True] * len(writes)
        pieces = [(number, *piece) for number, write in enumerate(writes) for piece in write.pieces]
        for batch in _batches(pieces, len(self.pages.view)):
            lengths = np.array([len(pages) for _, _, pages in batch], np.uint32)
            places = np.cumsum(lengths, dtype=np.int64) - lengths
            offsets = np.array([self._record.offset + offset for _, offset, _ in batch], np.int64)
            for (_, _, pages), at in zip(batch, places.tolist(), strict=True):
                self.pages.view[at : at + len(pages)] = pages
            if self._clock() - begun_s > self._pause_max_s:
                ends = np.zeros(len(batch), np.bool_)
            else:
                for number, _, _ in batch:
                    is_dropped[number] = False
                ends = await self._drive.submit_write(Pieces(self.pages.array, places, offsets, lengths))
            for (number, _, _), end in zip(batch, ends.tolist(), strict=True):
                is_ok[number] &= end
        if not await self._flushed():
            is_ok = [False] * len(writes)
        for write, good, dropped in zip(writes, is_ok, is_dropped, strict=True):
            self._end(write, is_ok=good, is_dropped=dropped)

    async def _flushed(self) -> bool:
        """Make earlier writes durable, if the drive has a volatile cache; return whether they are."""
        return not self._drive.has_volatile_cache or await self._drive.submit_flush()

    def _end(self, write: SummaryWrite, *, is_ok: bool, is_dropped: bool = False) -> None:
        shard, now_s = self._record.id, self._clock()
        if is_dropped:
            log.warning(
                "shard %s drops a summary: the agent was stopped for over %.0f s", shard, self._pause_max_s
            )
            results = self._core.dropped(now_s, write)
        else:
            if not is_ok:
                self.has_failed = True
                log.warning("shard %s could not write a summary: its blocks are declined", shard)
            results = self._core.written(now_s, write, is_ok=is_ok)
        self.answer(results)
        self._on_end()


def _batches(pieces: list[tuple[int, int, bytes]], room: int) -> Iterator[list[tuple[int, int, bytes]]]:
    """Cut (write, offset, pages) into batches of at most *room* bytes; split longer pieces."""
    batch: list[tuple[int, int, bytes]] = []
    used = 0
    for write, offset, pages in pieces:
        for start in range(0, len(pages), room):
            part = pages[start : start + room]
            if used + len(part) > room:
                yield batch
                batch, used = [], 0
            batch.append((write, offset + start, part))
            used += len(part)
    if batch:
        yield batch


@dataclass(slots=True, eq=False)
class Ticket:
    """Answer to one commit. Waiting rows are STAGED."""

    states: NDArray[np.uint8]
    reasons: NDArray[np.uint8]
    waiting: int
    """Number of rows not answered yet."""

    done: asyncio.Future[None]

    def answer(self, rows: NDArray[np.intp], states: NDArray[np.uint8], reasons: NDArray[np.uint8]) -> None:
        """Answer waiting rows, each once."""
        self.states[rows], self.reasons[rows] = states, reasons
        self.waiting -= len(rows)
        # A caller that has gone away has cancelled the future.
        if not self.waiting and not self.done.done():
            self.done.set_result(None)


class Tickets:
    """Tickets of one shard, with reservations in *slots_max* slots.

    Several writes may list the blocks of a call, and a write the blocks of many calls. Each reservation under
    way has a ticket and a row there; a ticket is done when the last row is answered.
    """

    def __init__(self, slots_max: int) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._last = 0
        self._ticket_of = np.zeros(slots_max, np.int64)
        self._row_of = np.zeros(slots_max, np.intp)

    def __len__(self) -> int:
        return len(self._tickets)

    def issue(self, reservations: NDArray[np.uint64], answer: Outcomes) -> Ticket:
        """Issue a ticket for the core's immediate answer; without waiting rows it is done."""
        rows = (answer.states == PutState.STAGED).nonzero()[0]
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

    def answer(self, results: CommitResults) -> None:
        """Tell the tickets how these commits ended."""
        slots = slots_in(results.reservations)
        if not len(slots):  # an opening lists no block
            return
        order = self._ticket_of[slots].argsort(kind="stable")
        numbers, rows = self._ticket_of[slots[order]], self._row_of[slots[order]]
        states, reasons = results.states[order], results.reasons[order]
        cuts = (numbers[1:] != numbers[:-1]).nonzero()[0] + 1
        for begin, end in itertools.pairwise([0, *cuts.tolist(), len(numbers)]):
            number, own = int(numbers[begin]), slice(begin, end)
            ticket = self._tickets[number]
            ticket.answer(rows[own], states[own], reasons[own])
            if not ticket.waiting:
                del self._tickets[number]

    def decline_all(self, reason: Reason) -> None:
        """Decline every waiting row: no write will answer."""
        for ticket in self._tickets.values():
            rows = np.flatnonzero(ticket.states == PutState.STAGED)
            declined = Outcomes.filled(len(rows), PutState.DECLINED, reason)
            ticket.answer(rows, declined.states, declined.reasons)
        self._tickets.clear()
