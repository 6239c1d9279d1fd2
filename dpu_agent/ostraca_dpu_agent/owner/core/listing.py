"""Commits on their way into summaries, and the openings of segments: what is to be written, and how it ended.

A segment has at most one write under way; what is committed meanwhile waits for the next. Nothing is taken
after the fence: what has waited until then is declined, because nobody knows when it could be written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.answers import CommitAnswer, CommitsDone, SummaryWrite
from ostraca_dpu_agent.owner.core.evicting import listed
from ostraca_dpu_agent.owner.core.holds import COMMITTING, HELD
from ostraca_dpu_agent.owner.core.segments import SegmentState
from ostraca_fabric.outcome import PutState, Reason
from ostraca_fabric.rows import distinct

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_dpu_agent.owner.core.segments import Segment
    from ostraca_dpu_agent.owner.core.shard import ShardCore

_NONE = np.zeros(0, np.intp)

_WRITE_ENTRIES_MAX = 1600
"""Blocks in one summary write: 33 pages at most. More wait for the next."""


class Listing:
    """The summary writes of one shard: due, under way, and ended."""

    def __init__(self, core: ShardCore) -> None:
        """Have nothing to write."""
        self._core = core
        self._under_way: dict[int, tuple[Segment, NDArray[np.intp]]] = {}
        self._queued: dict[int, Segment] = {}
        self._opening_due: Segment | None = None
        self._open_after_s = 0.0
        self._declined: list[CommitsDone] = []

    @property
    def is_due(self) -> bool:
        """Whether there is something to write, where it may be."""
        return self._opening_due is not None or any(
            not segment.is_writing for segment in self._queued.values()
        )

    def begin(self, now_s: float) -> None:
        """Open segments from now on."""
        self._open_after_s = now_s

    def open_next(self, now_s: float) -> None:
        """Begin to open a segment, when it is time and one may be."""
        core = self._core
        if now_s < self._open_after_s or not core.ring.wants_opening or not core.grants.may_write(now_s):
            return
        freed = core.grants.first_free()
        if freed is not None:
            self._opening_due = core.ring.begin_opening(freed)

    def commit(
        self,
        now_s: float,
        reservations: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        seeds: NDArray[np.uint64],
    ) -> CommitAnswer:
        """Answer ``ShardCore.commit`` for the epoch that is."""
        core, table = self._core, self._core.reservations
        states = np.full(len(reservations), PutState.DECLINED, np.uint8)
        reasons = np.full(len(reservations), Reason.EXPIRED, np.uint8)
        may_write = core.grants.may_write(now_s)
        slots = table.slots_of(reservations)
        known = np.flatnonzero(slots >= 0)
        reasons[known[table.states[slots[known]] == COMMITTING]] = Reason.IN_FLIGHT
        held = known[table.states[slots[known]] == HELD]
        segments = table.segments[slots[held]]
        for number in distinct(segments).tolist():
            segment = core.ring.segments[number]
            here = held[segments == number]
            segment.held -= len(here)
            segment.touched_s = now_s
            is_broken = segment.is_broken or not core.is_writable
            if is_broken or segment.state is SegmentState.DRAINING or not may_write:
                table.end(slots[here])
                refused = Reason.EXPIRED if may_write else Reason.FENCED
                reasons[here] = Reason.DRIVE_ERROR if is_broken else refused
                continue
            table.begin_commit(slots[here], tags[here], seeds[here])
            segment.queued.append(slots[here])
            self._queued[number] = segment
            states[here], reasons[here] = PutState.STAGED, Reason.NONE
        return CommitAnswer(states, reasons)

    def take_due(self) -> list[SummaryWrite]:
        """Answer ``ShardCore.writes_due`` where something may be written."""
        writes: list[SummaryWrite] = []
        if self._opening_due is not None:
            assert self._opening_due.log is not None, "an opening segment has a summary"
            writes.append(self._write(self._opening_due, _NONE, self._opening_due.log.opening()))
            self._opening_due = None
        for segment in [segment for segment in self._queued.values() if not segment.is_writing]:
            assert segment.log is not None, "commits go to segments opened by this owner"
            gathered = np.concatenate(segment.queued)
            slots, later = gathered[:_WRITE_ENTRIES_MAX], gathered[_WRITE_ENTRIES_MAX:]
            segment.queued = [later] if len(later) else []
            if not segment.queued:
                del self._queued[segment.number]
            entries = self._core.reservations.entries(slots)
            writes.append(self._write(segment, slots, segment.log.append(entries)))
        return writes

    def end(self, now_s: float, write: SummaryWrite, failed: Reason) -> CommitsDone:
        """Answer ``ShardCore.written`` and ``dropped``: *failed* is NONE for a good write."""
        core, is_ok = self._core, failed is Reason.NONE
        segment, slots = self._under_way.pop(write.number)
        segment.is_writing, segment.touched_s = False, now_s
        core.counted["summary_write_failures"] += not is_ok
        if segment is core.ring.opening:
            core.ring.end_opening(is_ok=is_ok)
            if not is_ok:
                self._open_after_s = now_s + core.settings.retry_s
        elif not is_ok:
            slots = self._break(segment, slots)
        if is_ok and len(slots):
            listed(core, slots, segment.number)
        state = PutState.COMMITTED if is_ok else PutState.DECLINED
        return self._ended(slots, state, failed)

    def decline_queued(self, now_s: float) -> None:
        """Decline what waits to be written: the fence has come."""
        for segment in self._queued.values():
            slots = np.concatenate(segment.queued)
            segment.queued, segment.touched_s = [], now_s
            self._declined.append(self._ended(slots, PutState.DECLINED, Reason.FENCED))
        self._queued.clear()

    def take_declined(self) -> list[CommitsDone]:
        """Return what was declined since the last call."""
        declined, self._declined = self._declined, []
        return declined

    def _ended(self, slots: NDArray[np.intp], state: PutState, reason: Reason) -> CommitsDone:
        table, count = self._core.reservations, len(slots)
        table.end(slots)
        states, reasons = np.full(count, state, np.uint8), np.full(count, reason, np.uint8)
        return CommitsDone(table.numbers[slots], states, reasons)

    def _write(
        self, segment: Segment, slots: NDArray[np.intp], pieces: tuple[tuple[int, bytes], ...]
    ) -> SummaryWrite:
        core = self._core
        core.counted["summary_writes"] += 1
        number = core.counted["summary_writes"]
        written_bytes = sum(len(pages) for _, pages in pieces)
        core.counted["summary_bytes"] += written_bytes
        self._under_way[number] = (segment, slots)
        segment.is_writing = True
        core.spending.spend(written_bytes, segment.pool)
        return SummaryWrite(number, segment.number, segment.generation, pieces)

    def _break(self, segment: Segment, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """List nothing more in a segment whose summary can't be written; return the commits that fail."""
        segment.is_broken = True
        failed = np.concatenate([slots, *segment.queued])
        segment.queued = []
        self._queued.pop(segment.number, None)
        pool = self._core.ring.pool_of(segment.pool)
        if segment is pool.current:
            pool.seal_current()
        return failed
