"""The owner's real code, driven on the trace's time: index, space, eviction. Nothing is written.

A shard here is a ``ShardCore`` over a drive that takes no time and never fails: each summary write that it
asks for ends at once and well. Its blocks are the trace's, one for each hash id. Where those are larger than
1 MiB the owner is told 1 MiB, so that its shard may stand for any capacity; what would be written is counted
in full.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ostraca.cli.replay.outcome import Written
from ostraca_dpu_agent.owner.core import Carry
from ostraca_dpu_agent.owner.shard import core_of
from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.extent import rounded_up
from ostraca_fabric.flash.geometry import FIRST_SEGMENT_OFFSET, MIB, Geometry
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.ids import DriveId, EnclosureId, FabricId, OwnerEpoch, ShardId
from ostraca_fabric.key_table import first_of_each
from ostraca_fabric.outcome import PutState, Reason

_EPOCH = OwnerEpoch(1)
_TOLD_BYTES_MAX = MIB
_HOLD_S = 30.0
BLOCKS_PER_SEGMENT_MAX = 255
SEGMENTS_MIN = 4


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The measures of a replayed shard."""

    block_bytes: int
    """What a block takes on flash in truth."""

    told_bytes: int
    """What the owner is told that it takes."""

    geometry: Geometry

    @classmethod
    def planned(cls, *, capacity_blocks: int, block_bytes: int, blocks_per_segment: int) -> ShardPlan:
        """Plan a shard of at most *capacity_blocks*, in whole segments of *blocks_per_segment* or some more.

        Raises UsageError where that are too few segments.
        """
        told_bytes = min(rounded_up(block_bytes), _TOLD_BYTES_MAX)
        segment = _segment_for(blocks_per_segment, told_bytes)
        segments = capacity_blocks // (segment.data_bytes // told_bytes)
        if segments < SEGMENTS_MIN:
            least = SEGMENTS_MIN * (segment.data_bytes // told_bytes)
            raise UsageError(
                f"a capacity of {capacity_blocks} blocks is less than {SEGMENTS_MIN} segments: give it at "
                f"least {least} blocks, or put fewer than {segment.data_bytes // told_bytes} into a segment"
            )
        shard_bytes = FIRST_SEGMENT_OFFSET + segments * segment.segment_bytes
        return cls(
            block_bytes,
            told_bytes,
            Geometry(shard_bytes, segment.segment_bytes, segments, segment.summary_pages),
        )

    @property
    def blocks_per_segment(self) -> int:
        """Return how many blocks one segment holds."""
        return self.geometry.data_bytes // self.told_bytes

    def dwpd_of(self, bytes_per_day: float) -> float:
        """Return the drive writes per day that let the owner write so many bytes a day, in truth."""
        return bytes_per_day / self.block_bytes * self.told_bytes / self.geometry.shard_bytes

    @property
    def capacity_blocks(self) -> int:
        """Return how many blocks all segments hold."""
        return self.geometry.segments * self.blocks_per_segment


class ShardStore:
    """One shard and its owner."""

    def __init__(self, plan: ShardPlan, keys: NDArray[np.uint8], settings: OwnerSettings) -> None:
        """*keys*: of all blocks of the trace by their number, shape (unique blocks, 16)."""
        superblock = Superblock(
            FabricId(bytes(16)),
            bytes(16),
            EnclosureId("replay"),
            DriveId("replay/0"),
            ShardId("replay/0/0"),
            0,
            plan.geometry,
        )
        blocks_max = max(settings.blocks_per_shard_max, plan.geometry.segments * plan.geometry.entries_max)
        self.core = core_of(superblock, replace(settings, blocks_per_shard_max=blocks_max))
        self.core.begin(0.0, epoch=_EPOCH)
        self.core.own_alone(0.0)
        self.written = Written()
        self._plan = plan
        self._keys = keys
        self._settle(0.0)

    def request(self, now_s: float, chain: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Look all blocks up, as a reader does before it computes; then put those that are missing."""
        found = self.look_up(now_s, chain)
        missing = np.flatnonzero(~found)
        self.put(now_s, chain[missing], depths=missing)
        return found

    def look_up(self, now_s: float, chain: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say which blocks are there. The reader is done at once, so that nothing is pinned."""
        found = self.core.resolve(now_s, self._keys[chain], pin_s=0.0).found
        self._settle(now_s)
        return found

    def put(self, now_s: float, blocks: NDArray[np.int64], *, depths: NDArray[np.intp]) -> None:
        """Put blocks that are missing, in the order of their prompt. *depths*: how many come before each."""
        left = np.flatnonzero(first_of_each(self._keys[blocks]))
        while len(left):
            keys = self._keys[blocks[left]]
            lengths = np.full(len(left), self._plan.told_bytes, np.uint32)
            made = self.core.reserve(
                now_s, keys, lengths, hold_s=_HOLD_S, depths=depths[left].astype(np.uint32)
            )
            is_staged = made.states == PutState.STAGED
            staged, count = made.reservations[is_staged], int(is_staged.sum())
            self.core.commit(now_s, staged, keys[is_staged], np.zeros(count, np.uint64), epoch=_EPOCH)
            self.written.blocks += count
            self.written.block_bytes += count * self._plan.block_bytes
            is_short = made.reasons == Reason.NO_SPACE
            self._note_declined(made.reasons[(made.states == PutState.DECLINED) & ~is_short])
            # As in the agent, a put waits for a segment that is being opened, and for nothing else.
            if not self._settle(now_s) and not count:
                self._note_declined(made.reasons[is_short])
                break
            left = left[is_short]

    def _settle(self, now_s: float) -> bool:
        """End all writes and copies that are due, and those that become due by it; say whether there were
        any.
        """
        has_written = self._end_writes(now_s)
        while (carry := self.core.eviction.take_carry()) is not None:
            self._copy(now_s, carry)
            self.core.eviction.end_carry(now_s)
            has_written |= self._end_writes(now_s)
        self.core.eviction.take_evicted()
        return has_written

    def _end_writes(self, now_s: float) -> bool:
        has_written = False
        while self.core.has_writes_due:
            for write in self.core.writes_due(now_s):
                self.written.summary_bytes += sum(len(pages) for _, pages in write.pieces)
                self.core.written(now_s, write, is_ok=True)
                has_written = True
        return has_written

    def _copy(self, now_s: float, carry: Carry) -> None:
        """Copy what is worth it out of a segment that goes; waits for space as a put does."""
        left = np.arange(len(carry))
        while len(left):
            made = self.core.reserve_carried(now_s, carry.keys[left], carry.lengths[left], hold_s=_HOLD_S)
            is_staged = made.states == PutState.STAGED
            staged, count = made.reservations[is_staged], int(is_staged.sum())
            tags, seeds = carry.tags[left[is_staged]], np.zeros(count, np.uint64)
            self.core.commit(now_s, staged, tags, seeds, epoch=_EPOCH)
            self.written.carried_blocks += count
            self.written.carried_bytes += count * self._plan.block_bytes
            if not self._end_writes(now_s):
                break
            left = left[made.reasons == Reason.NO_SPACE]

    def _note_declined(self, reasons: NDArray[np.uint8]) -> None:
        for reason, count in Counter(reasons.tolist()).items():
            name = Reason(reason).name
            self.written.declined[name] = self.written.declined.get(name, 0) + count


def _segment_for(blocks: int, told_bytes: int) -> Geometry:
    """Return a shard of two of the smallest segments that hold so many blocks."""
    assert 0 < blocks <= BLOCKS_PER_SEGMENT_MAX, f"{blocks} blocks don't fit the largest segment"
    segment_bytes = MIB
    while True:
        shard_bytes = FIRST_SEGMENT_OFFSET + 2 * segment_bytes
        planned = Geometry.planned(shard_bytes, segment_bytes=segment_bytes, block_bytes=told_bytes)
        if planned.data_bytes // told_bytes >= blocks:
            return planned
        segment_bytes += MIB
