"""Commits on their way into summaries, and openings of segments.

A segment has at most one summary write under way; later commits wait for the next. Nothing is written after
the fence: queued commits are declined then, as no time of their write can be known.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core.answers import CommitResults, ShardCounters, SummaryWrite
from ostraca_dpu_agent.shards.core.catalog import BlockCatalog
from ostraca_dpu_agent.shards.core.eviction import Reinsertion
from ostraca_dpu_agent.shards.core.grants import Grants
from ostraca_dpu_agent.shards.core.reservations import COMMITTING, HELD, ReservationTable
from ostraca_dpu_agent.shards.core.ring.pools import Segment, SegmentState
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_dpu_agent.shards.core.write_budget import ShardWriteBudget
from ostraca_fabric.model.extent import whole_pages
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.wire.codec import Outcomes, distinct

_NONE = np.zeros(0, np.intp)

_WRITE_ENTRIES_MAX = 1600
"""Limit of blocks in one summary write: at most 33 pages."""


class CommitQueue:
    """Summary writes of one shard: due, under way, and ended."""

    def __init__(
        self,
        ring: Ring,
        catalog: BlockCatalog,
        grants: Grants,
        reservations: ReservationTable,
        reinsertion: Reinsertion,
        budget: ShardWriteBudget,
        counters: ShardCounters,
        *,
        retry_s: float,
    ) -> None:
        self._ring = ring
        self._catalog = catalog
        self._grants = grants
        self._reservations = reservations
        self._reinsertion = reinsertion
        self._budget = budget
        self._counters = counters
        self._retry_s = retry_s
        self._under_way: dict[int, tuple[Segment, NDArray[np.intp]]] = {}
        self._queued: dict[int, Segment] = {}
        self._opening_due: Segment | None = None
        self._open_after_s = 0.0
        self._declined: list[CommitResults] = []

    @property
    def is_due(self) -> bool:
        """Whether a write is due, if permitted."""
        return self._opening_due is not None or any(
            not segment.is_writing for segment in self._queued.values()
        )

    def begin(self, now_s: float) -> None:
        """Open segments from now on."""
        self._open_after_s = now_s

    def open_next(self, now_s: float) -> None:
        """Begin to open a segment, if needed and permitted."""
        if now_s < self._open_after_s or not self._ring.wants_opening or not self._grants.may_write(now_s):
            return
        freed = self._grants.first_free()
        if freed is not None:
            self._opening_due = self._ring.begin_opening(freed)

    def commit(
        self,
        now_s: float,
        reservations: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        seeds: NDArray[np.uint64],
    ) -> Outcomes:
        """Answer ``ShardCore.commit`` under the current epoch."""
        table = self._reservations
        answer = Outcomes.filled(len(reservations), PutState.DECLINED, Reason.EXPIRED)
        may_write = self._grants.may_write(now_s)
        slots = table.slots_of(reservations)
        known = (slots >= 0).nonzero()[0]
        answer.reasons[known[table.states[slots[known]] == COMMITTING]] = Reason.IN_FLIGHT
        held = known[table.states[slots[known]] == HELD]
        segments = table.segments[slots[held]]
        for number in distinct(segments).tolist():
            segment = self._ring.segments[number]
            here = held[segments == number]
            segment.held -= len(here)
            segment.touched_s = now_s
            assert segment.state is not SegmentState.DRAINING, "its writers are at work"
            is_broken = segment.is_broken or not self._grants.is_writable
            if is_broken or not may_write:
                table.end(slots[here])
                answer.reasons[here] = Reason.DRIVE_ERROR if is_broken else Reason.FENCED
                continue
            table.begin_commit(slots[here], tags[here], seeds[here])
            segment.queued.append(slots[here])
            self._queued[number] = segment
            answer.set(here, PutState.STAGED, Reason.NONE)
        return answer

    def take_due(self) -> list[SummaryWrite]:
        """Return the writes to submit now."""
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
            writes.append(self._write(segment, slots, segment.log.append(self._reservations.entries(slots))))
        return writes

    def end(self, now_s: float, write: SummaryWrite, failed: Reason) -> CommitResults:
        """End a write; *failed* is NONE after success."""
        is_ok = failed is Reason.NONE
        segment, slots = self._under_way.pop(write.number)
        segment.is_writing, segment.touched_s = False, now_s
        self._counters.summary_write_failures += not is_ok
        if segment is self._ring.opening:
            self._ring.end_opening(is_ok=is_ok)
            if not is_ok:
                self._open_after_s = now_s + self._retry_s
        elif not is_ok:
            slots = self._break(segment, slots)
        if is_ok and len(slots):
            self._list(slots, segment)
        return self._end(slots, PutState.COMMITTED if is_ok else PutState.DECLINED, failed)

    def decline_queued(self, now_s: float) -> None:
        """Decline queued commits after the fence."""
        for segment in self._queued.values():
            slots = np.concatenate(segment.queued)
            segment.queued, segment.touched_s = [], now_s
            self._declined.append(self._end(slots, PutState.DECLINED, Reason.FENCED))
        self._queued.clear()

    def take_declined(self) -> list[CommitResults]:
        """Return the commits declined since the last call."""
        declined, self._declined = self._declined, []
        return declined

    def _list(self, slots: NDArray[np.intp], segment: Segment) -> None:
        """List blocks after their summary write.

        Copies supersede the originals. Own blocks supersede blocks of the same keys, listed meanwhile by an
        earlier owner.
        """
        table, counters = self._reservations, self._counters
        is_copy = table.is_reinsertion[slots]
        supersedes = is_copy | table.is_adopted[slots]
        if supersedes.any():
            self._catalog.supersede(table.keys[slots[supersedes]], segment=segment.number)
        insertions = self._catalog.index.insert(
            table.keys[slots],
            table.tags[slots],
            table.offsets[slots],
            table.lengths[slots],
            segment=segment.number,
            marks=self._catalog.lifetimes.marks(segment.number, table.kept_until_s[slots]),
        )
        assert not insertions.any(), "room was kept, and no other write has these keys"
        stored_bytes = whole_pages(table.lengths[slots])
        copied_bytes = int(stored_bytes[is_copy].sum(dtype=np.int64))
        committed_bytes = int(stored_bytes.sum(dtype=np.int64)) - copied_bytes
        copies = int(np.count_nonzero(is_copy))
        counters.blocks_reinserted += copies
        counters.bytes_reinserted += copied_bytes
        counters.blocks_committed += len(slots) - copies
        counters.bytes_committed += committed_bytes
        self._reinsertion.earn(committed_bytes, self._ring.pools.of(segment.pool))

    def _end(self, slots: NDArray[np.intp], state: PutState, reason: Reason) -> CommitResults:
        self._reservations.end(slots)
        ends = Outcomes.filled(len(slots), state, reason)
        return CommitResults(self._reservations.numbers[slots], ends.states, ends.reasons)

    def _write(
        self, segment: Segment, slots: NDArray[np.intp], pieces: tuple[tuple[int, bytes], ...]
    ) -> SummaryWrite:
        self._counters.summary_writes += 1
        number = self._counters.summary_writes
        written_bytes = sum(len(pages) for _, pages in pieces)
        self._counters.summary_bytes += written_bytes
        self._under_way[number] = (segment, slots)
        segment.is_writing = True
        self._budget.spend(written_bytes, segment.pool)
        return SummaryWrite(number, segment.number, segment.generation, pieces)

    def _break(self, segment: Segment, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Stop commits to a segment after a failed summary write; return the failed commits."""
        segment.is_broken = True
        failed = np.concatenate([slots, *segment.queued])
        segment.queued = []
        self._queued.pop(segment.number, None)
        pool = self._ring.pools.of(segment.pool)
        if segment is pool.current:
            pool.seal_current()
        return failed
