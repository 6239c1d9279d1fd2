"""Eviction: which segment is emptied next, and what of it is kept.

Segments go whole, in the order in which they were sealed. Some time before, each is looked through once:
worth keeping are blocks that were read after the first part of its round through the ring. One bit for each
block says so; it is cleared when that part is over, and a copy does not inherit it. So what is kept is what
was read of late, and nothing is done for blocks that were read soon after they were written and then no more.

Where most of a segment is worth keeping, all of it goes round once more where it is. That writes nothing, but
the rest of it takes up flash for a round. Otherwise the blocks are copied to where new blocks go. That makes
room, but wears the flash: copies are a share of what was committed for callers, saved up to a few segments'
worth, and within the drive's write budget. Where those do not pay for all that is worth it, a segment goes
round for less.

It never holds anybody up: when writers need the space, the first segment goes with what has not been copied
yet. Nothing is kept for blocks whose time to live has run out (``lifetimes``), or that were not read again
since somebody said that their session ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.answers import Reservations
from ostraca_dpu_agent.owner.core.segments import SegmentState
from ostraca_fabric.extent import PAGE_BYTES, Generation
from ostraca_fabric.outcome import PutState, Reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_dpu_agent.owner.core.pools import Pool
    from ostraca_dpu_agent.owner.core.segments import Segment
    from ostraca_dpu_agent.owner.core.shard import ShardCore

_KEPT_AT = 0.75
"""A segment goes round again when so much of it is worth keeping: copying that would make little room."""

_KEPT_UNPAID_AT = 0.1
"""... or so much, where that is more than may be copied now."""

_LOOKS_AT_ONCE = 8
"""Segments looked through in one call, at most: each takes some ten microseconds."""

_CREDIT_SEGMENTS = 16
"""Leave to copy is saved up to so many segments' worth, and to one in so many segments of the shard."""


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """Blocks to copy out of a segment that is about to go, in the order in which they lie there."""

    segment: int
    generation: Generation
    keys: NDArray[np.uint8]
    """Shape (n, 16)."""

    tags: NDArray[np.uint8]
    """Shape (n, 16)."""

    offsets: NDArray[np.uint64]
    """In the shard, in bytes."""

    lengths: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.lengths)


