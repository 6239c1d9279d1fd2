"""Copy of the fabric's volume records on one owned shard: see ``flash.volume_records``.

Only the shard's owner writes the copy, in the background, one write at a time; no request waits for it. After
a failed write the shard reports itself as failing, and goes on: blocks need no volume records. Once no part
of that write can land any more, this owner or the next reads the copy and tries again.

No grant covers the copy. So an owner writes only with a grant and before the fence, and reads the copy again
after the retirement of the earlier grants: until then a late write of an earlier owner may have landed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from ostraca_dpu_agent.shards.shard import OwnedShard
from ostraca_fabric.errors import DriveError, MembershipError, OstracaError
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.flash.volume_records import (
    COPIES,
    VolumesCopy,
    VolumesState,
    copy_bytes,
    copy_offset,
    encode_volumes,
    examine_volumes,
    merged,
    newest_copy,
)
from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.model.ids import DriveId, FabricId, ShardId
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.runtime.memory import HugeMemory

log = logging.getLogger(__name__)

_NOTHING = VolumesCopy(VolumesState.BLANK)


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """Wanted content of the copy."""

    volumes: tuple[VolumeRecord, ...]
    is_alone: bool
    """Whether no write of an earlier owner can land any more."""


class VolumeCopy:
    """Volume records of one owned shard, kept up to date by ``update``."""

    def __init__(
        self, owned: OwnedShard, drive: Drive, superblock: Callable[[], Awaitable[Superblock]]
    ) -> None:
        """Begin with unknown content; *superblock* reads the shard's superblock, or raises OstracaError."""
        self.owned = owned
        self._drive = drive
        self._read_superblock = superblock
        self._superblock: Superblock | None = None
        self._wanted: _Target | None = None
        self._tried: _Target | None = None
        self._is_writing = False
        self._is_read_alone = False
        self._number: int | None = None  # of the valid copy on flash
        self._copy: VolumesCopy | None = None  # its content

    @property
    def recorded(self) -> int:
        """Number of volumes known to be on flash."""
        return 0 if self._copy is None else len(self._copy.volumes)

    @property
    def left_out(self) -> int:
        """Number of volumes without room."""
        return 0 if self._copy is None else self._copy.left_out

    def update(self, volumes: tuple[VolumeRecord, ...]) -> None:
        """Record *volumes* on flash, in the background; the newest call counts. Call at intervals.

        A copy that can't be read is not tried again. A write that this owner may not do now is retried with
        the next call.
        """
        target, is_alone = self._wanted, not self.owned.withheld
        if target is None or target.volumes is not volumes or target.is_alone != is_alone:
            self._wanted = _Target(volumes, is_alone)
        if self._wanted is not self._tried and not self._is_writing:
            self._is_writing = True
            self.owned.spawn(self._bring_up_to_date())

    async def _bring_up_to_date(self) -> None:
        try:
            while (target := self._wanted) is not self._tried and not self.owned.is_closed:
                assert target is not None, "there is a target"
                self._tried = target
                if not await self._record(target):
                    self._tried = None
                    break
        except OstracaError as error:
            if self.owned.is_volume_write_in_doubt:
                self._superblock = self._tried = None
            self.owned.note_failure()
            log.warning("shard %s: volume records can't be written: %s", self.owned.record.id, error)
        finally:
            self._is_writing = False

    async def _record(self, target: _Target) -> bool:
        """Write the target if flash differs; return False if this owner may not write now."""
        if self.owned.is_volume_write_in_doubt:
            return False
        if self._superblock is None or target.is_alone != self._is_read_alone:
            self._superblock = await self._read_superblock()
            self._number, self._copy = await self._read_copies(self._superblock)
            self._is_read_alone = target.is_alone
        superblock, room = self._superblock, copy_bytes(self._superblock.geometry)
        before = self._copy or _NOTHING
        wanted = merged(target.volumes, before.volumes)
        if not room or wanted == before.volumes:
            return True
        pages = encode_volumes(
            superblock.identity, room, wanted, epoch=self.owned.epoch, sequence=before.sequence + 1
        )
        after, _ = examine_volumes(superblock, pages)
        if (after.volumes, after.left_out) == (before.volumes, before.left_out):
            return True
        if not self.owned.may_write_volumes:
            return False
        number = 0 if self._number is None else 1 - self._number
        await self._write(copy_offset(superblock.geometry, number), pages)
        self._number, self._copy = number, after
        if after.left_out:
            log.warning(
                "%d volumes have no room in the volume records of shard %s: create them again after a "
                "rebuild of the fabric from its drives",
                after.left_out,
                self.owned.record.id,
            )
        return True

    async def _read_copies(self, superblock: Superblock) -> tuple[int | None, VolumesCopy | None]:
        """Read the copies of earlier owners; return the number and content of the newest, if any."""
        size_bytes = COPIES * copy_bytes(superblock.geometry)
        if not size_bytes:
            return None, None
        with closing(HugeMemory(size_bytes, prefault=False)) as memory:
            area = memory.array[:size_bytes]
            at = self.owned.record.offset + copy_offset(superblock.geometry, 0)
            (is_read,) = await self._drive.submit_read(Pieces.one(area, drive_offset=at))
            if not is_read:
                raise DriveError(f"drive {self._drive.id} can't be read")
            copies = examine_volumes(superblock, area.tobytes())
            del area
        number = newest_copy(copies)
        return number, None if number is None else copies[number]

    async def _write(self, offset: int, pages: bytes) -> None:
        """Write one copy, whole and durable. Raises DriveError."""
        self.owned.core.budget.spend(len(pages))
        with closing(HugeMemory(len(pages), prefault=False)) as memory:
            room = memory.array[: len(pages)]
            room[:] = np.frombuffer(pages, np.uint8)
            (is_ok,) = await self._drive.submit_write(
                Pieces.one(room, drive_offset=self.owned.record.offset + offset)
            )
            del room
        if not is_ok or (self._drive.has_volatile_cache and not await self._drive.submit_flush()):
            self.owned.expect_late_volume_write()
            raise DriveError(f"drive {self._drive.id} did not write them")


