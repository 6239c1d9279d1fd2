"""Reading a shard's superblock and summaries from its drive."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.errors import DriveError, FormatError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.flash.geometry import SUPERBLOCK_COPIES
from ostraca_fabric.flash.recovery import PLACES_FIRST, places_wanted, recover
from ostraca_fabric.flash.superblock import decode_superblock
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.ports.drive import Pieces

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator

    from numpy.typing import NDArray

    from ostraca_fabric.fabric_map import ShardRecord
    from ostraca_fabric.flash.recovery import RecoveredAreas, RecoveredSegment
    from ostraca_fabric.flash.superblock import Superblock
    from ostraca_fabric.ids import FabricId
    from ostraca_fabric.ports.drive import Drive


log = logging.getLogger(__name__)

_AREAS_AT_ONCE = 256
"""Far fewer than a drive's queue holds."""

_BYTES_AT_ONCE = 8 << 20

_ENTRIES_AT_ONCE, _SEGMENTS_AT_ONCE = 1024, 32
"""In one slice: about a millisecond's work. A segment is not cut."""


async def read_superblock(drive: Drive, record: ShardRecord, fabric: FabricId) -> Superblock:
    """Return what a shard's superblock says, or its copy where that alone can be read.

    Raises DriveError when neither can be read or the drive falls silent, and FormatError when it is not of
    this shard of this fabric.
    """
    memory, reader = HugeMemory(SUPERBLOCK_COPIES * PAGE_BYTES, prefault=False), _Reader(drive)
    try:
        pages = memory.array[: SUPERBLOCK_COPIES * PAGE_BYTES]
        (is_read,) = await reader.read(Pieces.one(pages, drive_offset=record.offset))
        if not is_read and not await _read_either(reader, record, pages):
            message = f"the superblock of shard {record.id} can't be read from {drive.id}"
            raise DriveError(message)
        superblock = decode_superblock(pages.tobytes())
    finally:
        reader.let_go(memory)
    if (superblock.fabric, superblock.shard) != (fabric, record.id):
        raise FormatError(
            f"on {drive.id} at {record.offset} lies shard {superblock.shard} of fabric "
            f"{superblock.fabric.hex()}, where {record.id} of fabric {fabric.hex()} is expected: attach the "
            "right drive, or format this one anew"
        )
    return superblock


