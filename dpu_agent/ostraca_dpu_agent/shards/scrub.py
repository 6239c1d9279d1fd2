"""Verification of stored blocks: a scrub while the drive is idle, and a check of each reported block.

The summary area of a sealed segment is read first. Blocks listed there and in the index are read and verified
by tag and seed. A wrong block becomes a damage report, so the block is read again before a drop. Blocks
listed in the index only count as damage of the summary area: they are readable, and would be lost with this
owner.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.settings import ScrubSettings
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_dpu_agent.shards.scrub_plan import ScrubProgress
from ostraca_fabric.flash.index import BlockIndex
from ostraca_fabric.flash.recovery import recover
from ostraca_fabric.flash.summary import Entries, offsets_of
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.extent import Generation, Pieces, rounded_up, whole_pages
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.tables.digests import TagCheck, matches
from ostraca_fabric.telemetry.explain import EventKind
from ostraca_fabric.telemetry.requests import EventRing
from ostraca_fabric.wire.messages import Damage

log = logging.getLogger(__name__)

_SUSPENDED_CHECK_S = 1.0
"""Interval of the checks whether a scrub is still suspended by operators."""


class VerifiedShard(Protocol):
    """Shard with verified blocks."""

    @property
    def is_closed(self) -> bool:
        """Whether the scrub should end."""

    @property
    def is_exclusive(self) -> bool:
        """Whether no other owner can have written to the shard until now."""

    async def closed_within(self, seconds: float) -> None:
        """Wait, or until the shard is closed."""

    def check_damage(self, report: Damage) -> None:
        """Verify a block found damaged."""

    def count_damage(self, offset: int) -> None:
        """Report confirmed damage at this offset in the shard."""

    def is_listed(self, report: Damage) -> bool:
        """Return whether the index lists exactly the reported extent."""

    def drop(self, report: Damage) -> bool:
        """Remove the reported block from the index; return whether it was still listed."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run *work* in the background."""


class ShardScrubber:
    """Scrub of a shard until the shard is closed."""

    def __init__(  # noqa: PLR0913 (what is read, where, and how fast)
        self,
        shard: VerifiedShard,
        record: ShardRecord,
        superblock: Superblock,
        ring: Ring,
        index: BlockIndex,
        drive: Drive,
        clock: Callable[[], float],
        settings: ScrubSettings,
        *,
        is_suspended: Callable[[], bool],
    ) -> None:
        """Read *ring* and *index*, never change them. The scrub pauses while *is_suspended* returns True."""
        self._shard = shard
        self._record = record
        self._superblock = superblock
        self._ring = ring
        self._index = index
        self._drive = drive
        self._clock = clock
        self._settings = settings
        self._is_suspended = is_suspended
        self.progress = ScrubProgress(
            clock(), bytes_s=settings.bytes_s, idle_s=settings.idle_s, pause_s=settings.pause_s
        )

    async def run(self) -> None:
        """Scrub segment after segment."""
        while await self._may_read():
            number = self.progress.next_segment(self._clock(), self._ring.quiet_sealed())
            if number is not None:
                await self._scrub(number)

    async def _may_read(self) -> bool:
        """Wait until a read may begin; return False once the shard is closed."""
        while not self._shard.is_closed:
            if self._is_suspended():
                await self._shard.closed_within(_SUSPENDED_CHECK_S)
                continue
            is_idle = self._drive.queued == 0 and not self._drive.refuses_reads
            wait_s = self.progress.wait_s(self._clock(), is_idle=is_idle)
            if wait_s == 0:
                return True
            await self._shard.closed_within(wait_s)
        return False

    async def _scrub(self, number: int) -> None:
        geometry = self._superblock.geometry
        generation = self._ring.segments[number].generation
        with closing(HugeMemory(geometry.summary_bytes, prefault=False)) as memory:
            area = memory.array[: geometry.summary_bytes]
            begin = self._record.offset + geometry.summary_offset(number)
            (is_read,) = await self._drive.submit_read(Pieces.one(area, drive_offset=begin))
            self.progress.spend(self._clock(), geometry.summary_bytes)
            if not is_read:
                return
            numbers, rows = np.array([number], np.intp), area.reshape(1, -1)
            found = await asyncio.to_thread(recover, self._superblock, numbers, rows)
        if not (self._ring.is_sealed(number, generation) and self._shard.is_exclusive):
            return
        listed = [segment.entries for segment in found.segments if segment.generation == generation]
        entries = self._current(listed[0]) if listed else None
        if entries is None or len(entries) < np.count_nonzero(
            self._index.lengths(self._index.rows_of(number))
        ):
            log.warning("a summary of shard %s no longer lists all its blocks", self._record.id)
            self._shard.count_damage(geometry.summary_offset(number))
        for chunk in () if entries is None else _chunks(entries, self._settings.chunk_bytes):
            if not (await self._may_read() and self._ring.is_sealed(number, generation)):
                return
            await self._verify(chunk, generation)

    def _current(self, entries: Entries) -> Entries:
        """Return the entries that the index lists, in the order on flash."""
        offsets = offsets_of(entries)
        rows = self._index.find(np.ascontiguousarray(entries["key"]))
        is_current = rows >= 0
        is_current[is_current] &= self._index.offsets(rows[is_current]) == offsets[is_current]
        kept = np.flatnonzero(is_current)
        in_order = kept[np.argsort(offsets[kept], kind="stable")]
        is_first = np.ones(len(in_order), np.bool_)  # a key may be listed twice in one place
        is_first[1:] = offsets[in_order][1:] != offsets[in_order][:-1]
        return entries[in_order[is_first]]

    async def _verify(self, entries: Entries, generation: Generation) -> None:
        lengths, tags = entries["length"].astype(np.uint32), np.ascontiguousarray(entries["tag"])
        seeds, offsets = entries["seed"].astype(np.uint64), offsets_of(entries)
        sizes = whole_pages(lengths)
        ends = np.cumsum(sizes, dtype=np.int64)
        with closing(HugeMemory(int(ends[-1]), prefault=False)) as memory:
            drive_offsets = self._record.offset + offsets.astype(np.int64)
            pieces = Pieces(memory.array, ends - sizes, drive_offsets, sizes)

            check = TagCheck(pieces, lengths, seeds, tags)
            is_good = await self._drive.submit_read(pieces, check)
        is_wrong = check.was_read & ~is_good
        self.progress.spend(self._clock(), int(ends[-1]), blocks=len(entries))
        for row in np.flatnonzero(is_wrong).tolist():
            self._shard.check_damage(
                Damage(
                    shard=self._record.id,
                    key=entries["key"][row].tobytes(),
                    offset=int(offsets[row]),
                    length=int(lengths[row]),
                    generation=int(generation),
                    tag=tags[row].tobytes(),
                    seed=int(seeds[row]),
                )
            )