class Eviction:
    """Empties segments of one shard ahead of need."""

    def __init__(self, core: ShardCore, *, carry_share: float) -> None:
        """Carry forward at most *carry_share* bytes for each byte committed."""
        self._core = core
        self._carry_share = carry_share
        self._none_stays_up_to = 0
        self._due: Carry | None = None
        self._taken: Carry | None = None
        self._evicted: list[NDArray[np.uint8]] = []

    @property
    def has_carry_due(self) -> bool:
        """Whether ``take_carry`` would return anything."""
        return self._due is not None

    @property
    def is_carrying(self) -> bool:
        """Whether copying was taken and has not ended."""
        return self._taken is not None

    def take_carry(self) -> Carry | None:
        """Take the copying to do now. Whoever takes it ends it with ``end_carry``."""
        if self._due is not None:
            self._due, self._taken = None, self._due
            return self._taken
        return None

    def is_there(self, carry: Carry) -> bool:
        """Say whether its segment is there still. Once it is not, leave the rest."""
        segment = self._core.ring.segments[carry.segment]
        return segment.generation == carry.generation and segment.state is SegmentState.SEALED

    def end_carry(self, now_s: float) -> None:
        """Everything is copied that will be: look for more."""
        self._taken = None
        self.advance(now_s)

    def take_evicted(self) -> list[NDArray[np.uint8]]:
        """Return the keys of what was evicted since the last call, segment by segment."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def note_evicted(self, keys: NDArray[np.uint8]) -> None:
        """Say of blocks that they left the index."""
        self._evicted.append(keys)

    def session_ended(self, keys: NDArray[np.uint8]) -> None:
        """Take back that these blocks were read: whoever read them will not come back for them.

        None of them goes for it before its segment does, and reading one again makes it worth keeping again.
        """
        rows = self._core.index.find(keys)
        self._core.index.forget_reads(rows[rows >= 0])

    def committed(self, stored_bytes: int, pool: Pool) -> None:
        """Count what was committed for callers: a share of it may be carried, of blocks of the same pool."""
        geometry = self._core.geometry
        segments = max(1, min(_CREDIT_SEGMENTS, geometry.segments // _CREDIT_SEGMENTS))
        earned = pool.credit_bytes + self._carry_share * stored_bytes
        pool.credit_bytes = min(earned, float(segments * geometry.data_bytes))

    def end_stays(self, up_to: int) -> None:
        """Let no segment of this generation or below stay for another round: of it only copies are kept.

        For when some of what lies there is asked for elsewhere from now on, and must not be kept with the
        rest.
        """
        self._none_stays_up_to = up_to

    def advance(self, now_s: float) -> None:
        """Empty segments until enough are free, or nothing more can go; look through those that are next."""
        core, ring = self._core, self._core.ring
        if ring.asking:
            self._make_room_for_all(now_s)
        while (victims := self._victims()) is not None:
            if not any(self._evict(now_s, pool) for pool in victims):
                break
        else:
            if not (ring.asking and any(pool.lacks_room for pool in ring.asking.values())):
                core.promises.lift()
        self._look_through(now_s, ring.common)
        if ring.changed:
            for pool in list(ring.changed.values()):
                if self._look_through(now_s, pool):
                    del ring.changed[pool.number]

    def _make_room_for_all(self, now_s: float) -> None:
        """Let pools that want more, and have all that they may have, give up their oldest."""
        ring = self._core.ring
        for pool in list(ring.asking.values()):
            while self.make_room(now_s, pool):
                pass
            if not (pool.lacks_room or pool.needs_next):
                ring.asks_no_more(pool)

    def ask(self, now_s: float, pool: Pool) -> None:
        """Make room for what somebody wants to put into a pool, where it has to give up some of its own."""
        if pool.has_share:
            self._core.ring.ask(pool)
            while self.make_room(now_s, pool):
                pass

    def make_room(self, now_s: float, pool: Pool) -> bool:
        """Evict the oldest segment of a pool that is at its share and wants more; say whether one was.

        Not one with writers still at work: in a small pool they have only just been given their space.
        """
        if not pool.lacks_room or (pool.sealed and pool.sealed[0].held):
            return False
        return self._evict(now_s, pool, for_itself=True)

    def _victims(self) -> list[Pool] | None:
        """Return the pools of which a segment should go, the first that can; None where nothing is short."""
        core, ring = self._core, self._core.ring
        if ring.lacks_free:
            return ring.most_over(by_entries=False)
        if core.index.room - len(core.reservations) >= ring.headroom:
            return None
        # Evicting a segment whose writers are still at work would make room, and fail them.
        over = ring.most_over(by_entries=True)
        return [pool for pool in over if pool.sealed and not pool.sealed[0].held] or None

    def _evict(self, now_s: float, pool: Pool, *, for_itself: bool = False) -> bool:
        """Empty the oldest segment of a pool that can go; say whether one could."""
        core, ring = self._core, self._core.ring
        granted = core.grants.oldest_sealed(pool, for_itself=for_itself)
        segment = ring.begin_draining(pool, (each for each in granted if not self._is_promised(each, now_s)))
        if segment is None:
            return False
        removed = core.index.remove_segment(segment.number)
        core.lifetimes.forget(segment.number)
        self.note_evicted(removed.keys)
        core.counted["segments_evicted"] += 1
        core.counted["blocks_evicted"] += removed.blocks
        core.counted["blocks_evicted_unread"] += removed.unread
        ring.end_draining(now_s, core.pins.on_segment)
        return True

    def _look_through(self, now_s: float, pool: Pool) -> bool:
        """Forget reads where that is due; of the segments that are next, keep those that are worth it.

        Return whether there is nothing more to look at now.
        """
        core, ring = self._core, self._core.ring
        for _ in range(_LOOKS_AT_ONCE):
            while (aged := pool.to_age()) is not None:
                aged.is_aged = True
                core.index.forget_reads(core.index.rows_of(aged.number))
            if self._due is not None or self._taken is not None:
                return False
            segment = pool.look_through(len(ring.free))
            if segment is None:
                return True
            self._due = self._keep_or_carry(now_s, segment, pool)
        return False

    def _keep_or_carry(self, now_s: float, segment: Segment, pool: Pool) -> Carry | None:
        """Let a segment go round again where it is; or choose what to copy, as far as copies may cost."""
        core, index = self._core, self._core.index
        rows = index.read_rows_of(segment.number)
        rows = rows[core.lifetimes.ends_s(segment.number, index.marks(rows)) > now_s]
        rows = rows[np.argsort(index.offsets(rows))]
        ends_bytes = np.cumsum(_stored_bytes(index.lengths(rows)))
        is_paid = ends_bytes <= min(pool.credit_bytes, core.spending.level_of(pool.number))
        # Of what emptying it would make room for: bytes or, where blocks are small, entries.
        worth_bytes = int(ends_bytes[-1]) if len(rows) else 0
        share = max(worth_bytes / core.geometry.data_bytes, len(rows) / pool.part.entries_max)
        if share >= (_KEPT_AT if is_paid.all() else _KEPT_UNPAID_AT) and self._may_stay(segment):
            pool.keep(segment)
            index.forget_reads(rows)
            core.counted["segments_kept"] += 1
            return None
        rows = rows[is_paid]
        if not len(rows):
            return None
        lengths, keys, tags = index.lengths(rows), index.keys(rows), index.tags(rows)
        pool.credit_bytes -= int(_stored_bytes(lengths).sum())
        return Carry(segment.number, segment.generation, keys, tags, index.offsets(rows), lengths)

    def _may_stay(self, segment: Segment) -> bool:
        return segment.generation > self._none_stays_up_to and self._core.grants.may_spare(segment.number)

    def _is_promised(self, segment: Segment, now_s: float) -> bool:
        core = self._core
        return core.promises.bind(segment.number, now_s, at_most_s=now_s + core.settings.pin_max_s)


def reserve_carried(
    core: ShardCore, now_s: float, keys: NDArray[np.uint8], lengths: NDArray[np.uint32], *, hold_s: float
) -> Reservations:
    """Answer ``ShardCore.reserve_carried``."""
    count = len(keys)
    states, reasons = np.full(count, PutState.DECLINED, np.uint8), np.full(count, Reason.NO_SPACE, np.uint8)
    made = Reservations(states, reasons, np.zeros(count, np.uint64), np.zeros(count, np.uint64))
    if not core.is_writable or not core.grants.may_write(now_s):
        return made
    rows = core.index.find(keys)
    wanted = np.flatnonzero(rows >= 0)  # one that was dropped meanwhile stays so
    wanted = wanted[core.index.is_read(rows[wanted])]  # its session may have ended
    wanted = core.reservations.not_in_flight(keys, wanted, reasons)
    if not len(wanted):
        return made
    pools = core.ring.pool_numbers[core.ring.segment_of(core.index.offsets(rows[wanted]))]
    wanted = wanted[pools == pools[0]]  # what is carried together lies in one segment
    pool = core.ring.pool_of(int(pools[0]))
    core.eviction.ask(now_s, pool)
    wanted = wanted[: min(core.reservations.room, room_of(core, pool))]
    offsets, segments = placed(core, now_s, pool, _stored_bytes(lengths[wanted]))
    taken = wanted[: len(offsets)]
    if len(taken):
        end_s = now_s + min(hold_s, core.settings.hold_max_s)
        there = core.ring.segment_of(core.index.offsets(rows[taken]))
        made.reservations[taken] = core.reservations.add(
            end_s,
            keys[taken],
            lengths[taken],
            offsets,
            segments,
            kept_until_s=core.lifetimes.ends_s(there, core.index.marks(rows[taken])),
            is_carried=True,
        )
        made.offsets[taken], states[taken], reasons[taken] = offsets, PutState.STAGED, Reason.NONE
        core.spending.spend(int(_stored_bytes(lengths[taken]).sum()), pool.number)
    return made


def room_of(core: ShardCore, pool: Pool) -> int:
    """Return how many more blocks of a pool the index takes."""
    room = core.index.room - len(core.reservations)
    return max(0, min(room, pool.entry_room) if pool.has_share else room)


def placed(
    core: ShardCore, now_s: float, pool: Pool, sizes: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
    """Hand out room of a pool, as ``Ring.place``; one that is at its share makes room for it."""
    offsets, segments = core.ring.place(pool, sizes)
    while len(offsets) < len(sizes) and core.eviction.make_room(now_s, pool):
        more, behind = core.ring.place(pool, sizes[len(offsets) :])
        offsets, segments = np.concatenate([offsets, more]), np.concatenate([segments, behind])
    return offsets, segments


def listed(core: ShardCore, slots: NDArray[np.intp], segment: int) -> None:
    """Enter blocks into the index whose summary is written; copies take the place of what they copy, and own
    blocks of those of the same keys that an earlier owner listed meanwhile.
    """
    table, index = core.reservations, core.index
    stored_bytes = _stored_bytes(table.lengths[slots])
    is_carried = table.is_carried[slots]
    takes_place = is_carried | table.is_adopted[slots]
    carried_bytes = int(stored_bytes[is_carried].sum())
    if takes_place.any():
        rows = index.find(table.keys[slots[takes_place]])
        rows = rows[rows >= 0]
        if len(rows):
            core.promises.inherit(segment, core.ring.segment_of(index.offsets(rows)))
            index.remove(rows)
        core.counted["blocks_carried"] += int(is_carried.sum())
        core.counted["bytes_carried"] += carried_bytes
    insertions = index.insert(
        table.keys[slots],
        table.tags[slots],
        table.offsets[slots],
        table.lengths[slots],
        segment=segment,
        marks=core.lifetimes.marks(segment, table.kept_until_s[slots]),
    )
    assert not insertions.any(), "room was kept, and nobody else could write these keys"
    core.counted["blocks_committed"] += int(np.count_nonzero(~is_carried))
    committed_bytes = int(stored_bytes.sum()) - carried_bytes
    core.counted["bytes_committed"] += committed_bytes
    core.eviction.committed(committed_bytes, core.ring.pool_of(core.ring.segments[segment].pool))


def _stored_bytes(lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return what blocks take on flash: whole pages."""
    stored: NDArray[np.int64] = -(-lengths.astype(np.int64) // PAGE_BYTES) * PAGE_BYTES
    return stored
