"""Formatting one shard anew: the only thing `ostraca doctor` writes, and only when its shard is named.

A new format id makes every summary page of before another shard's, so nothing else has to be written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from dataclasses import replace
from typing import TYPE_CHECKING

from ostraca.cli.doctor.drives import DriveFile, Home
from ostraca.cli.doctor.examine import SUPERBLOCK_BYTES, shards_of
from ostraca.cli.state import locked
from ostraca_fabric.errors import DriveError, FormatError, UsageError
from ostraca_fabric.flash.geometry import Geometry, segment_bytes_for
from ostraca_fabric.flash.superblock import CopyState, Superblock, chosen_copy, encode_superblock
from ostraca_fabric.ids import ID_BYTES, drive_of, enclosure_of

if TYPE_CHECKING:
    from pathlib import Path

    from ostraca.cli.doctor.examine import Copies
    from ostraca_fabric.ids import ShardId

_ANOTHERS = frozenset({CopyState.FOREIGN, CopyState.NEWER})


def format_shard(path: Path, named: str) -> Superblock:
    """Empty the shard *named* on a drive, by a superblock with a new format id; return that.

    Identity and measures stay as the superblock has them. Where it is damaged, blank, older or senseless,
    they are what the fabric in whose directory the drive lies would give it. Raises UsageError when another
    shard is here than the one named, FormatError when the drive may be somebody else's, MembershipError while
    a fabric runs in the directory, and DriveError when the drive can't be written.
    """
    home = Home.of(path)
    with contextlib.ExitStack() as stack:
        if home is not None:
            stack.enter_context(locked(home.directory))
        try:
            with DriveFile(path) as drive:
                planned = _planned(path, named, drive, home)
            made = replace(planned, format_id=secrets.token_bytes(ID_BYTES))
            _write(path, made)
        except OSError as error:
            raise DriveError(f"{path} can't be formatted: {error.strerror}") from error
    return made


def _planned(path: Path, named: str, drive: DriveFile, home: Home | None) -> Superblock:
    """Say what to write, but for the format id."""
    here: list[str] = []
    for offset, copies in shards_of(drive):
        superblock = chosen_copy(copies).superblock
        if superblock is None and not offset:
            return _of_home(path, named, drive.size_bytes, home, copies)
        if superblock is None or superblock.drive_offset != offset:
            continue
        here.append(superblock.shard)
        if superblock.shard == named:
            if offset + superblock.geometry.shard_bytes > drive.size_bytes:
                raise FormatError(f"{path} ends before its shard does: restore its size first")
            return superblock
    raise UsageError(
        f"{path} holds {' and '.join(here) or 'no shard at its place'}, not {named}: nothing was written. "
        "Name the shard that is to be emptied"
    )


def _of_home(path: Path, named: str, size_bytes: int, home: Home | None, copies: Copies) -> Superblock:
    """Plan the shard of a drive whose superblock can't be used, from its fabric's record."""
    for copy in copies:
        if copy.state in _ANOTHERS:
            raise FormatError(f"{path}: {copy.why}. Nothing was written")
    wanted: ShardId | None = home.shard_at(path) if home is not None else None
    if home is None or home.fabric is None or home.shape is None or wanted is None:
        raise FormatError(
            f"{path} has no good superblock and is no drive of a fabric's directory, so nothing says what to "
            "format it as; nothing was written"
        )
    if wanted != named:
        raise UsageError(f"on {path} belongs {wanted}, not {named}: nothing was written")
    if size_bytes != home.shape.drive_bytes:
        raise FormatError(
            f"{path} has {size_bytes} bytes, and the fabric's drives have {home.shape.drive_bytes}: remove "
            "it, and `ostraca up` makes a new one; nothing was written"
        )
    geometry = Geometry.planned(size_bytes, segment_bytes=segment_bytes_for(size_bytes))
    drive = drive_of(wanted)
    return Superblock(home.fabric, bytes(ID_BYTES), enclosure_of(wanted), drive, wanted, 0, geometry)


def _write(path: Path, superblock: Superblock) -> None:
    # Of a block device that is mounted or otherwise in use, O_EXCL makes the kernel refuse it.
    is_device = stat.S_ISBLK(path.stat().st_mode)
    flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_EXCL if is_device else 0)
    descriptor = os.open(path, flags)
    try:
        written = os.pwrite(descriptor, encode_superblock(superblock), superblock.drive_offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if written != SUPERBLOCK_BYTES:
        raise DriveError(f"{path} took {written} of {SUPERBLOCK_BYTES} bytes: format it again")
