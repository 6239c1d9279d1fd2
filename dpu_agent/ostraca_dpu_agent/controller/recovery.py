"""Recovery of a shard's superblock and summaries from its drive, despite bad pages.

A failed I/O is repeated page by page, and the contents of unreadable pages are lost. After each failure the
superblock is read again. Success means a bad page: the drive's circuit breaker counts consecutive failures,
and stays closed. A failure means a bad drive, and ends in a DriveError. Bad pages count as faults of the
drive, so a drive with many bad pages fails in the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import DriveError, FormatError
from ostraca_fabric.flash.recovery import (
    PLACES_FIRST,
    RecoveredAreas,
    RecoveredSegment,
    places_wanted,
    recover,
)
from ostraca_fabric.flash.superblock import Superblock, decode_superblock
from ostraca_fabric.model.extent import PAGE_BYTES, SUPERBLOCK_COPIES, Pieces
from ostraca_fabric.model.fabric_map import ShardRecord
from ostraca_fabric.model.ids import FabricId
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.runtime.memory import HugeMemory

log = logging.getLogger(__name__)

_AREAS_AT_ONCE = 256
"""Far below the length of a drive's queue."""

_BYTES_AT_ONCE = 8 << 20

_BAD_PAGES_MAX = 8
"""Bad pages of one I/O before its remaining pages are given up, since each may take long."""

_ENTRIES_AT_ONCE, _SEGMENTS_AT_ONCE = 1024, 32
"""Limits of a slice: about a millisecond's work. Segments are not divided."""


async def read_superblock(drive: Drive, record: ShardRecord, fabric: FabricId) -> Superblock:
    """Return a shard's superblock, from either copy.

    Raises DriveError if neither copy is readable or the drive falls silent, and FormatError for the
    superblock of another shard or fabric.
    """
    reader = _Reader(drive, record, SUPERBLOCK_COPIES * PAGE_BYTES)
    try:
        pages = reader.memory
        (is_read,) = await reader.read(Pieces.one(pages, drive_offset=record.offset))
        if not is_read and not await _read_either(reader, record, pages):
            raise DriveError(f"the superblock of shard {record.id} can't be read from {drive.id}")
        superblock = decode_superblock(pages.tobytes())
    finally:
        reader.release()
    if (superblock.fabric, superblock.shard) != (fabric, record.id):
        raise FormatError(
            f"drive {drive.id} holds shard {superblock.shard} of fabric {superblock.fabric.hex()} at "
            f"{record.offset}, not {record.id} of fabric {fabric.hex()}: attach the right drive, or format "
            "this drive again"
        )
    return superblock


async def read_summaries(
    drive: Drive, record: ShardRecord, superblock: Superblock, segments: Iterable[int] | None = None
) -> AsyncGenerator[RecoveredAreas, None]:
    """Yield the contents of a shard's summary areas, or only of *segments*, in a few MiB of memory.

    Contents of unreadable pages are left out, and their segments are listed. At the end the contents are
    durable. Raises DriveError at the end if no page of a whole shard was readable, or if the drive can't
    flush. Raises DriveError at once if the drive falls silent, or fails other reads too. Close the generator,
    but only between two values.
    """
    geometry, damaged, lost = superblock.geometry, 0, 0
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
            damaged += len(unreadable)
            lost += int(np.count_nonzero(is_bad.all(axis=1)))
            del areas
            yield replace(found, unreadable=tuple(unreadable))
    finally:
        reader.release()
    if segments is None and lost == len(wanted):
        raise DriveError(f"the summaries of shard {record.id} can't be read from {drive.id}")
    if not await _flush(drive):
        raise DriveError(f"shard {record.id} can't be served: drive {drive.id} fails to flush its cache")
    if damaged:
        log.warning(
            "%d of %d summaries of shard %s have bad pages, whose blocks are lost (misses): "
            "drive %s may be about to fail",
            damaged,
            len(wanted),
            record.id,
            drive.id,
        )


async def read_slices(
    drive: Drive, record: ShardRecord, superblock: Superblock, segments: Iterable[int] | None = None
) -> AsyncGenerator[RecoveredAreas, None]:
    """Yield the values of ``read_summaries`` in slices, with a pause of the event loop's turn after each."""
    async with aclosing(read_summaries(drive, record, superblock, segments)) as parts:
        async for part in parts:
            for areas in in_slices(part):
                yield areas
                await asyncio.sleep(0)


