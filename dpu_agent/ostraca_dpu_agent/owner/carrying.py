"""Carrying blocks forward: copies them out of a segment that will soon be emptied.

A few MiB at a time, so that readers of the same drive wait for little. Every block is checked by its tag on
its way, with the seed that the segment's summary holds, so that damage is not carried along. What can't be
read or written, or finds no space, is left: it is evicted.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.extent import whole_pages
from ostraca_fabric.flash.recovery import recover
from ostraca_fabric.flash.summary import offsets_of
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.outcome import PutState
from ostraca_fabric.ports.drive import Pieces
from ostraca_fabric.tags import are_good

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from ostraca_dpu_agent.owner.core import Carry
    from ostraca_dpu_agent.owner.shard import OwnedShard
    from ostraca_fabric.ports.drive import Drive

log = logging.getLogger(__name__)

_AT_ONCE_BYTES = 4 << 20
"""Read, and then written, at once; or one block, where that is larger."""

_HOLD_S = 10.0
"""How long copies hold their space. They are given up when reading and writing take longer."""


class Carrier:
    """Copies blocks within one shard."""

    def __init__(self, shard: OwnedShard, drive: Drive, clock: Callable[[], float]) -> None:
        """Copy nothing yet."""
        self._shard = shard
        self._drive = drive
        self._clock = clock

    async def copy(self, carry: Carry) -> None:
        """Copy these blocks, until all are, or their segment has gone."""
        core, stored = self._shard.core, whole_pages(carry.lengths)
        parts = list(_cut(stored))
        largest = max(int(stored[rows].sum()) for rows in parts)
        memory = HugeMemory(max(largest, core.geometry.summary_bytes), prefault=False)
        has_ended = False
        try:
            seeds, is_listed = await self._seeds(carry, memory.array)
            for rows in parts:
                if self._shard.is_closed or not core.eviction.is_there(carry):
                    break
                await self._copy(carry, rows[is_listed[rows]], seeds, memory.array)
            has_ended = True
        finally:  # an I/O that was not waited for may still reach the memory
            if has_ended:
                memory.close()
            else:
                memory.leak()

    async def _seeds(
        self, carry: Carry, memory: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Read the segment's summary: the blocks' seeds, and which of them it lists as the index does."""
        core, count = self._shard.core, len(carry)
        area = memory[: core.geometry.summary_bytes]
        where = self._shard.record.offset + core.geometry.summary_offset(carry.segment)
        (is_read,) = await self._drive.submit_read(Pieces.one(area, drive_offset=where))
        seeds, is_listed = np.zeros(count, np.uint64), np.zeros(count, np.bool_)
        found = recover(core.superblock, np.array([carry.segment]), area.reshape(1, -1)) if is_read else None
        for segment in found.segments if found is not None else ():
            if not len(segment.entries):  # of its pages only one without any can be believed
                continue
            offsets = offsets_of(segment.entries)
            order = np.argsort(offsets)
            at = np.minimum(np.searchsorted(offsets[order], carry.offsets), len(order) - 1)
            entries = segment.entries[order[at]]
            seeds = entries["seed"].astype(np.uint64)
            is_listed = (offsets_of(entries) == carry.offsets) & (entries["key"] == carry.keys).all(axis=1)
            is_listed &= segment.generation == carry.generation
        if not is_listed.all():
            log.warning(
                "shard %s: a summary that can't be read back keeps %d blocks from being carried forward",
                self._shard.record.id,
                count - np.count_nonzero(is_listed),
            )
        return seeds, is_listed

    async def _copy(
        self, carry: Carry, rows: NDArray[np.intp], seeds: NDArray[np.uint64], memory: NDArray[np.uint8]
    ) -> None:
        """Copy some of the blocks: read, check, take space, write, commit."""
        if not len(rows):
            return
        shard, lengths = self._shard, carry.lengths[rows]
        stored = whole_pages(lengths)
        places = np.cumsum(stored, dtype=np.int64) - stored
        tags, chosen_seeds = carry.tags[rows], seeds[rows]

        def check(some: slice) -> NDArray[np.bool_]:
            return are_good(memory, places[some], lengths[some], chosen_seeds[some], tags[some])

        base = shard.record.offset
        pieces = Pieces(memory, places, base + carry.offsets[rows].astype(np.int64), stored)
        good = np.flatnonzero(await self._drive.submit_read(pieces, check))
        until_s = self._clock() + min(_HOLD_S, shard.core.settings.hold_max_s)
        made = await shard.reserve_carried(carry.keys[rows[good]], lengths[good], hold_s=_HOLD_S)
        has_space = made.states == PutState.STAGED
        good, offsets, numbers = good[has_space], made.offsets[has_space], made.reservations[has_space]
        target = Pieces(memory, places[good], base + offsets.astype(np.int64), stored[good])
        if not len(good):
            return
        if self._clock() >= until_s:  # this agent was stopped, and the space may be others' by now
            return
        written = await self._drive.submit_write(target)
        shard.core.release(self._clock(), (), numbers[~written], may_land=True)
        await shard.commit(
            numbers[written], tags[good[written]], chosen_seeds[good[written]], epoch=shard.epoch
        )


def _cut(stored: NDArray[np.uint32]) -> Iterator[NDArray[np.intp]]:
    """Cut blocks of these sizes into parts that are copied at once."""
    part = (np.cumsum(stored, dtype=np.int64) - stored) // _AT_ONCE_BYTES
    for number in np.unique(part).tolist():
        yield np.flatnonzero(part == number)
