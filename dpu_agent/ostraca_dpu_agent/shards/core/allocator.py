"""Allocation of space to writers: admission, reservations, and their end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core.answers import Allocations, ShardCounters, ShardSettings
from ostraca_dpu_agent.shards.core.catalog import BlockCatalog, end_of
from ostraca_dpu_agent.shards.core.eviction import Eviction
from ostraca_dpu_agent.shards.core.grants import Grants
from ostraca_dpu_agent.shards.core.reservations import HELD, ReservationTable
from ostraca_dpu_agent.shards.core.ring.pools import Pool
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_dpu_agent.shards.core.write_budget import ShardWriteBudget
from ostraca_fabric.model.chain import DEPTH_UNKNOWN
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.outcome import PutState, Reason

_NONE = int(Reason.NONE)  # numpy takes three times as long with an enum's member


class SpaceAllocator:
    """Reserves space of a shard for writers, and takes space back."""

    def __init__(
        self,
        ring: Ring,
        catalog: BlockCatalog,
        grants: Grants,
        reservations: ReservationTable,
        eviction: Eviction,
        budget: ShardWriteBudget,
        counters: ShardCounters,
        settings: ShardSettings,
    ) -> None:
        self._ring = ring
        self._catalog = catalog
        self._grants = grants
        self._reservations = reservations
        self._eviction = eviction
        self._budget = budget
        self._counters = counters
        self._settings = settings

    def reserve(
        self,
        now_s: float,
        keys: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
        *,
        hold_s: float,
        depths: NDArray[np.uint32] | None,
        ttl_s: float,
        pool: int,
        is_again: bool,
    ) -> Allocations:
        """Answer ``ShardCore.reserve``."""
        of_pool = self._ring.pools.of(pool)
        stored_bytes = _stored_bytes(lengths)
        answer, wanted = self._admit(now_s, keys, stored_bytes, depths, of_pool, is_again=is_again)
        reserved = self._allocate(
            now_s,
            of_pool,
            keys[wanted],
            lengths[wanted],
            stored_bytes[wanted],
            hold_s=hold_s,
            kept_until_s=np.array([end_of(now_s, ttl_s)]),
        )
        self._counters.blocks_reserved += len(reserved[0])
        _grant(answer, wanted, *reserved)
        return answer

    def reserve_copies(
        self, now_s: float, keys: NDArray[np.uint8], lengths: NDArray[np.uint32], *, hold_s: float
    ) -> Allocations:
        """Answer ``ShardCore.reserve_copies``."""
        answer = Allocations.none(np.zeros(len(keys), np.bool_), Reason.NO_SPACE)
        if self._grants.refusal(now_s) is not Reason.NONE:
            return answer
        index = self._catalog.index
        rows = index.find(keys)
        wanted = np.flatnonzero(rows >= 0)  # blocks dropped meanwhile are not copied,
        wanted = wanted[index.is_read(rows[wanted])]  # nor those whose session has ended
        is_new = self._reservations.are_new(keys[wanted])
        answer.reasons[wanted[~is_new]] = Reason.IN_FLIGHT
        wanted = wanted[is_new]
        if not len(wanted):
            return answer
        segments = self._catalog.segments_of(rows[wanted])
        is_together = self._ring.pool_numbers[segments] == self._ring.pool_numbers[segments[0]]
        wanted, segments = wanted[is_together], segments[is_together]  # a batch lies in one segment
        pool = self._ring.pools.of(self._ring.segments[int(segments[0])].pool)
        kept_until_s = self._catalog.lifetimes.ends_s(segments, index.marks(rows[wanted]))
        self._eviction.request(now_s, pool)
        wanted = wanted[: min(self._reservations.room, self._index_room(pool))]
        reserved = self._allocate(
            now_s,
            pool,
            keys[wanted],
            lengths[wanted],
            _stored_bytes(lengths[wanted]),
            hold_s=hold_s,
            kept_until_s=kept_until_s,
            is_reinsertion=True,
        )
        _grant(answer, wanted, *reserved)
        return answer

    def _admit(
        self,
        now_s: float,
        keys: NDArray[np.uint8],
        stored_bytes: NDArray[np.int64],
        depths: NDArray[np.uint32] | None,
        pool: Pool,
        *,
        is_again: bool,
    ) -> tuple[Allocations, NDArray[np.intp]]:
        """Return an answer without space that notes existing and refused blocks, and the blocks to store.

        Existing blocks and blocks in flight cost nothing and come first; then blocks not worth a write; then
        blocks without room. Blocks of a repeated request (*is_again*) were admitted before: a waiting put
        must not count as a second touch.
        """
        exists = self._catalog.index.find(keys) >= 0
        answer = Allocations.none(exists, Reason.NONE)
        reasons, wanted = answer.reasons, (~exists).nonzero()[0]
        is_bad = (stored_bytes == 0) | (stored_bytes > self._ring.geometry.data_bytes)
        wanted = _without(wanted, is_bad[wanted], reasons, Reason.BAD_LENGTH)
        refusal = self._grants.refusal(now_s)
        if refusal is not Reason.NONE:
            reasons[wanted] = refusal
            return answer, wanted[:0]
        is_new = self._reservations.are_new(keys[wanted])
        wanted = _without(wanted, ~is_new, reasons, Reason.IN_FLIGHT)
        if not is_again:
            if depths is None:
                depths = np.full(len(keys), DEPTH_UNKNOWN, np.uint32)
            reasons[wanted] = self._budget.decide(
                now_s, keys[wanted], stored_bytes[wanted], depths[wanted], pool=pool.number
            )
            wanted = wanted[reasons[wanted] == _NONE]
        reasons[wanted[self._reservations.room :]] = Reason.OVERLOADED
        wanted = wanted[: self._reservations.room]
        if len(wanted):
            self._eviction.request(now_s, pool)
        room = self._index_room(pool)
        reasons[wanted[room:]] = Reason.INDEX_FULL
        return answer, wanted[:room]

    def _index_room(self, pool: Pool) -> int:
        """Return the number of index entries left for a pool's blocks."""
        room = self._catalog.index.room - len(self._reservations)
        return max(0, min(room, pool.entry_room) if pool.has_share else room)

    def _allocate(
        self,
        now_s: float,
        pool: Pool,
        keys: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
        sizes: NDArray[np.int64],
        *,
        hold_s: float,
        kept_until_s: NDArray[np.float64],
        is_reinsertion: bool = False,
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Reserve a pool's space for as many blocks, in order, as fit; return (numbers, offsets).

        *sizes*: bytes on flash. *kept_until_s*: end of the lifetime of each block, or of all.
        """
        offsets, segments = self._ring.place(pool, sizes)
        while len(offsets) < len(sizes) and self._eviction.make_room(now_s, pool):
            more, behind = self._ring.place(pool, sizes[len(offsets) :])
            offsets, segments = np.concatenate([offsets, more]), np.concatenate([segments, behind])
        count = len(offsets)
        if not count:
            return offsets, offsets
        numbers = self._reservations.add(
            now_s + min(hold_s, self._settings.hold_max_s),
            keys[:count],
            lengths[:count],
            offsets,
            segments,
            kept_until_s=kept_until_s[:count],
            is_reinsertion=is_reinsertion,
        )
        self._budget.spend(int(sizes[:count].sum()), pool.number)
        return numbers, offsets

    def release(self, now_s: float, numbers: NDArray[np.uint64], *, may_land: bool) -> None:
        """End reservations early. With *may_land* their failed writes may still land."""
        table = self._reservations
        slots = table.slots_of(numbers)
        slots = slots[slots >= 0]
        held = slots[table.states[slots] == HELD]
        if may_land:
            self.expect_late_writes(table.segments[held], now_s)
        self._end(held, now_s)

    def expire(self, now_s: float) -> None:
        """End expired reservations. Their writers may be at work until ``late_write_s`` later."""
        table = self._reservations
        expired = table.take_expired(now_s)
        if len(expired):
            ends_s = table.ends_s[expired] + self._settings.late_write_s
            self._ring.keep_quiet(table.segments[expired], ends_s)
            self._end(expired, now_s)

    def expect_late_writes(self, segments: NDArray[np.intp], failed_s: float) -> None:
        """Do not reuse segments while writes that failed at *failed_s* may still land."""
        self._ring.keep_quiet(segments, failed_s + self._settings.late_write_s)

    def _end(self, slots: NDArray[np.intp], now_s: float) -> None:
        held = np.bincount(self._reservations.segments[slots])
        for number in np.flatnonzero(held).tolist():
            segment = self._ring.segments[number]
            segment.held -= int(held[number])
            segment.touched_s = now_s
        self._reservations.end(slots)


def _stored_bytes(lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the bytes on flash of blocks of any length: whole pages."""
    stored: NDArray[np.int64] = (lengths.astype(np.int64) + (PAGE_BYTES - 1)) & -PAGE_BYTES
    return stored


def _without(
    wanted: NDArray[np.intp], is_refused: NDArray[np.bool_], reasons: NDArray[np.uint8], reason: Reason
) -> NDArray[np.intp]:
    """Refuse some of the *wanted* blocks for a reason; return the others."""
    reasons[wanted[is_refused]] = reason
    return wanted[~is_refused]


def _grant(
    answer: Allocations,
    wanted: NDArray[np.intp],
    numbers: NDArray[np.uint64],
    offsets: NDArray[np.uint64],
) -> None:
    """Note the space of the first *wanted* blocks, as many as there are *numbers*: the others have none."""
    placed = wanted[: len(numbers)]
    answer.reasons[wanted[len(numbers) :]] = Reason.NO_SPACE
    answer.states[placed], answer.reasons[placed] = PutState.STAGED, Reason.NONE
    answer.reservations[placed], answer.offsets[placed] = numbers, offsets
