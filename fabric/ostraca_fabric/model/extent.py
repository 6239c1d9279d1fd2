"""Extents on flash: units, generations, and pieces of a drive for reads and writes.

A *generation* numbers one use of a segment: the owner's epoch and a count, packed as ``epoch << 32 | count``.
Generations compare in order of assignment and fit a numpy column; the lowest is the oldest. Generation 0
means "never written".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import numpy as np
from numpy.typing import NDArray

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


def rounded_up(length_bytes: int, multiple: int = PAGE_BYTES) -> int:
    """Return the least multiple of *multiple* that holds *length_bytes*."""
    return -(-length_bytes // multiple) * multiple


def whole_pages(lengths: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the bytes on flash of blocks of these *lengths*, each far below 4 GiB."""
    pages: NDArray[np.uint32] = (lengths + (PAGE_BYTES - 1)) // PAGE_BYTES * PAGE_BYTES
    return pages


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

    def __len__(self) -> int:
        """Count the pieces."""
        return len(self.lengths)

    def some(self, rows: slice) -> Pieces:
        """Return a slice of the pieces."""
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
