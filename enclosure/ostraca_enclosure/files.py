"""File-backed enclosure: plain files in a directory, each formatted as a shard.

Files are allocated at creation, so that a full disk shows then, not during a put. An existing file is never
formatted again: a file without a shard of this fabric is refused.

A recorded drive was created before, and may hold blocks, so ``prepare`` never creates such a drive again. If
unusable as recorded, the drive is still described, with the reason (``unusable``), and the other drives stay
in use. ``replace`` deliberately creates an empty drive in its place.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ostraca_fabric.drives.flash_files import FlashFileError, open_flash
from ostraca_fabric.errors import DriveError, FormatError
from ostraca_fabric.flash.rebuild import shard_record
from ostraca_fabric.flash.superblock import Superblock, decode_superblock, encode_superblock
from ostraca_fabric.model.extent import MIB, PAGE_BYTES, SUPERBLOCK_COPIES, Geometry, segment_bytes_for
from ostraca_fabric.model.fabric_map import DriveRecord, EnclosureRecord, ShardRecord
from ostraca_fabric.model.ids import ID_BYTES, DriveId, EnclosureId, FabricId, ShardId, drive_id, shard_id
from ostraca_fabric.runtime.atomic_files import make_private_folder, write_whole
from ostraca_fabric.runtime.os_errors import state_and_remedy
from ostraca_fabric.runtime.sentences import counted

NOTHING_RECORDED: Mapping[DriveId, ShardRecord | None] = MappingProxyType({})

_HEADROOM_BYTES = 64 * MIB
"""Free space to leave on the disk of the files."""


class FileEnclosure:
    """Enclosure of *drives* files of *drive_bytes* each in *directory*.

    Call ``prepare`` before use.
    """

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
        """Plan the enclosure. Raises UsageError with the least size of a drive.

        *segment_bytes* applies to new drives; the default is derived from the drive's size.
        """
        self._id = enclosure
        self._directory = directory
        self._fabric = fabric
        self.drives = tuple(drive_id(enclosure, f"drive-{number}") for number in range(drives))
        self._geometry = Geometry.planned(
            drive_bytes, segment_bytes=segment_bytes or segment_bytes_for(drive_bytes)
        )
        self.unusable: dict[DriveId, str] = {}
        """Reasons against unusable recorded drives, from the last ``prepare``."""

    def prepare(self, recorded: Mapping[DriveId, ShardRecord | None] = NOTHING_RECORDED) -> EnclosureRecord:
        """Create missing drives, check existing drives, and return the enclosure's record.

        *recorded* drives were created before, and are not created again. If such a drive is unusable, the
        shard is described as recorded, or as planned without a record.

        Raises DriveError if the disk is too small, and FormatError if an unrecorded file has other contents.
        """
        drives = self.drives
        missing = [each for each in drives if each not in recorded and not os.path.lexists(self._path(each))]
        if missing:  # the folder of recorded drives may lie on a disk that is not mounted now
            _create_folder(self._directory)
            self._check_room(len(missing))
        for drive in missing:
            self._create_drive(drive)
        self.unusable = {}
        shards = []
        for drive in drives:
            try:
                shards.append(self._read_record(drive))
            except (DriveError, FormatError) as error:
                if drive not in recorded:
                    raise
                self.unusable[drive] = str(error)
                shards.append(recorded[drive] or shard_record(self._superblock(drive)))
        return EnclosureRecord(
            self._id,
            tuple(DriveRecord(drive, str(self._path(drive))) for drive in drives),
            tuple(shards),
        )

    def replace(self, drive: DriveId) -> Superblock:
        """Create an empty drive in place of a lost drive; return the superblock.

        Raises DriveError if a file exists there, or if there is no room.
        """
        if os.path.lexists(self._path(drive)):
            raise DriveError(f"{self._path(drive)} exists: move the file away before a replacement")
        _create_folder(self._directory)
        self._check_room(1)
        return self._create_drive(drive)

    def count_of_other_size(self) -> int:
        """Return the number of existing drives with a size other than planned."""
        paths = map(self._path, self.drives)
        return sum(path.is_file() and path.stat().st_size != self._geometry.shard_bytes for path in paths)

    def _path(self, drive: DriveId) -> Path:
        return self._directory / f"{drive.rpartition('/')[2]}.img"

    def _check_room(self, missing: int) -> None:
        check_room(self._directory, missing, self._geometry.shard_bytes, "a smaller capacity")

    def _superblock(self, drive: DriveId) -> Superblock:
        return Superblock(
            fabric=self._fabric,
            format_id=secrets.token_bytes(ID_BYTES),
            enclosure=self._id,
            drive=drive,
            shard=shard_id(drive, 0),
            drive_offset=0,
            geometry=self._geometry,
        )

    def _create_drive(self, drive: DriveId) -> Superblock:
        superblock, path = self._superblock(drive), self._path(drive)
        try:
            write_whole(path, encode_superblock(superblock), size_bytes=self._geometry.shard_bytes)
        except OSError as error:
            state, remedy = state_and_remedy(error)
            raise DriveError(
                f"drive {drive} can't be created at {path}: {state}{f'; {remedy}' if remedy else ''}"
            ) from error
        return superblock

    def _read_record(self, drive: DriveId) -> ShardRecord:
        path = self._path(drive)
        try:
            descriptor = open_flash(path, os.O_RDONLY)
        except FlashFileError as error:
            raise DriveError(f"drive {drive} is not usable: {error}") from error
        with os.fdopen(descriptor, "rb") as file:
            try:
                size_bytes = file.seek(0, os.SEEK_END)
                file.seek(0)
                pages = file.read(SUPERBLOCK_COPIES * PAGE_BYTES)
            except OSError as error:
                state, _ = state_and_remedy(error)
                raise DriveError(f"drive {drive} can't be read at {path}: {state}") from error
        try:
            superblock = decode_superblock(pages)
        except FormatError as error:
            raise FormatError(f"{path}: {error} (see `ostraca doctor {path}`)") from error
        self._check_identity(path, superblock, shard_id(drive, 0))
        record = shard_record(superblock)
        if size_bytes < record.offset + record.size_bytes:
            raise FormatError(
                f"{path} has {size_bytes} bytes, less than its shard of {record.size_bytes}, so the file was "
                f"truncated (see `ostraca doctor {path}`)"
            )
        return record

    def _check_identity(self, path: Path, superblock: Superblock, shard: ShardId) -> None:
        if (superblock.fabric, superblock.shard) != (self._fabric, shard):
            raise FormatError(
                f"{path} holds shard {superblock.shard} of fabric {superblock.fabric.hex()}, not {shard} of "
                f"{self._fabric.hex()}: move the file away, or start the other fabric"
            )


def check_room(directory: Path, drives: int, drive_bytes: int, remedy: str) -> None:
    """Check the free space for new drives. Raises DriveError, with *remedy* as advice, and OSError."""
    free = shutil.disk_usage(directory).free
    if drives * drive_bytes > free - _HEADROOM_BYTES:
        raise DriveError(
            f"there is no room for {counted(drives, 'drive')} of {drive_bytes} bytes in {directory}: {free} "
            f"bytes are free, and {_HEADROOM_BYTES // MIB} MiB of them stay free: choose {remedy} or another "
            "directory"
        )


def _create_folder(directory: Path) -> None:
    """Create the folder of drives. Raises DriveError."""
    try:
        make_private_folder(directory)
    except OSError as error:
        state, remedy = state_and_remedy(error)
        raise DriveError(
            f"the folder of drives {directory} can't be created: {state}{f'; {remedy}' if remedy else ''}"
        ) from error
