"""Validity of a shard's summary areas after a crash.

Any page may hold old bytes, new bytes or garbage. In each segment only the highest generation with a valid
page counts, and for each page number the highest sequence. Entries with impossible extents are refused. Tags,
not this module, decide whether an extent holds the named block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.flash.summary import PAGE, PLAIN, Entries, Pages, PageState, offsets_of, page_states
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.extent import ENTRIES_PER_PAGE, TAIL_SLOTS, Generation, Geometry, generation_parts
from ostraca_fabric.model.ids import OwnerEpoch


@dataclass(frozen=True, slots=True, eq=False)
class RecoveredSegment:
    """Entries recovered from one segment."""

    number: int
    generation: Generation
    entries: Entries
    """In order of listing; if a key occurs twice, the later entry counts."""

    pages_missing: int
    """Missing pages before the last page of this generation: their entries are lost, or were never
    acknowledged."""

    pool: int = 0
    """Pool of the segment, as recorded in the pages; 0 without a record."""


@dataclass(frozen=True, slots=True, eq=False)
class RecoveredAreas:
    """Content of some or all segments of a shard."""

    segments: tuple[RecoveredSegment, ...]
    """Segments ever written, the oldest generation first."""

    areas: int
    """Number of summary areas examined."""

    highest_epoch: OwnerEpoch
    """A new owner's epoch must be higher, unless the owner is the same process."""

    highest_count: int
    """Highest generation count: new generations continue from here."""

    pages_damaged: int
    """Invalid pages with the magic of a summary page, including pages of another shard."""

    entries_refused: int
    """Entries with an impossible extent, or under a transform of a later release."""

    unreadable: tuple[int, ...] = ()
    """Segments with unreadable summary pages, which count as blank here. Set by the reader of the pages."""


PLACES_FIRST = TAIL_SLOTS + 1
"""Pages of a summary area to read before the call of ``places_wanted``."""


def places_wanted(
    superblock: Superblock, numbers: NDArray[np.intp], areas: NDArray[np.uint8], places_read: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Return how many pages of each summary area must be read, from the beginning.

    The caller has read the first *places_read* pages of each area, at least ``PLACES_FIRST``; the rest of a
    row of *areas* is zero. The newest tail gives the number of full pages. All pages are wanted if the tail
    is doubtful: a tail slot is damaged, or a full page lies beyond the count of the tail. Call again after
    reading more.
    """
    pages = areas.view(PAGE)
    shown = pages[:, : int(places_read.max(initial=PLACES_FIRST))]
    states = page_states(superblock.identity, numbers, shown)
    newest = np.where(states == PageState.GOOD, shown["generation"], np.uint64(0)).max(axis=1, initial=0)
    is_current = (states == PageState.GOOD) & (shown["generation"] == newest[:, None])
    tails = np.where(is_current[:, :TAIL_SLOTS], shown["page"][:, :TAIL_SLOTS].astype(np.intp), 0)
    behind = TAIL_SLOTS + tails.max(axis=1)
    is_behind_read = behind < places_read
    lies_behind = is_current[np.arange(len(numbers)), np.minimum(behind, shown.shape[1] - 1)]
    is_doubtful = (states[:, :TAIL_SLOTS] == PageState.DAMAGED).any(axis=1) | (is_behind_read & lies_behind)
    wanted: NDArray[np.intp] = np.where(is_doubtful, pages.shape[1], np.minimum(behind + 1, pages.shape[1]))
    return wanted


def recover(superblock: Superblock, numbers: NDArray[np.intp], areas: NDArray[np.uint8]) -> RecoveredAreas:
    """Read the summary areas of these segments.

    *numbers* rise; *areas* has one row of bytes for each segment. Pages beyond those of ``places_wanted`` may
    be zeroes.
    """
    geometry = superblock.geometry
    assert areas.shape == (len(numbers), geometry.summary_bytes), "one summary area for each segment"
    pages = areas.view(PAGE)
    states = page_states(superblock.identity, numbers, pages)
    is_valid = states == PageState.GOOD
    damaged = int(((states == PageState.OTHER) | (states == PageState.DAMAGED)).sum())
    newest = np.where(is_valid, pages["generation"], np.uint64(0)).max(axis=1, initial=0)
    is_current = is_valid & (pages["generation"] == newest[:, None])
    missing = _missing(pages, is_current)
    pools = np.where(is_current, pages["pool"], np.uint64(0)).max(axis=1, initial=0)
    rows, listed = _listed(pages, is_current)
    is_sound = _sound(geometry, numbers[rows], listed) & (listed["transform"] == PLAIN)
    rows, sound = rows[is_sound], listed[is_sound]
    ends = np.searchsorted(rows, np.arange(len(numbers) + 1)).tolist()
    segments = [
        RecoveredSegment(
            int(numbers[row]),
            Generation(int(newest[row])),
            sound[ends[row] : ends[row + 1]],
            pages_missing=int(missing[row]),
            pool=int(pools[row]),
        )
        for row in np.flatnonzero(is_valid.any(axis=1)).tolist()
    ]
    segments.sort(key=lambda segment: segment.generation)
    parts = [generation_parts(segment.generation) for segment in segments]
    epochs = [epoch for epoch, _ in parts] + pages["owner_epoch"][is_valid].tolist()
    return RecoveredAreas(
        tuple(segments),
        len(numbers),
        OwnerEpoch(max(epochs, default=0)),
        max((count for _, count in parts), default=0),
        damaged,
        len(listed) - len(sound),
    )


def _missing(pages: Pages, is_current: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Count for each area the missing pages before the last current page."""
    seen = np.zeros(pages.shape, np.bool_)
    rows, places = np.nonzero(is_current)
    numbers = pages["page"][rows, places]
    in_area = numbers < pages.shape[1]
    seen[rows[in_area], numbers[in_area]] = True
    last = pages.shape[1] - np.argmax(seen[:, ::-1], axis=1)
    missing: NDArray[np.intp] = np.where(seen.any(axis=1), last - seen.sum(axis=1), 0)
    return missing


def _listed(pages: Pages, is_current: NDArray[np.bool_]) -> tuple[NDArray[np.intp], Entries]:
    """Return the rows and the entries of the current pages, in order of listing.

    If several pages have the same number, the highest sequence counts.
    """
    rows, places = np.nonzero(is_current)
    numbers, sequences = pages["page"][rows, places], pages["sequence"][rows, places]
    order = np.lexsort((sequences, numbers, rows))
    rows, places, numbers = rows[order], places[order], numbers[order]
    is_last = np.ones(len(rows), np.bool_)
    is_last[:-1] = (rows[1:] != rows[:-1]) | (numbers[1:] != numbers[:-1])
    rows, places = rows[is_last], places[is_last]
    counts = pages["count"][rows, places]
    is_listed = np.arange(ENTRIES_PER_PAGE) < counts[:, None]
    return np.repeat(rows, counts), pages["entries"][rows, places][is_listed]


def _sound(geometry: Geometry, segments: NDArray[np.intp], entries: Entries) -> NDArray[np.bool_]:
    """Return a mask of entries with a possible extent.

    An extent lies inside the data area of its segment and overlaps no other extent.
    """
    area = geometry.first_segment_offset + segments.astype(np.uint64) * np.uint64(geometry.segment_bytes)
    begin, end = area + np.uint64(geometry.summary_bytes), area + np.uint64(geometry.segment_bytes)
    offsets, lengths = offsets_of(entries), entries["length"]
    # Unsigned sums wrap, so compare lengths with the room behind the offset.
    is_sound: NDArray[np.bool_] = (offsets >= begin) & (offsets < end) & (lengths > 0)
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