def in_slices(areas: RecoveredAreas) -> Iterator[RecoveredAreas]:
    """Divide recovered contents into parts of about a millisecond's work."""
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
    """Reads of one shard. A read ends when the drive falls silent, so that no other recovery waits."""

    def __init__(self, drive: Drive, record: ShardRecord, size_bytes: int) -> None:
        """Allocate *size_bytes* of memory for reads."""
        self.drive = drive
        self._record = record
        self._memory = HugeMemory(size_bytes + PAGE_BYTES, prefault=False)
        self._size_bytes = size_bytes
        self._has_pending_read = False

    @property
    def memory(self) -> NDArray[np.uint8]:
        """Target memory of reads. Use no longer than the reader."""
        return self._memory.array[: self._size_bytes]

    async def read(self, pieces: Pieces) -> NDArray[np.bool_]:
        """Read pieces; return success per piece.

        Raises DriveError while reads of the drive are suspended. Raises DriveError also if the drive falls
        silent, with the read still under way.
        """
        if self.drive.refuses_reads:
            raise DriveError(f"reads of drive {self.drive.id} are suspended")
        read, gave_up = self.drive.submit_read(pieces), self.drive.reads_given_up
        if not await _ends(read, gave_up):
            self._has_pending_read = True
            raise DriveError(f"drive {self.drive.id} does not answer")
        return read.result()

    async def read_by_page(self, piece: Pieces) -> NDArray[np.bool_]:
        """Read the pages of a failed piece; return the bad pages, zeroed.

        Raises DriveError if the whole drive fails reads.
        """
        (begin,), (offset,), (length,) = piece.memory_offsets, piece.drive_offsets, piece.lengths
        pages = piece.memory[begin : begin + length].reshape(-1, PAGE_BYTES)
        is_bad = np.ones(len(pages), np.bool_)
        await self._check_drive_reads()
        for number, page in enumerate(pages):
            (is_read,) = await self.read(Pieces.one(page, drive_offset=int(offset) + number * PAGE_BYTES))
            is_bad[number] = not is_read
            if not is_read:
                await self._check_drive_reads()
                if np.count_nonzero(is_bad[: number + 1]) > _BAD_PAGES_MAX:
                    break
        pages[is_bad] = 0
        return is_bad

    async def _check_drive_reads(self) -> None:
        """Read the superblock again. Raises DriveError if neither copy is readable."""
        page = self._memory.array[self._size_bytes :][:PAGE_BYTES]
        for begin in range(0, SUPERBLOCK_COPIES * PAGE_BYTES, PAGE_BYTES):
            (is_read,) = await self.read(Pieces.one(page, drive_offset=self._record.offset + begin))
            if is_read:
                return
        raise DriveError(f"drive {self.drive.id} fails all reads of shard {self._record.id}")

    def release(self) -> None:
        """Unmap the memory, unless a read may still land there."""
        self._memory.end(is_quiet=not self._has_pending_read)


async def _read_areas(
    reader: _Reader,
    record: ShardRecord,
    superblock: Superblock,
    numbers: NDArray[np.intp],
    areas: NDArray[np.uint8],
) -> NDArray[np.bool_]:
    """Read the used pages of summary areas into rows of *areas*.

    Returns the bad pages, shape (areas, pages of an area).
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
        wanted[is_bad.any(axis=1)] = geometry.summary_pages  # a bad last page hides the number of full pages
    return is_bad


async def _read_either(reader: _Reader, record: ShardRecord, pages: NDArray[np.uint8]) -> bool:
    """Read each copy of the superblock alone, zeroed if unreadable; return whether any was readable."""
    good = []
    for begin in range(0, len(pages), PAGE_BYTES):
        page = pages[begin : begin + PAGE_BYTES]
        (is_read,) = await reader.read(Pieces.one(page, drive_offset=record.offset + begin))
        if not is_read:
            page[:] = 0
        good.append(bool(is_read))
    return any(good)


async def _flush(drive: Drive) -> bool:
    """Flush the drive, to make unflushed writes of an earlier owner durable; return success.

    A power cut must not remove recovered blocks. A failed flush is not repeated: the cache may have lost its
    data, and a second flush would not report the loss. The caller reads all summaries again instead. Raises
    DriveError if the drive falls silent, with the flush still under way.
    """
    if not drive.has_volatile_cache:
        return True
    flush, gave_up = drive.submit_flush(), drive.writes_given_up
    if not await _ends(flush, gave_up):
        raise DriveError(f"drive {drive.id} does not answer a flush")
    return flush.result()


async def _ends(operation: asyncio.Future[Any], gave_up: asyncio.Future[None] | None) -> bool:
    """Wait for an operation; return False if the drive fell silent before the end."""
    either = (operation,) if gave_up is None else (operation, gave_up)
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    return operation.done()
