"""Eviction: which segment is emptied next, and what of it is carried forward first.

The oldest segment goes whole. Blocks that were read since they were written may be copied to the segment that
is being filled before it goes: one bit for each block, which the copy does not inherit, so that it has to be
read again to be carried again. What carrying may write is a share of what was committed for callers, saved
up to one segment's worth. It never holds anybody up: when writers need the space, the segment goes with what
has not been copied yet.

While a segment is carried its blocks can be got. A look-up may still be promised blocks in it; then it goes
back to the sealed ones until the promise has run out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.answers import Reservations
from ostraca_fabric.extent import PAGE_BYTES, Generation
from ostraca_fabric.outcome import PutState, Reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_dpu_agent.owner.core.segments import Segment
    from ostraca_dpu_agent.owner.core.shard import ShardCore

_INDEX_HEADROOM_SHARE = 8
"""A segment is evicted when less than this share of the index is left (and less than one segment can
list)."""


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
        self._credit_bytes = 0.0
        self._due: Carry | None = None
        self._evicted: list[NDArray[np.uint8]] = []

    @property
    def has_carry_due(self) -> bool:
        """Whether ``take_carry`` would return anything."""
        return self._due is not None

    def take_carry(self) -> Carry | None:
        """Take the copying to do now. Whoever takes it ends it with ``end_carry``."""
        due, self._due = self._due, None
        return due

    def is_wanted(self, carry: Carry) -> bool:
        """Say whether its segment still waits for the copies. Once it does not, leave the rest."""
        carrying = self._core.ring.carrying
        return carrying is not None and carrying.generation == carry.generation

    def end_carry(self, now_s: float, carry: Carry) -> None:
        """Let the segment go: everything of it is copied that will be."""
        if self.is_wanted(carry):
            self._end_carrying(now_s)
        self.advance(now_s)

    def take_evicted(self) -> list[NDArray[np.uint8]]:
        """Return the keys of what was evicted since the last call, segment by segment."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def committed(self, stored_bytes: int) -> None:
        """Count what was committed for callers: a share of it may be carried."""
        earned = self._credit_bytes + self._carry_share * stored_bytes
        self._credit_bytes = min(earned, float(self._core.geometry.data_bytes))

    def advance(self, now_s: float) -> None:
        """Empty segments until enough are free, or nothing more can go."""
        ring = self._core.ring
        ring.end_draining(now_s, self._core.pins.on_segment)
        if ring.carrying is not None and ring.is_pressed:
            self._end_carrying(now_s)
        while ring.lacks_free or self._lacks_index_room:
            segment = ring.take_victim(lambda segment: self._is_promised(segment, now_s))
            if segment is None:
                break
            self._due = None if ring.is_pressed else self._worth_carrying(segment)
            if self._due is not None:
                ring.begin_carrying(segment)
                break
            self._drain(segment)
            ring.end_draining(now_s, self._core.pins.on_segment)
        if ring.carrying is None and not ring.lacks_free:
            self._core.promises.lift()

    def _end_carrying(self, now_s: float) -> None:
        ring = self._core.ring
        segment = ring.end_carrying()
        self._due = None
        if self._is_promised(segment, now_s) or segment.queued or segment.is_writing:
            ring.give_back(segment)
        else:
            self._drain(segment)

    def _drain(self, segment: Segment) -> None:
        core = self._core
        core.ring.begin_draining(segment)
        removed = core.index.remove_segment(segment.number)
        self._evicted.append(removed.keys)
        core.counted["segments_evicted"] += 1
        core.counted["blocks_evicted"] += removed.blocks
        core.counted["blocks_evicted_unread"] += removed.unread

    def _worth_carrying(self, segment: Segment) -> Carry | None:
        """Choose what to copy, as far as the credit goes, and spend it."""
        index = self._core.index
        rows = index.read_rows_of(segment.number)
        rows = rows[np.argsort(index.offsets(rows))]
        stored = _stored_bytes(index.lengths(rows))
        rows = rows[np.cumsum(stored) <= self._credit_bytes]
        if not len(rows):
            return None
        lengths = index.lengths(rows)
        self._credit_bytes -= int(_stored_bytes(lengths).sum())
        return Carry(
            segment.number,
            segment.generation,
            index.keys(rows),
            index.tags(rows),
            index.offsets(rows),
            lengths,
        )

    def _is_promised(self, segment: Segment, now_s: float) -> bool:
        core = self._core
        return core.promises.bind(segment.number, now_s, at_most_s=now_s + core.settings.pin_max_s)

    @property
    def _lacks_index_room(self) -> bool:
        # Evicting a segment whose writers are still at work would make room, and fail them.
        core = self._core
        ring = core.ring
        if ring.carrying is not None or not ring.sealed or ring.sealed[0].held:
            return False
        headroom = min(ring.entries_max, core.index.blocks_max // _INDEX_HEADROOM_SHARE)
        return core.index.room - len(core.reservations) < headroom


def reserve_carried(
    core: ShardCore, now_s: float, keys: NDArray[np.uint8], lengths: NDArray[np.uint32], *, hold_s: float
) -> Reservations:
    """Answer ``ShardCore.reserve_carried``."""
    count = len(keys)
    states, reasons = np.full(count, PutState.DECLINED, np.uint8), np.full(count, Reason.NO_SPACE, np.uint8)
    made = Reservations(states, reasons, np.zeros(count, np.uint64), np.zeros(count, np.uint64))
    if not core.is_writable:
        return made
    wanted = np.flatnonzero(core.index.find(keys) >= 0)  # one that was dropped meanwhile stays so
    wanted = core.reservations.not_in_flight(keys, wanted, reasons)
    wanted = wanted[: min(core.reservations.room, max(0, core.index.room - len(core.reservations)))]
    offsets, segments = core.ring.place(_stored_bytes(lengths[wanted]))
    taken = wanted[: len(offsets)]
    if len(taken):
        end_s = now_s + min(hold_s, core.settings.hold_max_s)
        made.reservations[taken] = core.reservations.add(
            end_s, keys[taken], lengths[taken], offsets, segments, is_carried=True
        )
        made.offsets[taken], states[taken], reasons[taken] = offsets, PutState.STAGED, Reason.NONE
    return made


def listed(core: ShardCore, slots: NDArray[np.intp], segment: int) -> None:
    """Enter blocks into the index whose summary is written; copies take the place of what they copy."""
    table, index = core.reservations, core.index
    stored_bytes = _stored_bytes(table.lengths[slots])
    is_carried = table.is_carried[slots]
    carried_bytes = int(stored_bytes[is_carried].sum())
    if is_carried.any():
        rows = index.find(table.keys[slots[is_carried]])
        rows = rows[rows >= 0]
        if len(rows):
            core.promises.inherit(segment, core.ring.segment_of(index.offsets(rows)))
            index.remove(rows)
        core.counted["blocks_carried"] += int(is_carried.sum())
        core.counted["bytes_carried"] += carried_bytes
    insertions = index.insert(
        table.keys[slots], table.tags[slots], table.offsets[slots], table.lengths[slots], segment=segment
    )
    assert not insertions.any(), "room was kept, and nobody else could write these keys"
    core.counted["blocks_committed"] += int(np.count_nonzero(~is_carried))
    committed_bytes = int(stored_bytes.sum()) - carried_bytes
    core.counted["bytes_committed"] += committed_bytes
    core.eviction.committed(committed_bytes)


def _stored_bytes(lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return what blocks take on flash: whole pages."""
    stored: NDArray[np.int64] = -(-lengths.astype(np.int64) // PAGE_BYTES) * PAGE_BYTES
    return stored