class VolumeCopies:
    """Volume copies of served shards; ``run`` beside the controller."""

    def __init__(
        self,
        membership: Membership,
        *,
        served: Mapping[ShardId, OwnedShard],
        drives: Mapping[DriveId, Drive],
        turn_s: float,
        read_superblock: Callable[[Drive, ShardRecord, FabricId], Awaitable[Superblock]],
    ) -> None:
        """Follow the volumes in *membership*; look for new shards in *served* every *turn_s*."""
        self._membership = membership
        self._served = served
        self._drives = drives
        self._turn_s = turn_s
        self._read_superblock = read_superblock
        self._copies: dict[ShardId, VolumeCopy] = {}
        self._volumes: tuple[VolumeRecord, ...] | None = None

    def of(self, shard: ShardId) -> VolumeCopy | None:
        """Return a shard's copy, if any."""
        return self._copies.get(shard)

    async def run(self) -> None:
        """Follow until cancelled. Writes under way belong to their shards, and end with the shards."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            while True:
                self.turn()
                await asyncio.sleep(self._turn_s)

    async def _follow(self) -> None:
        while True:
            try:
                async for volumes in self._membership.volume_changes():
                    self._volumes = volumes
                    self.turn()
            except MembershipError as error:
                log.warning("changes of volumes can't be read, trying again: %s", error)
            await asyncio.sleep(self._turn_s)

    def turn(self) -> None:
        """Write the present volumes to every recovered shard."""
        self._copies = {
            shard: copy for shard, copy in self._copies.items() if self._served.get(shard) is copy.owned
        }
        for shard, owned in self._served.items():
            drive = self._drives.get(owned.record.drive)
            if self._volumes is None or drive is None or owned.core.is_recovering or owned.is_closed:
                continue
            if shard not in self._copies:
                reads = partial(self._read_superblock, drive, owned.record, self._membership.map.fabric)
                self._copies[shard] = VolumeCopy(owned, drive, reads)
            self._copies[shard].update(self._volumes)
