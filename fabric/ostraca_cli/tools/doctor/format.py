"""Format a named shard, the only write of `ostraca doctor`.

A new format id invalidates every earlier summary page, so that no other write is needed. In a fabric's
directory, formatting also creates a missing drive, as a deliberate replacement.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from dataclasses import replace
from pathlib import Path

from ostraca_cli.composition.state import lock_directory
from ostraca_cli.tools.doctor.drives import DriveFile, FabricDirectory
from ostraca_cli.tools.doctor.examine import SUPERBLOCK_BYTES, Copies, shards_of
from ostraca_enclosure.files import FileEnclosure
from ostraca_fabric.drives.flash_files import open_flash
from ostraca_fabric.errors import DriveError, FormatError, UsageError
from ostraca_fabric.flash.superblock import CopyState, Superblock, chosen_copy, encode_superblock
from ostraca_fabric.model.extent import Geometry, segment_bytes_for
from ostraca_fabric.model.ids import ID_BYTES, ShardId, drive_of, enclosure_of
from ostraca_fabric.runtime.os_errors import explained

_FOREIGN_STATES = frozenset({CopyState.FOREIGN, CopyState.NEWER})


def format_shard(path: Path, named: str) -> Superblock:
    """Empty the shard *named* by writing a superblock with a new format id.

    Returns the new superblock. Creates an empty drive if missing from a fabric's directory. Identity and
    geometry stay as in the superblock. If the superblock is damaged, blank, older or implausible, both follow
    from the fabric in whose directory the drive lies.

    Raises UsageError if the drive holds a shard other than *named*, and FormatError if the drive may belong
    to other software. Raises MembershipError while a fabric runs in the directory, and DriveError on failed
    writes.
    """
    home = FabricDirectory.of(path)
    with contextlib.ExitStack() as stack:
        if home is not None:
            stack.enter_context(lock_directory(home.directory))
            if not os.path.lexists(path):
                return _create_drive(path, named, home)
        try:
            with DriveFile(path) as drive:
                planned = _plan_superblock(path, named, drive, home)
            made = replace(planned, format_id=secrets.token_bytes(ID_BYTES))
            _write(path, made)
        except OSError as error:
            raise DriveError(f"{path} can't be formatted: {explained(error)}") from error
    return made


def _create_drive(path: Path, named: str, home: FabricDirectory) -> Superblock:
    """Create a missing drive."""
    wanted = home.shard_at(path)
    if home.fabric is None or home.shape is None:
        raise FormatError(f"{path} was not created: the fabric's record can't be read: {home.problem}")
    if wanted != named:
        raise UsageError(
            f"{path} is the place of {wanted or 'no shard'}, not of {named}: no drive was created"
        )
    drive, enclosure = drive_of(wanted), enclosure_of(wanted)
    shelf = FileEnclosure(
        enclosure,
        home.directory / enclosure,
        fabric=home.fabric,
        drives=home.shape.drives,
        drive_bytes=home.shape.drive_bytes,
    )
    return shelf.replace(drive)


def _plan_superblock(path: Path, named: str, drive: DriveFile, home: FabricDirectory | None) -> Superblock:
    """Return the superblock to write, apart from the format id."""
    here: list[str] = []
    for offset, copies in shards_of(drive):
        superblock = chosen_copy(copies).superblock
        if superblock is None and not offset:
            return _plan_from_record(path, named, drive.size_bytes, home, copies)
        if superblock is None or superblock.drive_offset != offset:
            continue
        here.append(superblock.shard)
        if superblock.shard == named:
            if offset + superblock.geometry.shard_bytes > drive.size_bytes:
                raise FormatError(
                    f"{path} ends before the end of its shard: restore the size, or move the drive "
                    "away and run the command again"
                )
            return superblock
    raise UsageError(
        f"{path} holds {' and '.join(here) or 'no shard at its place'}, not {named}: nothing was "
        "written. Name the shard to empty"
    )


def _plan_from_record(
    path: Path, named: str, size_bytes: int, home: FabricDirectory | None, copies: Copies
) -> Superblock:
    """Plan the shard of a drive without a usable superblock, from the fabric's record."""
    for copy in copies:
        if copy.state in _FOREIGN_STATES:
            raise FormatError(
                f"{path}: {copy.why}. Nothing was written. Move the drive away and run the command "
                "again, to create an empty drive in its place"
            )
    wanted: ShardId | None = home.shard_at(path) if home is not None else None
    if home is None or home.fabric is None or home.shape is None or wanted is None:
        raise FormatError(
            f"{path} has no good superblock and is no drive of a fabric's directory: the shard to "
            "format is unknown. Nothing was written"
        )
    if wanted != named:
        raise UsageError(f"{path} is the place of {wanted}, not of {named}: nothing was written")
    if size_bytes != home.shape.drive_bytes:
        raise FormatError(
            f"{path} has {size_bytes} bytes, and the fabric's drives have {home.shape.drive_bytes}. "
            "Nothing was written. Move the drive away and run the command again, to create a new "
            "drive"
        )
    geometry = Geometry.planned(size_bytes, segment_bytes=segment_bytes_for(size_bytes))
    drive = drive_of(wanted)
    return Superblock(home.fabric, bytes(ID_BYTES), enclosure_of(wanted), drive, wanted, 0, geometry)


def _write(path: Path, superblock: Superblock) -> None:
    # O_EXCL makes the kernel refuse a block device that is mounted or otherwise in use.
    is_device = stat.S_ISBLK(path.stat().st_mode)
    descriptor = open_flash(path, os.O_WRONLY | (os.O_EXCL if is_device else 0))
    try:
        written = os.pwrite(descriptor, encode_superblock(superblock), superblock.drive_offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if written != SUPERBLOCK_BYTES:
        raise DriveError(f"{path} took {written} of {SUPERBLOCK_BYTES} bytes: format the shard again")
