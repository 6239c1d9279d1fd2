"""Summary pages: the lists of committed blocks at the head of each segment.

A page has 96 bytes of header and 50 entries of 80 bytes. Full pages are written once, at their own place. The
*tail* is the partly filled or empty page behind the full pages. The tail alternates between two slots with a
rising sequence, so that a torn write of one slot leaves the other. A page's checksum covers all other bytes
of the page, under a seed of the shard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ostraca_fabric.flash.superblock import ShardIdentity
from ostraca_fabric.model.extent import ENTRIES_PER_PAGE, PAGE_BYTES, TAIL_SLOTS, Generation, Geometry
from ostraca_fabric.model.ids import OwnerEpoch

SUMMARY_MAGIC = int.from_bytes(b"OSTRsumm", "little")
SUMMARY_VERSION = 1
CHECKSUM_BYTES = 8

ENTRY = np.dtype(
    [
        ("key", "u1", 16),
        ("tag", "u1", 16),
        ("seed", "<u8"),  # of the tag: enough to verify the block without its identity
        ("first_page", "<u4"),  # start of the extent in the shard, in pages
        ("length", "<u4"),  # the block's own bytes
        ("transform", "u1"),  # of the block's bytes on flash: PLAIN, the only one so far
        ("transform_data", "u1", 31),  # key, nonce and the like
    ]
)
"""Dtype of one committed block. ``offsets_of`` returns the extents' offsets in bytes."""

PLAIN = 0
"""Transform of bytes stored as they are."""

PAGE = np.dtype(
    [
        ("checksum", "<u8"),  # first, so that the covered bytes are contiguous
        ("magic", "<u8"),
        ("version", "<u4"),
        ("count", "<u4"),
        ("shard", "u1", 16),
        ("segment", "<u4"),
        ("page", "<u4"),
        ("generation", "<u8"),
        ("sequence", "<u8"),
        ("owner_epoch", "<u8"),
        (
            "pool",
            "<u8",
        ),  # pool of the segment; 0 as written by releases without pools
        ("reserved", "u1", 16),
        ("entries", ENTRY, ENTRIES_PER_PAGE),
    ]
)
assert PAGE.itemsize == PAGE_BYTES

Entries = np.ndarray[Any, np.dtype[np.void]]
"""Array of ``ENTRY``."""

Pages = np.ndarray[Any, np.dtype[np.void]]
"""Array of ``PAGE``."""


def entries_of(
    keys: NDArray[np.uint8],
    tags: NDArray[np.uint8],
    seeds: NDArray[np.uint64],
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
) -> Entries:
    """Build entries from columns of equal length.

    *offsets* are positions in the shard, in bytes: whole pages.
    """
    assert not (offsets % PAGE_BYTES).any(), "extents begin at whole pages"
    entries = np.zeros(len(keys), ENTRY)
    entries["key"], entries["tag"], entries["seed"], entries["length"] = keys, tags, seeds, lengths
    entries["first_page"] = offsets // PAGE_BYTES
    return entries


def offsets_of(entries: Entries) -> NDArray[np.uint64]:
    """Return the offsets in the shard of the extents of these entries, in bytes."""
    pages: NDArray[np.uint64] = entries["first_page"].astype(np.uint64)
    return pages * np.uint64(PAGE_BYTES)


def page_checksum(page: memoryview, seed: int) -> int:
    """Compute the checksum of a page."""
    return xxhash.xxh3_64_intdigest(page[CHECKSUM_BYTES:], seed=seed)


class PageState(IntEnum):
    """Content of one place in a summary area."""

    NONE = 0
    """No summary page: blank, or foreign bytes."""

    OTHER = 1
    """A page of another shard, or of this shard before its last formatting."""

    DAMAGED = 2
    """A page with this shard's digest that is damaged or not in its place."""

    GOOD = 3


