"""Reading a shard's superblock and summaries from its drive, past pages that can't be read.

An I/O that fails is done again page by page, and what a page says that can't be read is lost. After each
failure the superblock is read again. Where that ends well the page is bad, and the drive's breaker, which
counts failures in a row, does not open for it. Where it does not, the drive is, and all ends with a
DriveError. Each bad page is a fault of the drive like any other, so there is an end to them: a drive with
many has failed.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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

_BAD_PAGES_MAX = 8
"""Of what was read in one I/O: behind so many, the rest of it is given up. Each may take a drive long."""

_ENTRIES_AT_ONCE, _SEGMENTS_AT_ONCE = 1024, 32
"""In one slice: about a millisecond's work. A segment is not cut."""


async def read_superblock(drive: Drive, record: ShardRecord, fabric: FabricId) -> Superblock:
    """Return what a shard's superblock says, or its copy where that alone can be read.

    Raises DriveError when neither can be read or the drive falls silent, and FormatError when it is not of
    this shard of this fabric.
    """
    reader = _Reader(drive, record, SUPERBLOCK_COPIES * PAGE_BYTES)
    try:
        pages = reader.memory
        (is_read,) = await reader.read(Pieces.one(pages, drive_offset=record.offset))
        if not is_read and not await _read_either(reader, record, pages):
            message = f"the superblock of shard {record.id} can't be read from {drive.id}"
            raise DriveError(message)
        superblock = decode_superblock(pages.tobytes())
    finally:
        reader.let_go()
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

    What a page says that can't be read is left out, and its segment is named. In the end what was read is
    durable. Raises DriveError then when of a whole shard no page could be read, or the drive can't flush; and
    at once when it falls silent, or reads nothing else either. Close the generator, and only between two of
    its values.
    """
    geometry, spoilt, lost = superblock.geometry, 0, 0
    wanted = np.array(sorted(range(geometry.segments) if segments is None else segments), np.intp)
    at_once = max(1, min(_AREAS_AT_ONCE, _BYTES_AT_ONCE // geometry.summary_bytes, len(wanted)))
    reader = _Reader(drive, record, at_once * geometry.summary_bytes)
    try:
        for first in range(0, len(wanted), at_once):
            numbers = wanted[first : first + at_once]
            areas = reader.memory[: len(numbers) * geometry.summary_bytes].reshape(len(numbers), -1)
            is_bad = await _read_areas(reader, record, superblock, numbers, areas)
            found = await asyncio.to_thread(recover, superblock, numbers, areas)
            unreadable = numbers[is_bad.any(axis=1)].tolist()
            spoilt += len(unreadable)
            lost += int(np.count_nonzero(is_bad.all(axis=1)))
            del areas
            yield replace(found, unreadable=tuple(unreadable))
    finally:
        reader.let_go()
    if segments is None and lost == len(wanted):
        message = f"the summaries of shard {record.id} can't be read from {drive.id}"
        raise DriveError(message)
    if not await _flushed(drive):
        message = f"shard {record.id} can't be served: {drive.id} does not flush its cache"
        raise DriveError(message)
    if spoilt:
        log.warning(
            "%d of %d summaries of shard %s can't be read in whole: blocks that their bad pages alone list "
            "are misses, and %s may be about to fail",
            spoilt,
            len(wanted),
            record.id,
            drive.id,
        )


def in_slices(areas: RecoveredAreas) -> Iterator[RecoveredAreas]:
    """Cut what was recovered into parts that an event loop can take in between two of its turns."""
    for part in _cut(areas.segments):
        yield replace(areas, segments=part, areas=len(part), unreadable=())
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
    """Reads of one shard, which end when its drive falls silent: nobody else's recovery waits for it then."""

    def __init__(self, drive: Drive, record: ShardRecord, size_bytes: int) -> None:
        """Have *size_bytes* of memory to read into."""
        self.drive = drive
        self._record = record
        self._memory = HugeMemory(size_bytes + PAGE_BYTES, prefault=False)
        self._size_bytes = size_bytes
        self._is_left = False

    @property
    def memory(self) -> NDArray[np.uint8]:
        """What may be read into. Hold it no longer than the reader."""
        return self._memory.array[: self._size_bytes]

    async def read(self, pieces: Pieces) -> NDArray[np.bool_]:
        """Read. Raises DriveError when reads are held off; and when the drive is given up, with the read
        still under way.
        """
        if self.drive.refuses_reads:
            message = f"reads of drive {self.drive.id} are held off"
            raise DriveError(message)
        read, given_up = self.drive.submit_read(pieces), self.drive.reads_given_up
        if not await _has_ended(read, given_up):
            self._is_left = True
            message = f"drive {self.drive.id} does not answer"
            raise DriveError(message)
        return read.result()

    async def read_by_page(self, piece: Pieces) -> NDArray[np.bool_]:
        """Read the pages of one piece that could not be read at once; say which are bad. Those are blank.

        Raises DriveError when it is the drive that can't be read.
        """
        (begin,), (offset,), (length,) = piece.memory_offsets, piece.drive_offsets, piece.lengths
        pages = piece.memory[begin : begin + length].reshape(-1, PAGE_BYTES)
        is_bad = np.ones(len(pages), np.bool_)
        await self._see_that_it_reads()
        for number, page in enumerate(pages):
            (is_read,) = await self.read(Pieces.one(page, drive_offset=int(offset) + number * PAGE_BYTES))
            is_bad[number] = not is_read
            if not is_read:
                await self._see_that_it_reads()
                if np.count_nonzero(is_bad[: number + 1]) > _BAD_PAGES_MAX:
                    break
        pages[is_bad] = 0
        return is_bad

    async def _see_that_it_reads(self) -> None:
        """Read one of the superblock's copies again. Raises DriveError when neither can be read."""
        page = self._memory.array[self._size_bytes :][:PAGE_BYTES]
        for begin in range(0, SUPERBLOCK_COPIES * PAGE_BYTES, PAGE_BYTES):
            (is_read,) = await self.read(Pieces.one(page, drive_offset=self._record.offset + begin))
            if is_read:
                return
        message = f"drive {self.drive.id} fails all reads of shard {self._record.id}"
        raise DriveError(message)

    def let_go(self) -> None:
        """Unmap memory that was read into, unless a read may still land there."""
        if self._is_left:
            self._memory.leak()
        else:
            self._memory.close()


