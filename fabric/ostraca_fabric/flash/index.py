"""Index of a shard: position of every block, in flat arrays, looked up in batches.

A block's *row* holds the whole key and tag, offset and length: 40 bytes. Rows come in chunks of 8, all of one
segment, so that a segment leaves the index without a search. A hash table of buckets finds rows. A bucket has
16 slots, each with a row's number and one byte of the key's hash. A bucket also counts the keys that passed
it by because it was full. A lookup goes on to the next bucket only if the count is above zero: most lookups
end in the first bucket, and removal leaves no tombstones.

The table is 78 % full at the limit of blocks; the whole index takes at most 48 bytes per block. Unused memory
is never touched. The loops over rows are in C. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.native import at, brief
from ostraca_fabric.tables.digests import contiguous_keys
from ostraca_fabric.tables.key_table import first_of_each
from ostraca_fabric.wire.codec import KEY_BYTES

CHUNK_ROWS = 8
BUCKET_SLOTS = 16
LOAD_MAX = 0.78
BLOCKS_MAX = 1 << 31

# A block is never longer than a segment, so a row's length has spare bits: one for "read", three for a mark.
_READ = np.uint32(1 << 31)
_LENGTH = np.uint32((1 << 28) - 1)
_MARK_SHIFT = np.uint32(28)
MARKS = 8
"""Marks of rows are numbers below this; the user of the index defines their meaning."""

_NO_CHUNK = -1


class Insertion(IntEnum):
    """Result of the insertion of one block."""

    TAKEN = 0
    KNOWN = 1
    """The key is in the index already, or came earlier in the batch: the earlier entry stays."""

    FULL = 2
    """The index is at its limit."""


@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """Blocks removed from the index with a segment."""

    blocks: int
    unread: int
    """Blocks never read."""

    block_bytes: int
    keys: NDArray[np.uint8]
    """Shape (blocks, 16)."""


class BlockIndex:
    """Index of up to *blocks_max* blocks in *segments* segments."""

    def __init__(self, *, blocks_max: int, segments: int) -> None:
        assert 0 < blocks_max <= BLOCKS_MAX, f"blocks_max is {blocks_max}: 1 to {BLOCKS_MAX}"
        chunks = -(-blocks_max // CHUNK_ROWS) + segments  # each segment may waste the rest of one chunk
        buckets = int(blocks_max / (BUCKET_SLOTS * LOAD_MAX)) + 1
        rows = chunks * CHUNK_ROWS
        self.blocks_max = blocks_max
        self._keys = np.zeros((rows, 2), np.uint64)
        self._tags = np.zeros((rows, 2), np.uint64)
        self._pages = np.zeros(rows, np.uint32)
        self._lengths = np.zeros(rows, np.uint32)  # 0: no block
        self._prints = np.zeros((buckets, BUCKET_SLOTS), np.uint8)  # 0: an empty slot
        self._slots = np.zeros((buckets, BUCKET_SLOTS), np.uint32)
        self._passed = np.zeros(buckets, np.uint32)
        self._next_chunk = np.zeros(chunks, np.int32)  # of the same segment, or of the free list
        self._segment_chunk = np.full(segments, _NO_CHUNK, np.int32)  # its newest chunk
        self._segment_rows = np.zeros(segments, np.uint32)
        self._free_chunks = np.array(
            [_NO_CHUNK, 0], np.int32
        )  # first chunk of the free list; number of chunks ever taken
        self.locate()
        self._used = 0
        self._blocks = 0
        self.block_bytes = 0
        """Bytes of all blocks listed."""

    def locate(self) -> None:
        """Note where the arrays are, for C. Call after every move of the arrays, as in a copy."""
        arrays = at(self._prints), at(self._slots), at(self._passed), len(self._passed), at(self._keys)
        self._addresses = np.array(arrays, np.uint64)  # ``struct table`` of ``native/block_index.c``
        self._table = at(self._addresses)
        self._columns = at(self._pages), at(self._lengths), at(self._tags)

    def __len__(self) -> int:
        return self._blocks

    @property
    def room(self) -> int:
        """Number of blocks that still fit.

        The removal of a single block frees no room until its segment is removed.
        """
        return self.blocks_max - self._used

    @property
    def rows_taken(self) -> NDArray[np.uint32]:
        """Rows taken by each segment, including those of blocks removed alone. Read-only."""
        return self._segment_rows

    @property
    def memory_bytes(self) -> int:
        """Memory of a full index, in bytes."""
        arrays = (value for value in vars(self).values() if isinstance(value, np.ndarray))
        return sum(array.nbytes for array in arrays)

    def find(self, keys: NDArray[np.uint8]) -> NDArray[np.intp]:
        """Return the row of each key, -1 for an unlisted key. *keys*: shape (n, 16)."""
        wanted = contiguous_keys(keys)
        rows = np.empty(len(wanted), np.intp)
        brief.ostraca_index_find(self._table, at(wanted), at(rows), len(rows))
        return rows

    def read(
        self, rows: NDArray[np.intp], *, is_counted: bool = True
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]]:
        """Return (offsets, lengths, tags) of the blocks of these rows.

        *rows* come from ``find``: the values of row -1 are zero. If *is_counted*, set the read bits.
        """
        count = len(rows)
        offsets, lengths = np.empty(count, np.uint64), np.empty(count, np.uint32)
        tags = np.empty((count, KEY_BYTES), np.uint8)
        brief.ostraca_index_read(
            *self._columns, at(rows), PAGE_BYTES, is_counted, at(offsets), at(lengths), at(tags), count
        )
        return offsets, lengths, tags

    def has(self, keys: NDArray[np.uint8], *, is_counted: bool = True) -> tuple[NDArray[np.bool_], int]:
        """Return (is listed, for each key; number listed). If *is_counted*, set read bits."""
        is_listed, (listed,) = listed_in_each([(self, len(keys))], keys, is_counted=is_counted)
        return is_listed, listed

    def has_at(self, keys_at: int, listed_at: int, count: int, *, is_counted: bool) -> int:
        """Do as ``has``, for keys and results at these addresses; return the number listed."""
        listed: int = brief.ostraca_index_has(
            self._table, keys_at, self._columns[1], is_counted, listed_at, count
        )
        return listed

    def offsets(self, rows: NDArray[np.intp]) -> NDArray[np.uint64]:
        """Return the offsets in the shard of the blocks of these rows, in bytes."""
        return self._pages[rows].astype(np.uint64) * np.uint64(PAGE_BYTES)

    def lengths(self, rows: NDArray[np.intp]) -> NDArray[np.uint32]:
        """Return the blocks' lengths in bytes."""
        return self._lengths[rows] & _LENGTH

    def marks(self, rows: NDArray[np.intp]) -> NDArray[np.uint32]:
        """Return the marks of the blocks."""
        return (self._lengths[rows] & ~_READ) >> _MARK_SHIFT

    def tags(self, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        """Return the blocks' tags, shape (n, 16)."""
        return self._tags[rows].view(np.uint8).reshape(-1, KEY_BYTES)

    def insert(
        self,
        keys: NDArray[np.uint8],
        tags: NDArray[np.uint8],
        offsets: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        *,
        segment: int | NDArray[np.intp],
        marks: NDArray[np.uint32] | None = None,
    ) -> NDArray[np.uint8]:
        """List blocks of one segment, or of one segment each; return their ``Insertion``.

        Offsets are whole pages, lengths 1 to 2**28 - 1, *marks* below MARKS, 0 by default. At the limit of
        the index the first blocks of the batch are taken.
        """
        assert not len(lengths) or 0 < int(lengths.min()) <= int(lengths.max()) <= int(_LENGTH)
        assert not (offsets % PAGE_BYTES).any(), "extents begin at whole pages"
        new = (first_of_each(keys) & (self.find(keys) < 0)).nonzero()[0]
        states = np.full(len(keys), Insertion.KNOWN, np.uint8)
        states[new] = Insertion.FULL
        new = new[: self.room]
        states[new] = Insertion.TAKEN
        if isinstance(segment, int):
            rows = self._take_rows(segment, len(new))
        else:
            rows = self._take_rows_of_each(segment[new])
        self._keys[rows] = _words(keys)[new]
        self._tags[rows] = _words(tags)[new]
        self._pages[rows] = offsets[new] // PAGE_BYTES
        self._lengths[rows] = lengths[new] if marks is None else lengths[new] | marks[new] << _MARK_SHIFT
        brief.ostraca_index_place(self._table, at(rows), len(rows))
        self._used += len(new)
        self._blocks += len(new)
        self.block_bytes += int(lengths[new].sum(dtype=np.uint64))
        return states

    def remove(self, rows: NDArray[np.intp]) -> None:
        """Remove single blocks. *rows* come from ``find``, each once."""
        rows = np.ascontiguousarray(rows, np.intp)
        assert not len(rows) or int(rows.min()) >= 0, "a key that was not found has no row"
        emptied = brief.ostraca_index_unplace(self._table, at(rows), len(rows))
        assert emptied == len(rows), "a row was taken out that was not listed"
        self._blocks -= len(rows)
        self.block_bytes -= int(self.lengths(rows).sum(dtype=np.uint64))
        self._lengths[rows] = 0

    def remove_segment(self, segment: int) -> Removed:
        """Remove all blocks of a segment."""
        taken = self.rows_of(segment)
        rows = taken[self._lengths[taken] > 0]
        lengths = self._lengths[rows]
        removed = Removed(
            blocks=len(rows),
            unread=int((lengths & _READ == 0).sum()),
            block_bytes=int((lengths & _LENGTH).sum(dtype=np.uint64)),
            keys=self._keys[rows].view(np.uint8).reshape(-1, KEY_BYTES),
        )
        self.remove(rows)
        self._used -= len(taken)
        self._give_rows(segment, taken)
        return removed

    def read_rows_of(self, segment: int) -> NDArray[np.intp]:
        """Return the rows of a segment's blocks with the read bit set."""
        rows = self.rows_of(segment)
        read: NDArray[np.intp] = rows[self.is_read(rows) & (self._lengths[rows] & _LENGTH > 0)]
        return read

    def is_read(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Tell for each of these rows whether the read bit is set."""
        set_bits: NDArray[np.bool_] = self._lengths[rows] & _READ > 0
        return set_bits

    def forget_reads(self, rows: NDArray[np.intp]) -> None:
        """Clear the read bits of these rows."""
        self._lengths[rows] &= ~_READ

    def forget_all_reads(self) -> None:
        """Clear the read bits of all blocks."""
        ever_taken = int(self._free_chunks[1]) * CHUNK_ROWS  # later rows were never touched
        self._lengths[:ever_taken] &= ~_READ

    def keys(self, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        """Return the blocks' keys, shape (n, 16)."""
        return self._keys[rows].view(np.uint8).reshape(-1, KEY_BYTES)

    def rows_of(self, segment: int) -> NDArray[np.intp]:
        """Return the rows taken by a segment, including those of blocks removed alone."""
        count = int(self._segment_rows[segment])
        rows = np.empty(count, np.intp)
        brief.ostraca_index_rows_of(at(self._next_chunk), self._segment_chunk[segment], count, at(rows))
        return rows

    def all_rows(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the rows taken by segments, as ``rows_of`` does, and the segment of each."""
        filled = np.flatnonzero(self._segment_rows)
        rows = [self.rows_of(segment) for segment in filled.tolist()]
        return np.concatenate([np.empty(0, np.intp), *rows]), np.repeat(filled, self._segment_rows[filled])

    def _take_rows_of_each(self, segments: NDArray[np.intp]) -> NDArray[np.intp]:
        """Take a row of each of these segments; fast if equal segments are adjacent."""
        begins = np.flatnonzero(np.diff(segments, prepend=-1))
        counts = np.diff(begins, append=len(segments)).tolist()
        rows = np.empty(len(segments), np.intp)
        for begin, count in zip(begins.tolist(), counts, strict=True):
            rows[begin : begin + count] = self._take_rows(int(segments[begin]), count)
        return rows

    def _take_rows(self, segment: int, count: int) -> NDArray[np.intp]:
        rows = np.empty(count, np.intp)
        of_segment = slice(segment, segment + 1)
        brief.ostraca_index_take_rows(
            at(self._next_chunk),
            at(self._free_chunks),
            at(self._segment_chunk[of_segment]),
            at(self._segment_rows[of_segment]),
            at(rows),
            count,
        )
        return rows

    def _give_rows(self, segment: int, rows: NDArray[np.intp]) -> None:
        """Free a segment's chunks in one step.

        *rows* are all rows of the segment, with the rows of the oldest chunk last.
        """
        if len(rows):
            self._next_chunk[rows[-1] // CHUNK_ROWS] = self._free_chunks[0]
            self._free_chunks[0] = self._segment_chunk[segment]
        self._segment_chunk[segment] = _NO_CHUNK
        self._segment_rows[segment] = 0


def listed_in_each(
    runs: Iterable[tuple[BlockIndex | None, int]], keys: NDArray[np.uint8], *, is_counted: bool
) -> tuple[NDArray[np.bool_], list[int]]:
    """Return (is listed, for each key; number listed, for each run), as ``BlockIndex.has``.

    A run is an index with the number of keys to look up there, the next of *keys*. Keys without an index are
    not listed.
    """
    wanted = contiguous_keys(keys)
    is_listed, listed = np.zeros(len(wanted), np.bool_), []
    keys_at, listed_at = at(wanted), at(is_listed)
    for index, count in runs:
        listed.append(0 if index is None else index.has_at(keys_at, listed_at, count, is_counted=is_counted))
        keys_at += KEY_BYTES * count
        listed_at += count
    return is_listed, listed


def _words(rows16: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """View keys or tags of shape (n, 16) as two numbers each."""
    return np.ascontiguousarray(rows16).view(np.uint64).reshape(-1, 2)
