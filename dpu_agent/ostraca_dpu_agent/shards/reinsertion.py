"""Reinsertion of hot blocks: copies out of a segment before its eviction.

A few MiB are copied at a time, so that readers of the drive wait little. Every block is verified by its tag
on the way, with the seed from the segment's summary, so damage is not copied. A block without a good read,
space or a good write is left to its eviction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.shards.core import Allocations, ReinsertionBatch
from ostraca_fabric.flash.recovery import recover
from ostraca_fabric.flash.summary import offsets_of
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.extent import Pieces, whole_pages
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.outcome import PutState
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.tables.digests import TagCheck

log = logging.getLogger(__name__)

_COPY_BYTES = 4 << 20
"""Bytes read, and then written, at once; or one larger block."""

_HOLD_MAX_S = 10.0
"""Longest lifetime of the copies' reservations. Slower copies are given up."""


class CopyTarget(Protocol):
    """Shard whose blocks are copied."""

    @property
    def epoch(self) -> OwnerEpoch:
        """Owner epoch."""

    def is_current(self, batch: ReinsertionBatch) -> bool:
        """Return whether the segment of *batch* is still there, and the shard open."""

    async def reserve_copies(
        self, keys: NDArray[np.uint8], lengths: NDArray[np.uint32], *, hold_s: float
    ) -> Allocations:
        """Reserve space for copies, as far as there is any."""

    async def commit(
        self,
        reservations: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        seeds: NDArray[np.uint64],
        *,
        epoch: OwnerEpoch,
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """List written copies."""

    def release(self, pins: Sequence[int], reservations: NDArray[np.uint64], *, may_land: bool) -> None:
        """End reservations of copies after failed writes."""


class Reinserter:
    """Copies blocks within one shard."""

    def __init__(
        self,
        shard: CopyTarget,
        record: ShardRecord,
        drive: Drive,
        superblock: Superblock,
        clock: Callable[[], float],
        *,
        hold_max_s: float,
    ) -> None:
        self._shard = shard
        self._record = record
        self._drive = drive
        self._superblock = superblock
        self._clock = clock
        self._hold_s = min(_HOLD_MAX_S, hold_max_s)

    async def copy(self, batch: ReinsertionBatch) -> None:
        """Copy the blocks of a batch, until the end or the eviction of the segment."""
        stored = whole_pages(batch.lengths)
        parts = list(_cut(stored))
        largest = max(int(stored[rows].sum()) for rows in parts)
        memory = HugeMemory(max(largest, self._superblock.geometry.summary_bytes), prefault=False)
        has_ended = False
        try:
            seeds, is_listed = await self._seeds(batch, memory.array)
            for rows in parts:
                if not self._shard.is_current(batch):
                    break
                await self._copy(batch, rows[is_listed[rows]], seeds, memory.array)
            has_ended = True
        finally:  # a cancelled I/O may still reach the memory
            memory.end(is_quiet=has_ended)

    async def _seeds(
        self, batch: ReinsertionBatch, memory: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Read the segment's summary; return (seed, whether the summary lists it) of each block."""
        geometry, count = self._superblock.geometry, len(batch)
        area = memory[: geometry.summary_bytes]
        begin = self._record.offset + geometry.summary_offset(batch.segment)
        (is_read,) = await self._drive.submit_read(Pieces.one(area, drive_offset=begin))
        seeds, is_listed = np.zeros(count, np.uint64), np.zeros(count, np.bool_)
        found = recover(self._superblock, np.array([batch.segment]), area.reshape(1, -1)) if is_read else None
        for segment in found.segments if found is not None else ():
            if not len(segment.entries):  # none of its pages with entries is valid
                continue
            offsets = offsets_of(segment.entries)
            order = np.argsort(offsets)
            at = np.minimum(np.searchsorted(offsets[order], batch.offsets), len(order) - 1)
            entries = segment.entries[order[at]]
            seeds = entries["seed"].astype(np.uint64)
            is_listed = (offsets_of(entries) == batch.offsets) & (entries["key"] == batch.keys).all(axis=1)
            is_listed &= segment.generation == batch.generation
        if not is_listed.all():
            log.warning(
                "shard %s can't reinsert %d blocks: their summary can't be read back",
                self._record.id,
                count - np.count_nonzero(is_listed),
            )
        return seeds, is_listed

    async def _copy(
        self,
        batch: ReinsertionBatch,
        rows: NDArray[np.intp],
        seeds: NDArray[np.uint64],
        memory: NDArray[np.uint8],
    ) -> None:
        """Copy some of the blocks: read, verify, reserve, write, commit."""
        if not len(rows):
            return
        base, lengths = self._record.offset, batch.lengths[rows]
        stored = whole_pages(lengths)
        places = np.cumsum(stored, dtype=np.int64) - stored
        tags, seeds = batch.tags[rows], seeds[rows]
        source = Pieces(memory, places, base + batch.offsets[rows].astype(np.int64), stored)
        is_good = await self._drive.submit_read(source, TagCheck(source, lengths, seeds, tags))
        good = np.flatnonzero(is_good)
        until_s = self._clock() + self._hold_s
        allocations = await self._shard.reserve_copies(
            batch.keys[rows[good]], lengths[good], hold_s=self._hold_s
        )
        has_space = allocations.states == PutState.STAGED
        good, offsets, numbers = (
            good[has_space],
            allocations.offsets[has_space],
            allocations.reservations[has_space],
        )
        if not len(good) or self._clock() >= until_s:  # after a stop the space may have another holder
            return
        target = Pieces(memory, places[good], base + offsets.astype(np.int64), stored[good])
        written = await self._drive.submit_write(target)
        self._shard.release((), numbers[~written], may_land=True)
        copied = good[written]
        await self._shard.commit(numbers[written], tags[copied], seeds[copied], epoch=self._shard.epoch)


def _cut(stored: NDArray[np.uint32]) -> Iterator[NDArray[np.intp]]:
    """Cut blocks into parts to copy at once."""
    part = (np.cumsum(stored, dtype=np.int64) - stored) // _COPY_BYTES
    yield from (np.flatnonzero(part == number) for number in np.unique(part).tolist())
