"""Blocks of a shard that someone found damaged: each is read again, and dropped when it is.

Nobody's word is taken for it. A report of anything but what the index lists now is ignored.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.explain import EventKind
from ostraca_fabric.extent import rounded_up
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.ports.drive import Pieces
from ostraca_fabric.tags import matches

if TYPE_CHECKING:
    from ostraca_dpu_agent.events import EventRing
    from ostraca_dpu_agent.owner.shard import OwnedShard
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.wire.messages import Damage

log = logging.getLogger(__name__)

_READ_AT_ONCE_MAX = 64
"""Further reports are ignored, and come again with the next read."""


class Suspects:
    """What one shard reads again."""

    def __init__(self, shard: OwnedShard, drive: Drive, events: EventRing) -> None:
        """Suspect nothing yet."""
        self._shard = shard
        self._drive = drive
        self._events = events
        self.keys: set[bytes] = set()
        """Of blocks that are being read again."""

    def check(self, report: Damage) -> None:
        """Begin to read a block again, if it is what the index lists and there is room for one more."""
        core = self._shard.core
        is_current = core.is_current(
            report.key, offset=report.offset, generation=report.generation, tag=report.tag
        )
        if not is_current or report.key in self.keys or len(self.keys) >= _READ_AT_ONCE_MAX:
            return
        row = core.index.find(np.frombuffer(report.key, np.uint8).reshape(1, -1))
        if int(core.index.lengths(row)[0]) == report.length:
            self.keys.add(report.key)
            self._shard.spawn(self._read_again(report))

    async def _read_again(self, report: Damage) -> None:
        shard = self._shard
        try:
            is_damaged = await self._is_damaged(report)
        finally:
            self.keys.discard(report.key)
        if is_damaged and shard.core.drop(
            report.key, offset=report.offset, generation=report.generation, tag=report.tag
        ):
            self._events.record(EventKind.DROPPED, np.frombuffer(report.key, np.uint8).reshape(1, -1))
            log.warning("shard %s dropped a damaged block of %d bytes", shard.record.id, report.length)
            shard.count_damage(report.offset)

    async def _is_damaged(self, report: Damage) -> bool:
        memory = HugeMemory(rounded_up(report.length), prefault=False)
        try:
            block = memory.array[: rounded_up(report.length)]
            where = Pieces.one(block, drive_offset=self._shard.record.offset + report.offset)
            (is_read,) = await self._drive.submit_read(where)
            return bool(is_read) and not matches(block[: report.length].data, report.seed, report.tag)
        finally:
            memory.close()
