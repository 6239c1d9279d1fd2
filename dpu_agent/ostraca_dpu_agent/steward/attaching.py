"""Opens drives that the map has, and lets those go that it has no more.

A drive that was found by its NGUID is used only once its superblocks have said that they are the map's
shards: whoever gave it another one's identity by mistake loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_dpu_agent.steward.recover import read_superblock
from ostraca_fabric.errors import DriveError, OstracaError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ostraca_fabric.adapters.guarded_drive import GuardedDrive
    from ostraca_fabric.fabric_map import DriveRecord, FabricMap, ShardRecord
    from ostraca_fabric.ids import AgentId, DriveId

log = logging.getLogger(__name__)


def path_of(drive: DriveRecord) -> str:
    """Return where a drive can be opened that has one path everywhere."""
    return drive.path


async def bar_nobody(drive: DriveId, agent: AgentId) -> None:
    """Leave it to time-outs what an agent that is gone still writes."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How an agent's process opens drives."""

    open_drive: Callable[[DriveRecord], GuardedDrive]
    """Raises OstracaError."""

    close_drive: Callable[[DriveId], None] = lambda _: None
    """Lets one go; returns at once, whatever it still has to do. Nothing where agents share drives."""

    device_of: Callable[[DriveRecord], str] = path_of
    """Says where a drive can be opened now; empty where nowhere."""

    bar: Callable[[DriveId, AgentId], Awaitable[None]] = bar_nobody
    """Has a drive refuse what an agent that is gone still writes, where it can."""


class Attaching:
    """One agent's drives."""

    def __init__(
        self,
        agent: AgentId,
        drives: dict[DriveId, GuardedDrive],
        opening: Opening,
        *,
        clock: Callable[[], float],
        again_s: float,
    ) -> None:
        """Fill *drives*. What could not be attached is tried again after *again_s*."""
        self._agent = agent
        self._drives = drives
        self._opening = opening
        self._clock = clock
        self._again_s = again_s
        self._devices: dict[DriveId, str] = {}
        """Where each was opened."""

        self._again_at_s: dict[DriveId, float] = {}
        self._refusals: dict[DriveId, str] = {}
        """Why each was not attached when that was tried last."""

    def waiting(self, fabric_map: FabricMap) -> frozenset[DriveId]:
        """Return the drives that are not to be attached yet: there is no path to them, or one that was
        refused a moment ago.
        """
        now_s = self._clock()
        return frozenset(
            drive.id
            for drive in _drives(fabric_map)
            if drive.id not in self._drives
            and (not self._opening.device_of(drive) or now_s < self._again_at_s.get(drive.id, now_s))
        )

    def unattached(self, fabric_map: FabricMap) -> dict[DriveId, str]:
        """Return why drives of the map can't be used here, as clauses; none of one yet to be tried."""
        why = {}
        for drive in _drives(fabric_map):
            if drive.id in self._drives:
                continue
            if not self._opening.device_of(drive):
                why[drive.id] = f"this host has no path to drive {drive.id}"
            elif drive.id in self._refusals:
                why[drive.id] = self._refusals[drive.id]
        return why

    def moved(self, fabric_map: FabricMap) -> frozenset[DriveId]:
        """Return the drives that are attached and must not be any more: the map has them no longer, or they
        turned up elsewhere, and what was opened is dead.
        """
        known = {drive.id: drive for drive in _drives(fabric_map)}
        return frozenset(
            drive
            for drive, device in self._devices.items()
            if drive not in known or self._opening.device_of(known[drive]) not in ("", device)
        )

    async def attach(self, drive: DriveRecord, fabric_map: FabricMap) -> None:
        """Open a drive; where that can't be done, or it holds something else, say so and leave it."""
        device = self._opening.device_of(drive)
        try:
            opened = self._opening.open_drive(drive)
        except OstracaError as error:
            self._refuse(drive, error)
            return
        try:
            shards = [shard for shard in fabric_map.shards() if shard.drive == drive.id]
            _check_size(drive, device, opened.size_bytes, shards)
            if drive.nguid:
                await asyncio.gather(*(read_superblock(opened, each, fabric_map.fabric) for each in shards))
        except OstracaError as error:
            opened.unwatch()
            self._opening.close_drive(drive.id)
            self._refuse(drive, error)
            return
        self._drives[drive.id], self._devices[drive.id] = opened, device
        self._again_at_s.pop(drive.id, None)
        self._refusals.pop(drive.id, None)

    def detach(self, drive: DriveId) -> None:
        """Let a drive go that no shard is served on. What it has under way ends by itself."""
        self._drives.pop(drive).unwatch()
        del self._devices[drive]
        self._opening.close_drive(drive)

    def _refuse(self, drive: DriveRecord, error: OstracaError) -> None:
        self._again_at_s[drive.id] = self._clock() + self._again_s
        self._refusals[drive.id] = str(error)
        log.warning("%s can't attach drive %s: %s", self._agent, drive.id, error)


def _check_size(drive: DriveRecord, device: str, size_bytes: int, shards: Iterable[ShardRecord]) -> None:
    """Refuse a drive that ends before its shards do. Raises DriveError."""
    recorded_bytes = max((shard.offset + shard.size_bytes for shard in shards), default=0)
    if size_bytes < recorded_bytes:
        raise DriveError(
            f"drive {drive.id} at {device} has {size_bytes >> 20} MiB where {recorded_bytes >> 20} MiB are "
            f"recorded ({size_bytes} and {recorded_bytes} bytes): it was cut short, or is another one; put "
            "back what it was, or take it out of the fabric"
        )


def _drives(fabric_map: FabricMap) -> Iterable[DriveRecord]:
    return (drive for enclosure in fabric_map.enclosures.values() for drive in enclosure.drives)
