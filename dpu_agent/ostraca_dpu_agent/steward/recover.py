"""Reading a shard's superblock and summaries from its drive."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.errors import DriveError, FormatError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.flash.geometry import SUPERBLOCK_COPIES
from ostraca_fabric.flash.recovery import recover
from ostraca_fabric.flash.superblock import decode_superblock
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.ports.drive import Pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_fabric.fabric_map import ShardRecord
    from ostraca_fabric.flash.recovery import RecoveredShard
    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.ids import FabricId
    from ostraca_fabric.ports.drive import Drive


log = logging.getLogger(__name__)

_AREAS_AT_ONCE = 256


async def read_shard(
    drive: Drive, record: ShardRecord, fabric: FabricId
) -> tuple[Superblock, RecoveredShard]:
    """Return what lies on flash. Reads superblock and summaries only.

    A segment whose summary area can't be read is taken for one that was never written: its blocks are lost.
    Raises DriveError when the superblock or no summary area at all can be read, and FormatError when what the
    superblock says is not this shard of this fabric.
    """
    superblock = await _superblock(drive, record, fabric)
    geometry = superblock.geometry
    memory = HugeMemory(geometry.segments * geometry.summary_bytes, prefault=False)
    try:
        areas = [
            memory.view[number * geometry.summary_bytes : (number + 1) * geometry.summary_bytes]
            for number in range(geometry.segments)
        ]
        pieces = Pieces(
            memory.array,
            np.arange(geometry.segments) * geometry.summary_bytes,
            np.array(
                [record.offset + geometry.summary_offset(number) for number in range(geometry.segments)]
            ),
            np.full(geometry.segments, geometry.summary_bytes, np.uint32),
        )
        good = await _read(drive, pieces)
        if not good.any():
            message = f"the summaries of shard {record.id} can't be read from {drive.id}"
            raise DriveError(message)
        lost = np.count_nonzero(~good)
        if lost:
            log.warning("%d of %d summaries of shard %s can't be read", lost, len(good), record.id)
        readable = [area if is_read else None for area, is_read in zip(areas, good.tolist(), strict=True)]
        return superblock, await asyncio.to_thread(recover, superblock, readable)
    finally:
        memory.close()


async def _read(drive: Drive, pieces: Pieces) -> NDArray[np.bool_]:
    """Read some at a time, far fewer than a drive's queue holds; then those that failed once more."""
    good = np.zeros(len(pieces), np.bool_)
    for first in range(0, len(pieces), _AREAS_AT_ONCE):
        rows = slice(first, first + _AREAS_AT_ONCE)
        good[rows] = await drive.submit_read(pieces.some(rows))
    for row in np.flatnonzero(~good).tolist():
        rows = slice(row, row + 1)
        good[rows] = await drive.submit_read(pieces.some(rows))
    return good


async def _superblock(drive: Drive, record: ShardRecord, fabric: FabricId) -> Superblock:
    memory = HugeMemory(SUPERBLOCK_COPIES * PAGE_BYTES, prefault=False)
    try:
        pages = memory.array[: SUPERBLOCK_COPIES * PAGE_BYTES]
        (is_read,) = await drive.submit_read(Pieces.one(pages, drive_offset=record.offset))
        if not is_read:
            message = f"the superblock of shard {record.id} can't be read from {drive.id}"
            raise DriveError(message)
        superblock = decode_superblock(pages.tobytes())
    finally:
        memory.close()
    if (superblock.fabric, superblock.shard) != (fabric, record.id):
        raise FormatError(
            f"on {drive.id} at {record.offset} lies shard {superblock.shard} of fabric "
            f"{superblock.fabric.hex()}, where {record.id} of fabric {fabric.hex()} is expected: attach the "
            "right drive, or format this one anew"
        )
    return superblock
