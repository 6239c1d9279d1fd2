"""Positions on flash: pages, generations, the geometry of a shard, and pieces of a drive.

A *generation* numbers one use of a segment: the owner's epoch and a count, packed as ``epoch << 32 | count``.
Generations compare in order of assignment and fit a numpy column; the lowest is the oldest. Generation 0
means "never written".

Geometry of a shard::

    0      superblock
    4096   its copy
    1 MiB  segment 0: summary area | data area
           segment 1: ...

A summary area holds two tail slots, then one place for each full summary page. All positions are fixed at
format time. Between the superblock's copy and segment 0 lie two copies of the volume records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import UsageError

PAGE_BYTES = 4096
"""Unit of addresses and alignment on flash: summary pages, extents and I/O are multiples of a page."""

Generation = NewType("Generation", int)

_COUNT_BITS = 32


def generation(*, epoch: int, count: int) -> Generation:
    """Pack an owner epoch and a segment count; both must fit 32 bits."""
    if not (0 <= epoch < 1 << _COUNT_BITS and 0 <= count < 1 << _COUNT_BITS):
        raise OverflowError(f"generation out of range: epoch {epoch}, count {count}")
    return Generation(epoch << _COUNT_BITS | count)


def generation_parts(packed: Generation) -> tuple[int, int]:
    """Return (epoch, count)."""
    return packed >> _COUNT_BITS, packed & ((1 << _COUNT_BITS) - 1)


_PAGE_END = np.uint32(PAGE_BYTES - 1)


def rounded_up(length_bytes: int, multiple: int = PAGE_BYTES) -> int:
    """Return the least multiple of *multiple* that holds *length_bytes*."""
    return -(-length_bytes // multiple) * multiple


def whole_pages(lengths: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the bytes on flash of blocks of these *lengths*, each far below 4 GiB."""
    pages: NDArray[np.uint32] = (lengths + _PAGE_END) & ~_PAGE_END
    return pages


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Places of blocks on flash: columns of shape (n,), zero for blocks not found."""

    offsets: NDArray[np.uint64]
    """In the shard, in bytes."""

    lengths: NDArray[np.uint32]
    """Bytes of the blocks; on flash they take whole pages."""

    generations: NDArray[np.uint64]
    tags: NDArray[np.uint8]
    """Shape (n, 16)."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of a drive and of memory, for reads or writes: columns of shape (n,).

    A piece that begins at the end of the previous piece shares an I/O with the previous piece: pass pieces in
    drive order. Memory begins at a page; offsets and lengths are multiples of 4096. The columns must not
    change until the operation has ended.
    """

    memory: NDArray[np.uint8]
    """Flat array. The memory must stay mapped until the operation has ended."""

    memory_offsets: NDArray[np.int64]
    drive_offsets: NDArray[np.int64]
    lengths: NDArray[np.uint32]

    @classmethod
    def one(cls, memory: NDArray[np.uint8], *, drive_offset: int) -> Pieces:
        """Return a single piece that covers all of *memory*."""
        lengths = np.array([memory.nbytes], np.uint32)
        return cls(memory, np.zeros(1, np.int64), np.array([drive_offset], np.int64), lengths)

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        """Return one or more parts behind each other, all of one memory."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            parts[0].memory,
            np.concatenate([part.memory_offsets for part in parts]),
            np.concatenate([part.drive_offsets for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )

    def __len__(self) -> int:
        """Count the pieces."""
        return len(self.lengths)

    def some(self, rows: slice | NDArray[np.intp]) -> Pieces:
        """Return some of the pieces."""
        return Pieces(self.memory, self.memory_offsets[rows], self.drive_offsets[rows], self.lengths[rows])

    def check(self) -> None:
        """Assert that the columns describe whole pages.

        The check costs a few microseconds, so drives always run it.
        """
        offsets, lengths = self.drive_offsets, self.lengths
        assert len(self.memory_offsets) == len(offsets) == len(lengths), "columns of one length"
        assert self.memory_offsets.dtype == offsets.dtype == np.int64, "offsets are i64"
        assert lengths.dtype == np.uint32, "lengths are u32"
        assert self.memory.dtype == np.uint8, "memory is bytes"
        whole = (self.memory_offsets | offsets | lengths) % PAGE_BYTES
        assert not whole.any(), "pieces begin at a page, of memory and of the drive, and are whole pages"


MIB = 1 << 20
SUPERBLOCK_COPIES = 2
TAIL_SLOTS = 2
ENTRIES_PER_PAGE = 50
SEGMENT_BYTES = 64 * MIB
SEGMENT_BYTES_MIN = MIB
SEGMENT_BYTES_MAX = 256 * MIB
SEGMENTS_MIN = 2
SEGMENTS_WANTED = 8
SHARD_BYTES_MAX = PAGE_BYTES << 32
BLOCK_BYTES_EXPECTED = 64 << 10
FIRST_SEGMENT_OFFSET = MIB
SHARD_BYTES_MIN = FIRST_SEGMENT_OFFSET + SEGMENTS_MIN * SEGMENT_BYTES_MIN


def segment_bytes_for(shard_bytes: int) -> int:
    """Return the default segment size of a shard: 64 MiB, or less if few would fit.

    A ring of few segments loses much with each eviction; a smaller segment holds only smaller blocks.
    """
    chosen = SEGMENT_BYTES
    while chosen > SEGMENT_BYTES_MIN and (shard_bytes - FIRST_SEGMENT_OFFSET) // chosen < SEGMENTS_WANTED:
        chosen //= 2
    return chosen


@dataclass(frozen=True, slots=True)
class Geometry:
    """Measures of one shard. Raises UsageError if the measures do not fit together."""

    shard_bytes: int
    segment_bytes: int
    segments: int
    summary_pages: int
    """Pages of a segment's summary area: two tail slots and a place for each full page."""

    first_segment_offset: int = FIRST_SEGMENT_OFFSET

    def __post_init__(self) -> None:
        """Refuse measures that do not fit together."""
        if not SEGMENT_BYTES_MIN <= self.segment_bytes <= SEGMENT_BYTES_MAX or self.segment_bytes % MIB:
            raise UsageError(f"a segment has whole MiB, 1 to 256, not {self.segment_bytes} bytes")
        if self.segments < SEGMENTS_MIN:
            needed = FIRST_SEGMENT_OFFSET + SEGMENTS_MIN * self.segment_bytes
            raise UsageError(
                f"{self.shard_bytes} bytes hold {self.segments} segments of {self.segment_bytes}, and one "
                f"needs {SEGMENTS_MIN}: give it at least {needed} bytes, or take smaller segments"
            )
        if (
            self.first_segment_offset < SUPERBLOCK_COPIES * PAGE_BYTES
            or self.first_segment_offset % PAGE_BYTES
        ):
            raise UsageError(f"segment 0 can't begin at byte {self.first_segment_offset}")
        if self.first_segment_offset + self.segments * self.segment_bytes > self.shard_bytes:
            raise UsageError(
                f"{self.segments} segments of {self.segment_bytes} bytes reach beyond {self.shard_bytes}"
            )
        if self.shard_bytes > SHARD_BYTES_MAX:
            raise UsageError(
                f"a shard has at most {SHARD_BYTES_MAX} bytes, not {self.shard_bytes}: make more shards"
            )
        if not TAIL_SLOTS < self.summary_pages < self.segment_bytes // PAGE_BYTES:
            raise UsageError(f"a summary area of {self.summary_pages} pages does not fit its segment")

    @classmethod
    def planned(
        cls,
        shard_bytes: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        block_bytes: int = BLOCK_BYTES_EXPECTED,
    ) -> Geometry:
        """Plan a shard with summary areas for data areas full of *block_bytes* blocks.

        Smaller blocks seal a segment before its data area is full; larger blocks leave summary places unused.
        """
        stored_bytes = rounded_up(max(1, block_bytes))
        pages = TAIL_SLOTS + 1
        while (segment_bytes - pages * PAGE_BYTES) // stored_bytes > (pages - TAIL_SLOTS) * ENTRIES_PER_PAGE:
            pages += 1
        segments = max(0, shard_bytes - FIRST_SEGMENT_OFFSET) // segment_bytes
        return cls(shard_bytes, segment_bytes, segments, pages)

    @property
    def summary_bytes(self) -> int:
        """Return the size of a summary area."""
        return self.summary_pages * PAGE_BYTES

    @property
    def data_bytes(self) -> int:
        """Return the size of a data area."""
        return self.segment_bytes - self.summary_bytes

    @property
    def entries_max(self) -> int:
        """Return the number of blocks that one segment can list."""
        return (self.summary_pages - TAIL_SLOTS) * ENTRIES_PER_PAGE

    def summary_offset(self, segment: int) -> int:
        """Return the offset in the shard of a segment and its summary area."""
        return self.first_segment_offset + segment * self.segment_bytes

    def segment_of(self, offsets: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the segments of these offsets in the shard."""
        begin = np.uint64(self.first_segment_offset)
        return ((offsets - begin) // np.uint64(self.segment_bytes)).astype(np.intp)

    def data_offset(self, segment: int) -> int:
        """Return the offset of a segment's data area in the shard."""
        return self.summary_offset(segment) + self.summary_bytes

    def tail_offset(self, segment: int, slot: int) -> int:
        """Return the offset of a tail slot in the shard."""
        return self.summary_offset(segment) + slot * PAGE_BYTES

    def page_offset(self, segment: int, page: int) -> int:
        """Return the offset of a full summary page in the shard."""
        return self.summary_offset(segment) + (TAIL_SLOTS + page) * PAGE_BYTES
