"""Verification of reported damage: each reported block is read again, and dropped if damaged.

No report is trusted. A report of an extent that the index does not list is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any, Protocol

import numpy as np

from ostraca_dpu_agent.events import EventRing
from ostraca_fabric.model.extent import Pieces, rounded_up
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.tables.digests import matches
from ostraca_fabric.telemetry.explain import EventKind
from ostraca_fabric.wire.messages import Damage

log = logging.getLogger(__name__)

_CHECKS_MAX = 64
"""Limit of concurrent checks. Further reports are ignored, and come again with the next read."""


class DamagedShard(Protocol):
    """Shard with reported damage."""

    def is_listed(self, report: Damage) -> bool:
        """Return whether the index lists exactly the reported extent."""

    def drop(self, report: Damage) -> bool:
        """Remove the reported block from the index; return whether it was still listed."""

    def count_damage(self, offset: int) -> None:
        """Report confirmed damage at this offset in the shard."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run *work* in the background."""


class DamageChecker:
    """Checks of the blocks of one shard."""

    def __init__(self, shard: DamagedShard, record: ShardRecord, drive: Drive, events: EventRing) -> None:
        self._shard = shard
        self._record = record
        self._drive = drive
        self._events = events
        self.keys: set[bytes] = set()
        """Keys of the blocks being read again."""

    def check(self, report: Damage) -> None:
        """Begin to read a block again, if the index lists it as reported."""
        if self._shard.is_listed(report) and report.key not in self.keys and len(self.keys) < _CHECKS_MAX:
            self.keys.add(report.key)
            self._shard.spawn(self._read_again(report))

    async def _read_again(self, report: Damage) -> None:
        try:
            is_damaged = await self._is_damaged(report)
        finally:
            self.keys.discard(report.key)
        if is_damaged and self._shard.drop(report):
            self._events.record(EventKind.DROPPED, np.frombuffer(report.key, np.uint8).reshape(1, -1))
            log.warning("shard %s dropped a damaged block of %d bytes", self._record.id, report.length)
            self._shard.count_damage(report.offset)

    async def _is_damaged(self, report: Damage) -> bool:
        memory = HugeMemory(rounded_up(report.length), prefault=False)
        try:
            block = memory.array[: rounded_up(report.length)]
            extent = Pieces.one(block, drive_offset=self._record.offset + report.offset)
            (is_read,) = await self._drive.submit_read(extent)
            return bool(is_read) and not matches(block[: report.length].data, report.seed, report.tag)
        finally:
            memory.close()
