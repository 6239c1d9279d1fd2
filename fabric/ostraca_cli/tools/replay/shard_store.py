"""Shard owner's real code in trace time: index, space, eviction. Writes nothing.

The shard is a ``ShardCore`` over a drive without latency or failures: each summary write succeeds at once.
Blocks are those of the trace, with a block for each hash id. For blocks above 1 MiB the owner sees 1 MiB, so
that the shard can represent any capacity; the counts of written bytes use the full size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ostraca_cli.tools.replay.outcome import WriteCounts
from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_dpu_agent.shards.core import ReinsertionBatch
from ostraca_dpu_agent.shards.shard import core_of
from ostraca_fabric.errors import UsageError
from ostraca_fabric.flash.index import BLOCKS_MAX
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.extent import FIRST_SEGMENT_OFFSET, MIB, SHARD_BYTES_MAX, Geometry, rounded_up
from ostraca_fabric.model.ids import DriveId, EnclosureId, FabricId, OwnerEpoch, ShardId
from ostraca_fabric.model.outcome import PutState, Reason
from ostraca_fabric.tables.key_table import first_of_each

_EPOCH = OwnerEpoch(1)
_OWNER_BLOCK_BYTES_MAX = MIB
_HOLD_S = 30.0
BLOCKS_PER_SEGMENT_MAX = 255
SEGMENTS_MIN = 4


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Geometry of a replayed shard."""

    block_bytes: int
    """Real size of a block on flash."""

    owner_block_bytes: int
    """Size of a block as seen by the owner."""

    geometry: Geometry

    @classmethod
    def for_capacity(cls, *, capacity_blocks: int, block_bytes: int, blocks_per_segment: int) -> ShardPlan:
        """Plan a shard of at most *capacity_blocks*, in whole segments.

        A segment holds *blocks_per_segment* blocks or a few more. Raises UsageError for too few segments, or
        for a capacity beyond a shard.
        """
        owner_block_bytes = min(rounded_up(block_bytes), _OWNER_BLOCK_BYTES_MAX)
        segment = _segment_for(blocks_per_segment, owner_block_bytes)
        segments = capacity_blocks // (segment.data_bytes // owner_block_bytes)
        if segments < SEGMENTS_MIN:
            least = SEGMENTS_MIN * (segment.data_bytes // owner_block_bytes)
            raise UsageError(
                f"a capacity of {capacity_blocks} blocks is less than {SEGMENTS_MIN} segments: take at "
                f"least {least} blocks, or fewer than {segment.data_bytes // owner_block_bytes} blocks per "
                "segment"
            )
        shard_bytes = FIRST_SEGMENT_OFFSET + segments * segment.segment_bytes
        if shard_bytes > SHARD_BYTES_MAX or segments * segment.entries_max > BLOCKS_MAX:
            raise UsageError(
                f"a capacity of {capacity_blocks} blocks exceeds a shard: take a smaller capacity, as "
                f"100% of the trace's blocks, or larger blocks than {block_bytes} bytes"
            )
        return cls(
            block_bytes,
            owner_block_bytes,
            Geometry(shard_bytes, segment.segment_bytes, segments, segment.summary_pages),
        )

    @property
    def blocks_per_segment(self) -> int:
        """Return the number of blocks in a segment."""
        return self.geometry.data_bytes // self.owner_block_bytes

    def dwpd_of(self, bytes_per_day: float) -> float:
        """Return the rating that lets the owner write *bytes_per_day* real bytes."""
        return bytes_per_day / self.block_bytes * self.owner_block_bytes / self.geometry.shard_bytes

    @property
    def capacity_blocks(self) -> int:
        """Return the number of blocks in all segments."""
        return self.geometry.segments * self.blocks_per_segment


class ShardStore:
    """Shard and its owner."""

    def __init__(self, plan: ShardPlan, keys: NDArray[np.uint8], settings: OwnerSettings) -> None:
        """Create an empty shard; *keys*: by block number, shape (unique blocks, 16)."""
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
        self.written = WriteCounts()
        self._plan = plan
        self._keys = keys
        self._settle(0.0)

    def request(self, now_s: float, chain: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Look up all blocks, as a reader does before computing; put the missing blocks."""
        found = self.look_up(now_s, chain)
        missing = np.flatnonzero(~found)
        self.put(now_s, chain[missing], depths=missing)
        return found

    def look_up(self, now_s: float, chain: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each block is present; pins end at once."""
        found = self.core.resolve(now_s, self._keys[chain], pin_s=0.0).found
        self._settle(now_s)
        return found

    def put(self, now_s: float, blocks: NDArray[np.int64], *, depths: NDArray[np.intp]) -> None:
        """Put missing blocks in prompt order; *depths*: number of blocks before each."""
        left = np.flatnonzero(first_of_each(self._keys[blocks]))
        while len(left):
            keys = self._keys[blocks[left]]
            lengths = np.full(len(left), self._plan.owner_block_bytes, np.uint32)
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
            # As in the agent, a put waits for the opening of a segment only.
            if not self._settle(now_s) and not count:
                self._note_declined(made.reasons[is_short])
                break
            left = left[is_short]

    def _settle(self, now_s: float) -> bool:
        """Finish all due writes and copies, and those that follow; return whether any."""
        has_written = self._end_writes(now_s)
        while (carry := self.core.reinsertion.take()) is not None:
            self._copy(now_s, carry)
            self.core.end_reinsertion(now_s)
            has_written |= self._end_writes(now_s)
        self.core.catalog.take_evicted()
        return has_written

    def _end_writes(self, now_s: float) -> bool:
        has_written = False
        while self.core.has_writes_due:
            for write in self.core.writes_due(now_s):
                self.written.summary_bytes += sum(len(pages) for _, pages in write.pieces)
                self.core.written(now_s, write, is_ok=True)
                has_written = True
        return has_written

    def _copy(self, now_s: float, carry: ReinsertionBatch) -> None:
        """Copy hot blocks out of an evicted segment; waits for space as a put does."""
        left = np.arange(len(carry))
        while len(left):
            made = self.core.reserve_copies(now_s, carry.keys[left], carry.lengths[left], hold_s=_HOLD_S)
            is_staged = made.states == PutState.STAGED
            staged, count = made.reservations[is_staged], int(is_staged.sum())
            tags, seeds = carry.tags[left[is_staged]], np.zeros(count, np.uint64)
            self.core.commit(now_s, staged, tags, seeds, epoch=_EPOCH)
            self.written.reinserted_blocks += count
            self.written.reinserted_bytes += count * self._plan.block_bytes
            if not self._end_writes(now_s):
                break
            left = left[made.reasons == Reason.NO_SPACE]

    def _note_declined(self, reasons: NDArray[np.uint8]) -> None:
        for reason, count in Counter(reasons.tolist()).items():
            name = Reason(reason).name
            self.written.declined[name] = self.written.declined.get(name, 0) + count


def _segment_for(blocks: int, owner_block_bytes: int) -> Geometry:
    """Return a shard of two segments of the smallest size for so many blocks."""
    assert 0 < blocks <= BLOCKS_PER_SEGMENT_MAX, f"{blocks} blocks don't fit the largest segment"
    segment_bytes = MIB
    while True:
        shard_bytes = FIRST_SEGMENT_OFFSET + 2 * segment_bytes
        planned = Geometry.planned(shard_bytes, segment_bytes=segment_bytes, block_bytes=owner_block_bytes)
        if planned.data_bytes // owner_block_bytes >= blocks:
            return planned
        segment_bytes += MIB
