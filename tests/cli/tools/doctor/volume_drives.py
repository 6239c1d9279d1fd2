"""Drives as files, with volumes recorded as by a shard's owner."""

from __future__ import annotations

from pathlib import Path

from ostraca_fabric.flash.superblock import decode_superblock
from ostraca_fabric.flash.volume_records import copy_bytes, copy_offset, encode_volumes
from ostraca_fabric.model.ids import OwnerEpoch
from ostraca_fabric.model.volume import VolumeRecord


def record_volumes(path: Path, *volumes: VolumeRecord) -> None:
    """Write the first copy of the records, in place of its content."""
    superblock = decode_superblock(path.read_bytes()[:8192])
    room = copy_bytes(superblock.geometry)
    with path.open("r+b") as file:
        file.seek(copy_offset(superblock.geometry, 0))
        file.write(encode_volumes(superblock.identity, room, volumes, epoch=OwnerEpoch(1), sequence=1))
