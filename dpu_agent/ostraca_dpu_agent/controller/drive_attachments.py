"""Attachment of an agent's drives: open drives of the map, close others.

A drive is used only after its superblocks prove to be the map's shards. No write comes before: a path may
lead to another disk, and two drives may share an NGUID. The next attempt for a refused drive comes later. A
drive with a path and without an answer stays open, unidentified: each new attempt would hang too, and cost
more threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from ostraca_dpu_agent.controller.recovery import read_superblock
from ostraca_fabric.drives.guarded_drive import GuardedDrive
from ostraca_fabric.errors import DriveError, FormatError, OstracaError
from ostraca_fabric.model.fabric_map import DriveRecord, FabricMap, ShardRecord
from ostraca_fabric.model.ids import AgentId, DriveId

log = logging.getLogger(__name__)


def path_on_record(drive: DriveRecord) -> str:
    """Return the recorded path of a drive, the same on every host."""
    return drive.path


async def preempt_none(drive: DriveId, agent: AgentId) -> None:
    """Rely on timeouts for late writes of a vanished agent."""


@dataclass(frozen=True, slots=True)
class DriveOpener:
    """Functions of the process to open and close drives."""

    open_drive: Callable[[DriveRecord], GuardedDrive]
    """Open a drive. Raises OstracaError."""

    close_drive: Callable[[DriveId], None] = lambda _: None
    """Close a drive in the background; no operation if agents share drives."""

    device_of: Callable[[DriveRecord], str] = path_on_record
    """Return the present device of a drive; empty without a path."""

    preempt: Callable[[DriveId, AgentId], Awaitable[None]] = preempt_none
    """Make a drive refuse writes of a vanished agent, if supported."""


class DriveAttachments:
    """Drives of one agent."""

    def __init__(
        self,
        agent: AgentId,
        drives: dict[DriveId, GuardedDrive],
        opener: DriveOpener,
        *,
        clock: Callable[[], float],
        again_s: float,
    ) -> None:
        """Manage *drives*. A failed attachment is tried again after *again_s*."""
        self._agent = agent
        self._drives = drives
        self._opener = opener
        self._clock = clock
        self._again_s = again_s
        self._devices: dict[DriveId, str] = {}
        """Device of each attached drive."""

        self._again_at_s: dict[DriveId, float] = {}
        self._refusals: dict[DriveId, str] = {}
        """Reason of each drive's last failed attachment."""

        self._checked_files = 0
        """Place in the order of drives where the next check of files begins."""

        self._unidentified: dict[DriveId, DriveRecord] = {}
        """Attached drives without an answer about their identity."""

        self._mismatched: set[DriveId] = set()
        """Drives attached unidentified, and identified as other drives later."""

    def unattachable(self, fabric_map: FabricMap) -> frozenset[DriveId]:
        """Return the drives not to attach yet: without a path, or refused recently."""
        now_s = self._clock()
        return frozenset(
            drive.id
            for drive in _drives(fabric_map)
            if drive.id not in self._drives
            and (not self._opener.device_of(drive) or now_s < self._again_at_s.get(drive.id, now_s))
        )

    def unusable(self, fabric_map: FabricMap) -> dict[DriveId, str]:
        """Return the reasons against unusable drives of the map, as clauses; untried drives are left out."""
        why = {}
        for drive in _drives(fabric_map):
            if drive.id in self._drives and drive.id not in self._unidentified:
                continue
            if not self._opener.device_of(drive):
                why[drive.id] = f"no path from this host to drive {drive.id}"
            elif drive.id in self._refusals:
                why[drive.id] = self._refusals[drive.id]
        return why

    def obsolete(self, fabric_map: FabricMap) -> frozenset[DriveId]:
        """Return the attached drives to detach.

        These drives have left the map, have moved to another device, or are other drives than recorded.
        """
        known = {drive.id: drive for drive in _drives(fabric_map)}
        return frozenset(
            drive
            for drive, device in self._devices.items()
            if drive not in known
            or drive in self._mismatched
            or self._opener.device_of(known[drive]) not in ("", device)
        )

    async def attach(self, drive: DriveRecord, fabric_map: FabricMap) -> None:
        """Open a drive; log and skip a drive that fails to open, or has other contents."""
        device = self._opener.device_of(drive)
        try:
            opened = self._opener.open_drive(drive)
        except OstracaError as error:
            self._refuse(drive, error)
            return
        try:
            shards = [shard for shard in fabric_map.shards() if shard.drive == drive.id]
            _check_size(drive, device, opened.size_bytes, shards)
            opened.is_identified = await self._identify(drive, device, opened, shards, fabric_map)
        except OstracaError as error:
            opened.unwatch()
            self._opener.close_drive(drive.id)
            self._refuse(drive, error)
            return
        self._drives[drive.id], self._devices[drive.id] = opened, device
        self._again_at_s.pop(drive.id, None)
        if opened.is_identified:
            self._refusals.pop(drive.id, None)
        else:
            self._unidentified[drive.id] = drive

    def detach(self, drive: DriveId) -> None:
        """Close a drive without served shards. I/O under way ends by itself."""
        self._drives.pop(drive).unwatch()
        del self._devices[drive]
        self._unidentified.pop(drive, None)
        self._mismatched.discard(drive)
        self._opener.close_drive(drive)

    async def check_files(self, *, at_once: int | None = None) -> None:
        """Check the files of attached drives; with *at_once*, of so many drives, in turn.

        A hanging file delays no other.
        """
        files = [drive for drive in self._drives.values() if drive.is_file]
        if at_once is not None and len(files) > at_once:
            first = self._checked_files % len(files)
            files = (files[first:] + files[:first])[:at_once]
            self._checked_files = first + at_once
        await asyncio.gather(*(drive.look() for drive in files))

    async def identify(self, fabric_map: FabricMap) -> None:
        """Try again to identify unidentified drives."""
        for drive in list(self._unidentified.values()):
            opened, device = self._drives[drive.id], self._devices[drive.id]
            shards = [shard for shard in fabric_map.shards() if shard.drive == drive.id]
            try:
                is_identified = await self._identify(drive, device, opened, shards, fabric_map)
            except OstracaError as error:
                self._mismatched.add(drive.id)
                self._refuse(drive, error)
            else:
                opened.is_identified = is_identified
                if is_identified:
                    del self._unidentified[drive.id]
                    self._refusals.pop(drive.id, None)

    async def _identify(
        self,
        drive: DriveRecord,
        device: str,
        opened: GuardedDrive,
        shards: Iterable[ShardRecord],
        fabric_map: FabricMap,
    ) -> bool:
        """Return whether a drive proves to be the map's; False for a silent drive with a path.

        Raises FormatError for another drive, and DriveError for a silent drive with an NGUID.
        """
        try:
            await asyncio.gather(*(read_superblock(opened, each, fabric_map.fabric) for each in shards))
        except FormatError as error:
            raise FormatError(
                f"another drive than {drive.id} is at {device}: {error} (see `ostraca doctor {device}`)"
            ) from error
        except (DriveError, OSError, MemoryError) as error:
            why = DriveError(f"drive {drive.id} at {device} can't be identified: {error}")
            if drive.nguid:
                raise why from error
            self._refuse(drive, why)
            return False
        return True

    def _refuse(self, drive: DriveRecord, error: OstracaError) -> None:
        is_known = self._refusals.get(drive.id) == str(error)
        self._again_at_s[drive.id] = self._clock() + self._again_s
        self._refusals[drive.id] = str(error)
        level = logging.DEBUG if is_known else logging.WARNING
        log.log(level, "%s can't attach drive %s, trying again: %s", self._agent, drive.id, error)


def _check_size(drive: DriveRecord, device: str, size_bytes: int, shards: Iterable[ShardRecord]) -> None:
    """Check that a drive contains its shards in full. Raises DriveError."""
    recorded_bytes = max((shard.offset + shard.size_bytes for shard in shards), default=0)
    if size_bytes < recorded_bytes:
        raise DriveError(
            f"drive {drive.id} at {device} has {size_bytes >> 20} MiB, and {recorded_bytes >> 20} MiB are "
            f"recorded ({size_bytes} and {recorded_bytes} bytes), so the drive was truncated or exchanged: "
            f"restore or replace the drive (see `ostraca doctor {device}`)"
        )


def _drives(fabric_map: FabricMap) -> Iterable[DriveRecord]:
    return (drive for enclosure in fabric_map.enclosures.values() for drive in enclosure.drives)
