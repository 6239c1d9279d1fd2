"""The scrub of an owned shard: flash that nobody asks for is read again while its drive is idle, and checked.

Of a sealed segment the summary area is read first. What it lists and the index lists too is read from its
extent and checked by tag and seed; what is wrong is a damage report of our own, so the owner reads it again
before it drops or counts anything. What the index lists and the summary area does not is counted as damage of
the area: those blocks can be got, and would be lost with this owner.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core import Scrub, SegmentState
from ostraca_fabric.extent import whole_pages
from ostraca_fabric.flash.recovery import recover
from ostraca_fabric.flash.summary import offsets_of
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.ports.drive import Pieces
from ostraca_fabric.tags import are_good
from ostraca_fabric.wire.messages import Damage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from ostraca_dpu_agent.owner.core import ScrubSettings
    from ostraca_dpu_agent.owner.shard import OwnedShard
    from ostraca_fabric.extent import Generation
    from ostraca_fabric.flash.summary import Entries
    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.ports.drive import Drive

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
"""How often a scrub that operators have ruled out looks whether that still is so."""


def begin_scrub(
    owned: OwnedShard,
    drive: Drive,
    superblock: Superblock,
    settings: ScrubSettings,
    clock: Callable[[], float],
    *,
    is_ruled_out: Callable[[], bool] = lambda: False,
) -> None:
    """Scrub a shard beside its other work until it is closed, unless settings turn that off. It rests while
    it *is_ruled_out*.
    """
    if settings.bytes_s:
        scrub = ShardScrub(owned, drive, superblock, settings, clock, is_ruled_out=is_ruled_out)
        owned.scrub = scrub.progress
        owned.spawn(scrub.run())


class ShardScrub:
    """Scrubs one shard until it is closed. ``run`` it in a task of the shard's."""

    def __init__(
        self,
        owned: OwnedShard,
        drive: Drive,
        superblock: Superblock,
        settings: ScrubSettings,
        clock: Callable[[], float],
        *,
        is_ruled_out: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin with nothing looked at."""
        self._is_ruled_out = is_ruled_out
        self._owned = owned
        self._drive = drive
        self._superblock = superblock
        self._settings = settings
        self._clock = clock
        self.progress = Scrub(settings, clock())

    async def run(self) -> None:
        """Look at segment after segment."""
        while await self._may_read():
            sealed = [
                segment.number
                for segment in self._owned.core.ring.segments
                if segment.state is SegmentState.SEALED
                and not (segment.held or segment.queued or segment.is_writing)
            ]
            number = self.progress.next_segment(self._clock(), sealed)
            if number is not None:
                await self._look_at(number)

    async def _may_read(self) -> bool:
        """Wait until something may be read; False once the shard is closed."""
        while not self._owned.is_closed:
            if self._is_ruled_out():
                await self._owned.closed_within(_LOOK_AGAIN_S)
                continue
            is_idle = self._drive.queued == 0 and not self._drive.refuses_reads
            wait_s = self.progress.wait_s(self._clock(), is_idle=is_idle)
            if wait_s == 0:
                return True
            await self._owned.closed_within(wait_s)
        return False

    async def _look_at(self, number: int) -> None:
        core, geometry = self._owned.core, self._superblock.geometry
        generation = core.ring.segments[number].generation
        memory = HugeMemory(geometry.summary_bytes, prefault=False)
        try:
            area = memory.array[: geometry.summary_bytes]
            where = self._owned.record.offset + geometry.summary_offset(number)
            (is_read,) = await self._drive.submit_read(Pieces.one(area, drive_offset=where))
            self.progress.spend(self._clock(), geometry.summary_bytes)
            if not is_read:
                return
            numbers, rows = np.array([number], np.intp), area.reshape(1, -1)
            found = await asyncio.to_thread(recover, self._superblock, numbers, rows)
        finally:
            memory.close()
        if not (self._is_still(number, generation) and self._owned.is_sure):
            return
        listed = [segment.entries for segment in found.segments if segment.generation == generation]
        entries = self._current(listed[0]) if listed else None
        if entries is None or len(entries) < np.count_nonzero(core.index.lengths(core.index.rows_of(number))):
            log.warning("a summary of shard %s no longer lists all it did", self._owned.record.id)
            self._owned.count_damage(geometry.summary_offset(number))
        for some in () if entries is None else _chunks(entries, self._settings.chunk_bytes):
            if not (await self._may_read() and self._is_still(number, generation)):
                return
            await self._check(some, generation)

    def _is_still(self, number: int, generation: Generation) -> bool:
        segment = self._owned.core.ring.segments[number]
        return segment.state is SegmentState.SEALED and segment.generation == generation

    def _current(self, entries: Entries) -> Entries:
        """Return the entries that the index lists, in the order they lie on flash."""
        index, offsets = self._owned.core.index, offsets_of(entries)
        rows = index.find(np.ascontiguousarray(entries["key"]))
        is_current = rows >= 0
        is_current[is_current] &= index.offsets(rows[is_current]) == offsets[is_current]
        kept = np.flatnonzero(is_current)
        in_order = kept[np.argsort(offsets[kept], kind="stable")]
        of_place = np.ones(len(in_order), np.bool_)  # a key may be listed twice in one place
        of_place[1:] = offsets[in_order][1:] != offsets[in_order][:-1]
        return entries[in_order[of_place]]

    async def _check(self, entries: Entries, generation: Generation) -> None:
        lengths, tags = entries["length"].astype(np.uint32), np.ascontiguousarray(entries["tag"])
        seeds, sizes = entries["seed"].astype(np.uint64), whole_pages(entries["length"].astype(np.uint32))
        ends = np.cumsum(sizes, dtype=np.int64)
        memory = HugeMemory(int(ends[-1]), prefault=False)
        try:
            offsets = self._owned.record.offset + offsets_of(entries).astype(np.int64)
            pieces = Pieces(memory.array, ends - sizes, offsets, sizes)
            is_wrong = np.zeros(len(entries), np.bool_)

            def check(rows: slice) -> NDArray[np.bool_]:
                good = are_good(
                    pieces.memory, pieces.memory_offsets[rows], lengths[rows], seeds[rows], tags[rows]
                )
                is_wrong[rows] = ~good
                return good

            await self._drive.submit_read(pieces, check)
        finally:
            memory.close()
        self.progress.spend(self._clock(), int(ends[-1]), blocks=len(entries))
        for row in np.flatnonzero(is_wrong).tolist():
            self._owned.check_damage(
                Damage(
                    shard=self._owned.record.id,
                    key=entries["key"][row].tobytes(),
                    offset=int(offsets_of(entries)[row]),
                    length=int(lengths[row]),
                    generation=int(generation),
                    tag=tags[row].tobytes(),
                    seed=int(seeds[row]),
                )
            )


def _chunks(entries: Entries, chunk_bytes: int) -> Iterator[Entries]:
    """Cut entries into chunks of about so many bytes."""
    sizes = whole_pages(entries["length"].astype(np.uint32))
    filled = (np.cumsum(sizes, dtype=np.int64) - sizes) // chunk_bytes
    cuts = [0, *(np.flatnonzero(filled[1:] != filled[:-1]) + 1).tolist(), len(entries)]
    for begin, end in itertools.pairwise(cuts):
        if begin < end:
            yield entries[begin:end]
