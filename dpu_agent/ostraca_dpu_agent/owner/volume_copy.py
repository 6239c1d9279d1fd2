"""The copy of the fabric's volumes on one owned shard: see ``flash.volume_records``.

It is written beside all else, by the shard's owner alone, one write at a time; no request waits for it. When
it can't be written the shard says that it is failing, and goes on: blocks need no volume records. It is read
and tried again once nothing of that write can land any more, by this owner or the next.

No grant says who may write it, so it goes with all of them: an owner writes it only while it is granted
something and its fence has not passed, and reads it again once the earlier grants are retired. What an
earlier owner had under way may have landed over it until then, and nothing can after that.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.errors import DriveError, OstracaError
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
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.ports.drive import Pieces

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ostraca_dpu_agent.owner.shard import OwnedShard
    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.ports.drive import Drive
    from ostraca_fabric.volume import VolumeRecord

log = logging.getLogger(__name__)

_NOTHING = VolumesCopy(VolumesState.BLANK)


@dataclass(frozen=True, slots=True, eq=False)
class _Wish:
    """What flash is to say."""

    volumes: tuple[VolumeRecord, ...]
    is_alone: bool
    """Whether no earlier owner's write can land any more."""


class VolumeCopy:
    """What one owner knows of its shard's copy. ``want`` makes it say what is wanted."""

    def __init__(
        self, owned: OwnedShard, drive: Drive, superblock: Callable[[], Awaitable[Superblock]]
    ) -> None:
        """Begin with what lies on flash unknown; *superblock* reads the shard's, or raises OstracaError."""
        self.owned = owned
        self._drive = drive
        self._read_superblock = superblock
        self._superblock: Superblock | None = None
        self._wanted: _Wish | None = None
        self._tried: _Wish | None = None
        self._is_writing = False
        self._is_read_alone = False
        self._number: int | None = None  # of the copy on flash that counts
        self._copy: VolumesCopy | None = None  # what it says

    @property
    def recorded(self) -> int:
        """How many volumes are on flash, as far as is known."""
        return 0 if self._copy is None else len(self._copy.volumes)

    @property
    def left_out(self) -> int:
        """How many found no room there."""
        return 0 if self._copy is None else self._copy.left_out

    def want(self, volumes: tuple[VolumeRecord, ...]) -> None:
        """See to it that flash says *volumes*; the newest call counts. Call it now and then.

        What can't be read is not tried again. What this owner may not write now is, with the next call.
        """
        wish, is_alone = self._wanted, not self.owned.withheld
        if wish is None or wish.volumes is not volumes or wish.is_alone != is_alone:
            self._wanted = _Wish(volumes, is_alone)
        if self._wanted is not self._tried and not self._is_writing:
            self._is_writing = True
            self.owned.spawn(self._bring_up())

    async def _bring_up(self) -> None:
        try:
            while (wish := self._wanted) is not self._tried and not self.owned.is_closed:
                assert wish is not None, "somebody wants something"
                self._tried = wish
                if not await self._record(wish):
                    self._tried = None
                    break
        except OstracaError as error:
            if self.owned.is_outside_in_doubt:
                self._superblock = self._tried = None
            self.owned.is_failing = True
            log.warning("the volumes can't be recorded on shard %s: %s", self.owned.record.id, error)
        finally:
            self._is_writing = False

    async def _record(self, wish: _Wish) -> bool:
        """Write what is wanted where flash says something else; say whether this owner may."""
        if self.owned.is_outside_in_doubt:
            return False
        if self._superblock is None or wish.is_alone != self._is_read_alone:
            self._superblock = await self._read_superblock()
            self._number, self._copy = await self._found(self._superblock)
            self._is_read_alone = wish.is_alone
        superblock, room = self._superblock, copy_bytes(self._superblock.geometry)
        before = self._copy or _NOTHING
        wanted = merged(wish.volumes, before.volumes)
        if not room or wanted == before.volumes:
            return True
        pages = encode_volumes(
            superblock.identity, room, wanted, epoch=self.owned.epoch, sequence=before.sequence + 1
        )
        after, _ = examine_volumes(superblock, pages)
        if (after.volumes, after.left_out) == (before.volumes, before.left_out):
            return True
        if not self.owned.may_write:
            return False
        number = 0 if self._number is None else 1 - self._number
        await self._write(copy_offset(superblock.geometry, number), pages)
        self._number, self._copy = number, after
        if after.left_out:
            log.warning(
                "%d volumes find no room in the volume records of shard %s: were the fabric rebuilt from its "
                "drives, they would have to be made again",
                after.left_out,
                self.owned.record.id,
            )
        return True

    async def _found(self, superblock: Superblock) -> tuple[int | None, VolumesCopy | None]:
        """Read what earlier owners wrote."""
        size_bytes = COPIES * copy_bytes(superblock.geometry)
        if not size_bytes:
            return None, None
        memory = HugeMemory(size_bytes, prefault=False)
        try:
            area = memory.array[:size_bytes]
            at = self.owned.record.offset + copy_offset(superblock.geometry, 0)
            (is_read,) = await self._drive.submit_read(Pieces.one(area, drive_offset=at))
            if not is_read:
                raise DriveError(f"what {self._drive.id} holds of them can't be read")
            copies = examine_volumes(superblock, area.tobytes())
            del area
        finally:
            memory.close()
        number = newest_copy(copies)
        return number, None if number is None else copies[number]

    async def _write(self, offset: int, pages: bytes) -> None:
        """Write one copy, whole and durable. Raises DriveError."""
        self.owned.core.spending.spend(len(pages))
        memory = HugeMemory(len(pages), prefault=False)
        try:
            room = memory.array[: len(pages)]
            room[:] = np.frombuffer(pages, np.uint8)
            (is_ok,) = await self._drive.submit_write(
                Pieces.one(room, drive_offset=self.owned.record.offset + offset)
            )
            del room
        finally:
            memory.close()
        if not is_ok or (self._drive.has_volatile_cache and not await self._drive.submit_flush()):
            self.owned.doubt_outside()
            raise DriveError(f"{self._drive.id} did not write them")
