"""A file-backed enclosure: drives are plain files in one directory, each formatted as one shard.

Files are allocated when they are made, so that a full disk shows then and not in the middle of a put. What
is found is never formatted again: a file that is not this fabric's shard is refused.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca_fabric.adapters.whole_files import sync_directory
from ostraca_fabric.errors import DriveError, FormatError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.fabric_map import DriveRecord, EnclosureRecord
from ostraca_fabric.flash.geometry import SUPERBLOCK_COPIES, Geometry, segment_bytes_for
from ostraca_fabric.flash.rebuild import shard_record
from ostraca_fabric.flash.superblock import Superblock, decode_superblock, encode_superblock
from ostraca_fabric.ids import ID_BYTES, DriveId, EnclosureId, FabricId, ShardId, drive_id, shard_id

if TYPE_CHECKING:
    from ostraca_fabric.fabric_map import ShardRecord

_HEADROOM_BYTES = 64 << 20
"""Left free on the disk that the files lie on."""


class FileEnclosure:
    """An enclosure of *drives* files of *drive_bytes* each in *directory*. ``prepare`` it before use."""

    def __init__(
        self,
        enclosure: EnclosureId,
        directory: Path,
        *,
        fabric: FabricId,
        drives: int,
        drive_bytes: int,
        segment_bytes: int | None = None,
    ) -> None:
        """Plan the enclosure. Raises UsageError when a drive is too small, saying how large it has to be.

        *segment_bytes* is for drives made from now on; by default it follows from their size.
        """
        self._id = enclosure
        self._directory = directory
        self._fabric = fabric
        self._drives = drives
        self._geometry = Geometry.planned(
            drive_bytes, segment_bytes=segment_bytes or segment_bytes_for(drive_bytes)
        )

    def prepare(self) -> EnclosureRecord:
        """Make and format the drives that are missing, check those that are there, and describe the
        enclosure.

        Raises DriveError when the disk is too small, and FormatError when a file holds something else.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        drives = [drive_id(self._id, f"drive-{number}") for number in range(self._drives)]
        missing = [drive for drive in drives if not self._path(drive).exists()]
        self._check_room(len(missing))
        for drive in missing:
            self._make(drive)
        return EnclosureRecord(
            self._id,
            tuple(DriveRecord(drive, str(self._path(drive))) for drive in drives),
            tuple(self._found(drive) for drive in drives),
        )

    def of_other_size(self) -> int:
        """Return how many drives are there already that are of another size than those that would be made."""
        paths = (self._path(drive_id(self._id, f"drive-{number}")) for number in range(self._drives))
        return sum(path.exists() and path.stat().st_size != self._geometry.shard_bytes for path in paths)

    def _path(self, drive: DriveId) -> Path:
        return self._directory / f"{drive.rpartition('/')[2]}.img"

    def _check_room(self, missing: int) -> None:
        wanted = missing * self._geometry.shard_bytes
        free = shutil.disk_usage(self._directory).free - _HEADROOM_BYTES
        if wanted > free:
            raise DriveError(
                f"{missing} drives take {wanted} bytes, and {self._directory} has {max(0, free)} to spare: "
                "take a smaller capacity or another directory"
            )

    def _make(self, drive: DriveId) -> None:
        """Write a whole drive beside its name, then give it the name: a crash leaves no half-made drive."""
        shard = shard_id(drive, 0)
        superblock = Superblock(
            fabric=self._fabric,
            format_id=secrets.token_bytes(ID_BYTES),
            enclosure=self._id,
            drive=drive,
            shard=shard,
            drive_offset=0,
            geometry=self._geometry,
        )
        path = self._path(drive)
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._geometry.shard_bytes)
                file.write(encode_superblock(superblock))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            sync_directory(self._directory)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise DriveError(f"drive {drive} can't be made at {path}: {error.strerror}") from error

    def _found(self, drive: DriveId) -> ShardRecord:
        path = self._path(drive)
        try:
            with path.open("rb") as file:
                pages = file.read(SUPERBLOCK_COPIES * PAGE_BYTES)
        except OSError as error:
            raise DriveError(f"drive {drive} can't be read at {path}: {error.strerror}") from error
        try:
            superblock = decode_superblock(pages)
        except FormatError as error:
            raise FormatError(f"{path}: {error} (`ostraca doctor {path}` tells more)") from error
        shard = shard_id(drive, 0)
        self._check_ours(path, superblock, shard)
        return shard_record(superblock)

    def _check_ours(self, path: Path, superblock: Superblock, shard: ShardId) -> None:
        if (superblock.fabric, superblock.shard) != (self._fabric, shard):
            raise FormatError(
                f"{path} holds shard {superblock.shard} of fabric {superblock.fabric.hex()}, not {shard} of "
                f"{self._fabric.hex()}: it is left alone. Move it away, or start the fabric it belongs to"
            )
