"""Writing a shard's summaries: the group commit between its pure core and its drive.

What was taken to be written is submitted soon, or never: an agent that finds it was stopped for longer than
``pause_max_s`` since drops it. A successor counts on that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.ports.drive import Pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ostraca_dpu_agent.owner.core import SummaryWrite
    from ostraca_dpu_agent.owner.shard import OwnedShard
    from ostraca_dpu_agent.settings import OwnerSettings
    from ostraca_fabric.ports.drive import Drive

log = logging.getLogger(__name__)


class SummaryWriter:
    """Writes what the core of one shard says is due. Its user closes or leaks ``pages`` in the end."""

    def __init__(
        self, shard: OwnedShard, drive: Drive, clock: Callable[[], float], settings: OwnerSettings
    ) -> None:
        """Write nothing yet."""
        self._shard = shard
        self._drive = drive
        self._clock = clock
        self._group_commit_s = settings.group_commit_s
        self._pause_max_s = settings.pause_max_s
        self.pages = HugeMemory(1 << 20, prefault=False)
        self.has_all_commits = asyncio.Event()
        """Set when nobody holds space any more whose commit could share the next write."""

    async def run(self, is_due: asyncio.Event) -> None:
        """Write each time that something *is_due*, until the shard is closed."""
        core = self._shard.core
        while True:
            await is_due.wait()
            is_due.clear()
            await self._gather()
            while core.has_writes_due:
                begun_s = self._clock()
                await self._write(core.writes_due(begun_s), begun_s)
            if self._shard.is_closed:
                core.expire(self._clock())  # what the fence has overtaken is answered as well
                self._shard.wake()
                return

    async def _gather(self) -> None:
        """Wait for commits that may share the next write, as long as there may be any."""
        self.has_all_commits.clear()
        if self._shard.core.may_get_commits and not self._shard.is_closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._group_commit_s):
                    await self.has_all_commits.wait()

    async def _write(self, writes: list[SummaryWrite], begun_s: float) -> None:
        if not await self._flushed():  # what would be listed may be lost yet
            for write in writes:
                self._end(write, is_ok=False)
            return
        is_ok, is_dropped = [True] * len(writes), [True] * len(writes)
        pieces = [(number, *piece) for number, write in enumerate(writes) for piece in write.pieces]
        for batch in _batches(pieces, len(self.pages.view)):
            lengths = np.array([len(pages) for _, _, pages in batch], np.uint32)
            places = np.cumsum(lengths, dtype=np.int64) - lengths
            offsets = np.array([self._shard.record.offset + offset for _, offset, _ in batch], np.int64)
            for (_, _, pages), at in zip(batch, places.tolist(), strict=True):
                self.pages.view[at : at + len(pages)] = pages
            if self._clock() - begun_s > self._pause_max_s:
                ends = np.zeros(len(batch), np.bool_)
            else:
                for number, _, _ in batch:
                    is_dropped[number] = False
                ends = await self._drive.submit_write(Pieces(self.pages.array, places, offsets, lengths))
            for (number, _, _), end in zip(batch, ends.tolist(), strict=True):
                is_ok[number] &= end
        if not await self._flushed():
            is_ok = [False] * len(writes)
        for write, good, dropped in zip(writes, is_ok, is_dropped, strict=True):
            self._end(write, is_ok=good, is_dropped=dropped)

    async def _flushed(self) -> bool:
        """Make what was written before durable, where the drive's cache would lose it."""
        return not self._drive.has_volatile_cache or await self._drive.submit_flush()

    def _end(self, write: SummaryWrite, *, is_ok: bool, is_dropped: bool = False) -> None:
        shard, now_s = self._shard, self._clock()
        if is_dropped:
            log.warning(
                "shard %s was stopped for longer than %.0f s: it drops a summary",
                shard.record.id,
                self._pause_max_s,
            )
            shard.answer(shard.core.dropped(now_s, write))
            shard.wake()
            return
        if not is_ok:
            shard.is_failing = True
            log.warning(
                "shard %s could not write its summary; the blocks in it are declined", shard.record.id
            )
        shard.answer(shard.core.written(now_s, write, is_ok=is_ok))
        shard.wake()


def _batches(pieces: list[tuple[int, int, bytes]], room: int) -> Iterator[list[tuple[int, int, bytes]]]:
    """Cut (write, offset, pages) into batches of at most *room* bytes, splitting what is longer."""
    batch: list[tuple[int, int, bytes]] = []
    used = 0
    for write, offset, pages in pieces:
        for start in range(0, len(pages), room):
            part = pages[start : start + room]
            if used + len(part) > room:
                yield batch
                batch, used = [], 0
            batch.append((write, offset + start, part))
            used += len(part)
    if batch:
        yield batch
