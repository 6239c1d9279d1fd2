"""What can be believed of a shard's summary areas after a crash.

Any page may hold its old bytes, its new bytes or garbage. Of each segment only the highest generation with a
valid page counts, and of each page number its highest sequence. Entries whose extents can't be true are
refused; that what they point at is the block they name is for the tags to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.extent import PAGE_BYTES, Generation, generation_parts
from ostraca_fabric.flash.summary import ENTRY, Entries, Pages, valid_pages
from ostraca_fabric.ids import OwnerEpoch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ostraca_fabric.flash.geometry import Geometry
    from ostraca_fabric.flash.superblock import Superblock


@dataclass(frozen=True, slots=True, eq=False)
class RecoveredSegment:
    """What one segment holds."""

    number: int
    generation: Generation
    entries: Entries
    """In the order they were listed; when a key comes twice, the later counts."""


@dataclass(frozen=True, slots=True, eq=False)
class RecoveredShard:
    """What a shard holds."""

    segments: tuple[RecoveredSegment, ...]
    """Those ever written, the oldest generation first."""

    highest_epoch: OwnerEpoch
    """A new owner's epoch must be higher, unless it is the same process."""

    highest_count: int
    """The highest generation count: new generations go on from it."""

    pages_damaged: int
    entries_refused: int


@dataclass(frozen=True, slots=True, eq=False)
class ReadSegment:
    """What one segment's summary area says."""

    found: RecoveredSegment | None
    """None when nothing in it is to be believed: it was never written, or is lost."""

    epoch: int = 0
    """The highest owner epoch in it."""

    pages_damaged: int = 0
    """Those that look like summary pages and are not to be believed, also those of another shard."""

    pages_missing: int = 0
    """Pages that came before the last one of this generation and are not there: what they listed is lost,
    or was never acknowledged.
    """

    entries_refused: int = 0


def read_segment(superblock: Superblock, number: int, area: bytes | memoryview) -> ReadSegment:
    """Read the summary area of one segment. What is returned does not refer to *area*."""
    pages, damaged = valid_pages(superblock.identity, number, area)
    if not len(pages):
        return ReadSegment(None, pages_damaged=damaged)
    newest = Generation(int(pages["generation"].max()))
    of_newest = pages[pages["generation"] == newest]
    numbers = np.unique(of_newest["page"])
    listed = _listed(of_newest)
    is_sound = _sound(superblock.geometry, number, listed)
    return ReadSegment(
        RecoveredSegment(number, newest, listed[is_sound]),
        epoch=max(generation_parts(newest)[0], int(pages["owner_epoch"].max())),
        pages_damaged=damaged,
        pages_missing=int(numbers[-1]) + 1 - len(numbers),
        entries_refused=len(listed) - int(is_sound.sum()),
    )


def recover(superblock: Superblock, areas: Sequence[bytes | memoryview | None]) -> RecoveredShard:
    """Read the summary areas of all segments, in order; None stands for one that could not be read."""
    assert len(areas) == superblock.geometry.segments, "one summary area for each segment"
    segments: list[RecoveredSegment] = []
    epoch, count, damaged, refused = 0, 0, 0, 0
    for number, area in enumerate(areas):
        if area is None:
            continue
        read = read_segment(superblock, number, area)
        damaged += read.pages_damaged
        refused += read.entries_refused
        if read.found is not None:
            segments.append(read.found)
            epoch = max(epoch, read.epoch)
            count = max(count, generation_parts(read.found.generation)[1])
    segments.sort(key=lambda segment: segment.generation)
    return RecoveredShard(tuple(segments), OwnerEpoch(epoch), count, damaged, refused)


def _listed(pages: Pages) -> Entries:
    """Return the entries of one generation, in the order they were listed."""
    newest_first = pages[np.lexsort((-pages["sequence"].astype(np.int64), pages["page"]))]
    _, first_of_each = np.unique(newest_first["page"], return_index=True)
    parts = [page["entries"][: int(page["count"])] for page in newest_first[first_of_each]]
    return np.concatenate(parts) if parts else np.zeros(0, ENTRY)


def _sound(geometry: Geometry, segment: int, entries: Entries) -> NDArray[np.bool_]:
    """Say which entries have an extent inside the data area that overlaps no other's."""
    begin, end = geometry.data_offset(segment), geometry.summary_offset(segment) + geometry.segment_bytes
    offsets, lengths = entries["offset"], entries["length"]
    # Unsigned sums wrap, so room is compared against what is left behind the offset.
    is_sound: NDArray[np.bool_] = (
        (offsets >= begin) & (offsets < end) & (offsets % PAGE_BYTES == 0) & (lengths > 0)
    )
    is_sound &= lengths <= end - np.where(is_sound, offsets, begin)
    inside = np.flatnonzero(is_sound)
    order = inside[np.argsort(offsets[inside], kind="stable")]
    starts = offsets[order].astype(np.int64)
    ends = starts + lengths[order]
    if len(order) > 1:
        overlaps = np.zeros(len(order), np.bool_)
        overlaps[1:] = starts[1:] < np.maximum.accumulate(ends)[:-1]
        overlaps[:-1] |= ends[:-1] > starts[1:]
        is_sound[order[overlaps]] = False
    return is_sound