def _chunks(entries: Entries, chunk_bytes: int) -> Iterator[Entries]:
    """Cut entries into chunks of about *chunk_bytes*."""
    sizes = whole_pages(entries["length"].astype(np.uint32))
    filled = (np.cumsum(sizes, dtype=np.int64) - sizes) // chunk_bytes
    cuts = [0, *(np.flatnonzero(filled[1:] != filled[:-1]) + 1).tolist(), len(entries)]
    for begin, end in itertools.pairwise(cuts):
        if begin < end:
            yield entries[begin:end]


_CHECKS_MAX = 64
"""Limit of concurrent checks. Further reports are ignored, and come again with the next read."""


class DamageChecker:
    """Checks of the blocks of one shard.

    No report is trusted. A report of an extent that the index does not list is ignored.
    """

    def __init__(self, shard: VerifiedShard, record: ShardRecord, drive: Drive, events: EventRing) -> None:
        self._shard = shard
        self._record = record
        self._drive = drive
        self._events = events
        self.checks: dict[bytes, asyncio.Event] = {}
        """For the key of each block being read again, the end of the check."""

    def check(self, report: Damage) -> None:
        """Begin to read a block again, if the index lists it as reported."""
        key, checks = report.key, self.checks
        if self._shard.is_listed(report) and key not in checks and len(checks) < _CHECKS_MAX:
            checks[key] = asyncio.Event()
            self._shard.spawn(self._check(report))

    async def wait(self, keys: NDArray[np.uint8], within_s: float) -> None:
        """Wait for the checks of blocks: until then, the index lists blocks that may be damaged.

        *keys* has shape (n, 16).
        """
        if not self.checks:
            return
        ends = [end for row in keys if (end := self.checks.get(row.tobytes())) is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for end in ends:
                    await end.wait()

    async def _check(self, report: Damage) -> None:
        try:
            await self._read_again(report)
        finally:
            self.checks.pop(report.key).set()

    async def _read_again(self, report: Damage) -> None:
        is_damaged = await self._is_damaged(report)
        if is_damaged and self._shard.drop(report):
            self._events.record(EventKind.DROPPED, np.frombuffer(report.key, np.uint8).reshape(1, -1))
            log.warning("shard %s dropped a damaged block of %d bytes", self._record.id, report.length)
            self._shard.count_damage(report.offset)

    async def _is_damaged(self, report: Damage) -> bool:
        with closing(HugeMemory(rounded_up(report.length), prefault=False)) as memory:
            block = memory.array[: rounded_up(report.length)]
            extent = Pieces.one(block, drive_offset=self._record.offset + report.offset)
            (is_read,) = await self._drive.submit_read(extent)
            return bool(is_read) and not matches(block[: report.length].data, report.seed, report.tag)