async def _read_areas(
    reader: _Reader,
    record: ShardRecord,
    superblock: Superblock,
    numbers: NDArray[np.intp],
    areas: NDArray[np.uint8],
) -> NDArray[np.bool_]:
    """Read of each summary area what it holds into its row of *areas*; say of each page whether it is bad,
    shape (areas, pages of an area).
    """
    geometry, memory = superblock.geometry, areas.reshape(-1)
    memory[:] = 0
    starts = np.array([record.offset + geometry.summary_offset(number) for number in numbers.tolist()])
    is_bad = np.zeros((len(numbers), geometry.summary_pages), np.bool_)
    places_read = np.zeros(len(numbers), np.intp)
    wanted = np.full(len(numbers), min(PLACES_FIRST, geometry.summary_pages), np.intp)
    while (more := np.flatnonzero(wanted > places_read)).size:
        done = places_read[more] * PAGE_BYTES
        lengths = ((wanted[more] - places_read[more]) * PAGE_BYTES).astype(np.uint32)
        pieces = Pieces(memory, more * geometry.summary_bytes + done, starts[more] + done, lengths)
        for piece in np.flatnonzero(~await reader.read(pieces)).tolist():
            row = int(more[piece])
            pages = slice(int(places_read[row]), int(wanted[row]))
            is_bad[row, pages] = await reader.read_by_page(pieces.some(slice(piece, piece + 1)))
        places_read[more] = wanted[more]
        wanted = await asyncio.to_thread(places_wanted, superblock, numbers, areas, places_read)
        wanted[is_bad.any(axis=1)] = geometry.summary_pages  # how many are full, a bad tail does not tell
    return is_bad


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
    may be gone by then, and the next one would have nothing to say of it. All is read again instead. Raises
    DriveError when it is given up, and still under way.
    """
    if not drive.has_volatile_cache:
        return True
    flushed, given_up = drive.submit_flush(), drive.writes_given_up
    if not await _has_ended(flushed, given_up):
        message = f"drive {drive.id} does not answer to a flush"
        raise DriveError(message)
    return flushed.result()


async def _has_ended(operation: asyncio.Future[Any], given_up: asyncio.Future[None] | None) -> bool:
    """Wait until an operation has ended, or its drive gives it up: then it is still under way."""
    either = (operation,) if given_up is None else (operation, given_up)
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    return operation.done()
