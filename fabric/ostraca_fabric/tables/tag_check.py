"""Check of read blocks against their tags, as columns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.model.extent import Pieces
from ostraca_fabric.tables.digests import TAG_BYTES, are_good


@dataclass(frozen=True, slots=True)
class TagCheck:
    """Tags of the blocks of a read, one block per piece: columns of shape (n,).

    A drive checks each piece right after the read, while the bytes are in the processor's cache. The columns
    must not change until the read has ended.
    """

    pieces: Pieces
    lengths: NDArray[np.uint32]
    """Bytes of each block, at most the bytes of the piece."""

    seeds: NDArray[np.uint64]
    tags: NDArray[np.uint8]
    """Tags of shape (n, 16)."""

    was_read: NDArray[np.bool_] = field(init=False)
    """Pieces read by the drive, filled in by the end of the read. Other pieces are failures of the drive."""

    def __post_init__(self) -> None:
        """Assert columns of one length and of the types that C expects."""
        count = len(self.pieces)
        assert self.lengths.shape == self.seeds.shape == (count,), "one length and one seed for each piece"
        assert self.tags.shape == (count, TAG_BYTES), "one tag for each piece"
        assert self.lengths.dtype == np.uint32, "lengths are u32"
        assert self.seeds.dtype == np.uint64, "seeds are u64"
        for column in (self.lengths, self.seeds, self.tags):
            assert column.flags.c_contiguous, "C sees an array's items one after another"
        assert (self.lengths <= self.pieces.lengths).all(), "a block lies within its piece"
        object.__setattr__(self, "was_read", np.zeros(count, np.bool_))

    def run(self, rows: slice) -> NDArray[np.bool_]:
        """Check pieces just read; return for each whether the bytes match the tag. Releases the GIL."""
        self.was_read[rows] = True
        at, lengths = self.pieces.memory_offsets[rows], self.lengths[rows]
        return are_good(self.pieces.memory, at, lengths, self.seeds[rows], self.tags[rows])