async def read_summaries(
    drive: Drive, record: ShardRecord, superblock: Superblock, segments: Iterable[int] | None = None
) -> AsyncGenerator[RecoveredAreas, None]:
    """Yield what the summary areas of a shard say, or of these *segments* of it, some at a time, in a few MiB
    of memory.

    A segment whose summary area can't be read is left out: its blocks are lost. In the end what was read is
    durable. Raises DriveError then when none could be read, or the drive can't flush; and at once when it
    falls silent. Close the generator, and only between two of its values.
    """
    geometry, lost = superblock.geometry, 0
    wanted = np.array(sorted(range(geometry.segments) if segments is None else segments), np.intp)
    at_once = max(1, min(_AREAS_AT_ONCE, _BYTES_AT_ONCE // geometry.summary_bytes, len(wanted)))
    memory, reader = HugeMemory(at_once * geometry.summary_bytes, prefault=False), _Reader(drive)
    try:
        for first in range(0, len(wanted), at_once):
            numbers = wanted[first : first + at_once]
            areas = memory.array[: len(numbers) * geometry.summary_bytes].reshape(len(numbers), -1)
            good = await _read_areas(reader, record, superblock, numbers, areas)
            lost += len(good) - int(np.count_nonzero(good))
            if good.all():
                yield await asyncio.to_thread(recover, superblock, numbers, areas)
            elif good.any():
                yield await asyncio.to_thread(recover, superblock, numbers[good], areas[good])
            del areas
    finally:
        reader.let_go(memory)
    if lost == len(wanted) > 0:
        message = f"the summaries of shard {record.id} can't be read from {drive.id}"
        raise DriveError(message)
    if not await _flushed(drive):
        message = f"shard {record.id} can't be served: {drive.id} does not flush its cache"
        raise DriveError(message)
    if lost:
        log.warning("%d of %d summaries of shard %s can't be read", lost, len(wanted), record.id)


def in_slices(areas: RecoveredAreas) -> Iterator[RecoveredAreas]:
    """Cut what was recovered into parts that an event loop can take in between two of its turns."""
    for part in _cut(areas.segments):
        yield replace(areas, segments=part, areas=len(part))
    yield replace(areas, segments=(), areas=areas.areas - len(areas.segments))


def _cut(segments: tuple[RecoveredSegment, ...]) -> Iterator[tuple[RecoveredSegment, ...]]:
    part: list[RecoveredSegment] = []
    entries = 0
    for segment in segments:
        if part and (entries + len(segment.entries) > _ENTRIES_AT_ONCE or len(part) == _SEGMENTS_AT_ONCE):
            yield tuple(part)
            part, entries = [], 0
        part.append(segment)
        entries += len(segment.entries)
    if part:
        yield tuple(part)


class _Reader:
    """Reads of one drive, which end when it falls silent: nobody else's recovery waits for it then."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self._is_left = False

    async def read(self, pieces: Pieces) -> NDArray[np.bool_]:
        """Read. Raises DriveError when the drive is given up, with the read still under way."""
        read, given_up = self.drive.submit_read(pieces), self.drive.given_up
        if given_up is not None:
            await asyncio.wait((read, given_up), return_when=asyncio.FIRST_COMPLETED)
            if not read.done():
                self._is_left = True
                message = f"drive {self.drive.id} does not answer"
                raise DriveError(message)
        return await read

    def let_go(self, memory: HugeMemory) -> None:
        """Unmap memory that was read into, unless a read may still land there."""
        if self._is_left:
            memory.leak()
        else:
            memory.close()


async def _read_areas(
    reader: _Reader,
    record: ShardRecord,
    superblock: Superblock,
    numbers: NDArray[np.intp],
    areas: NDArray[np.uint8],
) -> NDArray[np.bool_]:
    """Read of each summary area what it holds into its row of *areas*; say which could be read."""
    geometry, memory = superblock.geometry, areas.reshape(-1)
    memory[:] = 0
    starts = np.array([record.offset + geometry.summary_offset(number) for number in numbers.tolist()])
    good = np.ones(len(numbers), np.bool_)
    places_read = np.zeros(len(numbers), np.intp)
    wanted = np.full(len(numbers), min(PLACES_FIRST, geometry.summary_pages), np.intp)
    while (more := np.flatnonzero(good & (wanted > places_read))).size:
        done = places_read[more] * PAGE_BYTES
        lengths = ((wanted[more] - places_read[more]) * PAGE_BYTES).astype(np.uint32)
        pieces = Pieces(memory, more * geometry.summary_bytes + done, starts[more] + done, lengths)
        good[more] = await _read(reader, pieces)
        places_read[more] = wanted[more]
        wanted = await asyncio.to_thread(places_wanted, superblock, numbers, areas, places_read)
    return good


async def _read(reader: _Reader, pieces: Pieces) -> NDArray[np.bool_]:
    """Read, and then those that failed once more."""
    good = (await reader.read(pieces)).copy()
    for row in np.flatnonzero(~good).tolist():
        rows = slice(row, row + 1)
        good[rows] = await reader.read(pieces.some(rows))
    return good


async def _read_either(reader: _Reader, record: ShardRecord, pages: NDArray[np.uint8]) -> bool:
    """Read each copy of the superblock by itself; one that can't be read is blank. Say whether any was."""
    good = []
    for begin in range(0, len(pages), PAGE_BYTES):
        page = pages[begin : begin + PAGE_BYTES]
        (is_read,) = await reader.read(Pieces.one(page, drive_offset=record.offset + begin))
        if not is_read:
            page[:] = 0
        good.append(bool(is_read))
    return any(good)


async def _flushed(drive: Drive) -> bool:
    """Make durable what an owner before this one has written, and did not live to flush.

    It was found, and a power cut must not take it. A flush that fails is not tried again: what the cache held
    may be gone by then, and the next one would have nothing to say of it. All is read again instead.
    """
    return not drive.has_volatile_cache or await drive.submit_flush()