def page_states(identity: ShardIdentity, segments: NDArray[np.intp], pages: Pages) -> NDArray[np.uint8]:
    """Return one ``PageState`` for each place of some summary areas.

    *pages*: a row per segment of *segments*, shape (n, pages of an area).
    """
    states = np.full(pages.shape, PageState.NONE, np.uint8)
    has_magic = pages["magic"] == SUMMARY_MAGIC
    is_shards = has_magic & (pages["shard"] == np.frombuffer(identity.digest, np.uint8)).all(axis=-1)
    states[has_magic] = PageState.OTHER
    states[is_shards] = PageState.DAMAGED
    may_be_good = is_shards & (pages["version"] == SUMMARY_VERSION) & (pages["count"] <= ENTRIES_PER_PAGE)
    may_be_good &= pages["segment"] == segments[:, None]
    # A tail slot may hold any page; a full page is valid only in its own place.
    places = np.arange(pages.shape[1])
    may_be_good &= (places < TAIL_SLOTS) | (pages["page"] == places - TAIL_SLOTS)
    rows = np.flatnonzero(may_be_good)
    view = np.ascontiguousarray(pages).view(np.uint8).reshape(-1).data
    checksums = [
        page_checksum(view[row * PAGE_BYTES : (row + 1) * PAGE_BYTES], identity.seed) for row in rows.tolist()
    ]
    is_good = np.array(checksums, np.uint64) == pages["checksum"].reshape(-1)[rows]
    states.reshape(-1)[rows[is_good]] = PageState.GOOD
    return states


@dataclass(slots=True)
class SummaryLog:
    """Writer of the summary of one generation of one segment.

    Call ``append`` again only after all pieces of the previous call are on flash: until then the next slot
    holds the only copy of blocks committed earlier.
    """

    geometry: Geometry
    identity: ShardIdentity
    segment: int
    generation: Generation
    epoch: OwnerEpoch
    listed: int = 0
    """Entries appended so far."""

    pool: int = 0
    """Pool of the segment, set before the first ``append``."""

    _tail: Entries = field(default_factory=lambda: np.zeros(0, ENTRY))
    _slot: int = 0
    _sequence: int = 0

    def opening(self) -> tuple[tuple[int, bytes], ...]:
        """Return the empty page to write before the segment's first space is allocated."""
        assert self._sequence == 0, "a segment is opened once in a generation"
        return (self._tail_piece(0, self._tail),)

    def append(self, entries: Entries) -> tuple[tuple[int, bytes], ...]:
        """List more blocks; return the pieces to write, as (offset in the shard, pages)."""
        assert len(entries), "nothing to list"
        assert self.listed + len(entries) <= self.geometry.entries_max, "the summary area is full"
        page = self.listed // ENTRIES_PER_PAGE
        pending = np.concatenate([self._tail, entries])
        full_pages = len(pending) // ENTRIES_PER_PAGE
        pieces: list[tuple[int, bytes]] = []
        if full_pages:
            written = self._pages(page, pending[: full_pages * ENTRIES_PER_PAGE])
            pieces.append((self.geometry.page_offset(self.segment, page), written))
        self._tail = pending[full_pages * ENTRIES_PER_PAGE :].copy()
        # Written even if empty: recovery learns the number of full pages from the tail.
        pieces.append(self._tail_piece(page + full_pages, self._tail))
        self.listed += len(entries)
        return tuple(pieces)

    def _tail_piece(self, page: int, entries: Entries) -> tuple[int, bytes]:
        offset = self.geometry.tail_offset(self.segment, self._slot)
        self._slot = (self._slot + 1) % TAIL_SLOTS
        return offset, self._pages(page, entries)

    def _pages(self, first: int, entries: Entries) -> bytes:
        """Encode entries as pages from number *first* on, at least one page.

        Only the last page may be partly filled.
        """
        full, rest = divmod(len(entries), ENTRIES_PER_PAGE)
        count = max(1, full + (rest > 0))
        numbers = np.arange(count)
        made = np.zeros(count, PAGE)
        made["magic"], made["version"] = SUMMARY_MAGIC, SUMMARY_VERSION
        made["count"][:full], made["count"][full:] = ENTRIES_PER_PAGE, rest
        made["shard"] = np.frombuffer(self.identity.digest, np.uint8)
        made["segment"], made["page"], made["generation"] = self.segment, first + numbers, self.generation
        made["sequence"], made["owner_epoch"] = self._sequence + 1 + numbers, self.epoch
        made["pool"] = self.pool
        self._sequence += count
        made["entries"][:full] = entries[: full * ENTRIES_PER_PAGE].reshape(full, ENTRIES_PER_PAGE)
        if rest:
            made["entries"][full, :rest] = entries[full * ENTRIES_PER_PAGE :]
        view = made.view(np.uint8).data
        for page in range(count):
            covered = view[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
            made["checksum"][page] = page_checksum(covered, self.identity.seed)
        return made.tobytes()
