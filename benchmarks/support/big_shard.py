"""Shard of a terabyte in a sparse file, with superblock and summaries only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.support.full_index import keys_from

from ostraca_fabric.flash.summary import SummaryLog, entries_of
from ostraca_fabric.flash.superblock import Superblock, encode_superblock
from ostraca_fabric.model.extent import FIRST_SEGMENT_OFFSET, SEGMENT_BYTES, Geometry, generation
from ostraca_fabric.model.fabric_map import DriveRecord, EnclosureRecord, ShardRecord
from ostraca_fabric.model.ids import EnclosureId, FabricId, OwnerEpoch, drive_id, shard_id

if TYPE_CHECKING:
    from pathlib import Path

FABRIC = FabricId(bytes(16))
BLOCK_BYTES = 2 << 20
_ENCLOSURE = EnclosureId("enclosure")
_DRIVE = drive_id(_ENCLOSURE, "drive")
_SHARD = shard_id(_DRIVE, 0)
_EPOCH = OwnerEpoch(3)
_EMPTY_SEGMENTS = 4


@dataclass(frozen=True, slots=True)
class BigShard:
    """Formatted shard of *blocks* blocks, with unwritten data areas."""

    path: Path
    blocks: int
    geometry: Geometry

    @classmethod
    def made(cls, path: Path, blocks: int) -> BigShard:
        """Create the file.

        All segments but a few are full of blocks: without free segments, an owner would evict the oldest.
        """
        per_segment = (SEGMENT_BYTES - FIRST_SEGMENT_OFFSET) // BLOCK_BYTES
        segments = -(-blocks // per_segment)
        shard_bytes = FIRST_SEGMENT_OFFSET + (segments + _EMPTY_SEGMENTS) * SEGMENT_BYTES
        geometry = Geometry.planned(shard_bytes, block_bytes=BLOCK_BYTES)
        superblock = Superblock(FABRIC, bytes(16), _ENCLOSURE, _DRIVE, _SHARD, 0, geometry)
        with path.open("wb") as file:
            file.truncate(shard_bytes)
            os.pwrite(file.fileno(), encode_superblock(superblock), 0)
            for segment in range(segments):
                log = SummaryLog(
                    geometry,
                    superblock.identity,
                    segment,
                    generation(epoch=_EPOCH, count=segment + 1),
                    _EPOCH,
                )
                first = segment * per_segment
                keys = keys_from(first, min(per_segment, blocks - first))
                places = np.arange(len(keys), dtype=np.uint64) * np.uint64(BLOCK_BYTES)
                offsets = places + np.uint64(geometry.data_offset(segment))
                entries = entries_of(
                    keys, keys[:, ::-1], places, offsets, np.full(len(keys), BLOCK_BYTES, np.uint32)
                )
                for offset, pages in (*log.opening(), *log.append(entries)):
                    os.pwrite(file.fileno(), pages, offset)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return cls(path, blocks, geometry)

    def record(self) -> EnclosureRecord:
        """Describe an enclosure with this shard alone."""
        size_bytes = self.geometry.shard_bytes
        shard = ShardRecord(_SHARD, _DRIVE, 0, size_bytes, weight=size_bytes)
        return EnclosureRecord(_ENCLOSURE, (DriveRecord(_DRIVE, str(self.path)),), (shard,))
