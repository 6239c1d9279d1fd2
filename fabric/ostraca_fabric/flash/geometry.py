"""Positions inside a shard.

::

    0      superblock
    4096   its copy
    1 MiB  segment 0: summary area | data area
           segment 1: ...

A summary area holds two tail slots, then one place for each full summary page. All positions are fixed at
format time. Between the superblock's copy and segment 0 lie two copies of the volume records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import PAGE_BYTES, rounded_up

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
