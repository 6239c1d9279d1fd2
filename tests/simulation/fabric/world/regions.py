"""A worker's own memory as source and destination of blocks that cross inline: the SDK's regions.

Rows hold poison but for the time of an operation. So a byte that lands before, or later, is noticed. And
nothing may even refer to an operation's rows once it has ended.
"""

from __future__ import annotations

import random
import weakref
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tests.simulation.fabric.world.blocks import BLOCK_BYTES
from tests.simulation.shard.model import ViolationError

from ostraca._memory.regions import Region, RegionBlocks, RegionMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca._memory.inline_arena import RequestRows

_ROWS = 48
"""Fewer than the arena has slots: where they are all in use, blocks go to the arena."""

_POISON = 0xEE


class LentRows:
    """Rows of one operation."""

    def __init__(self, region: WatchedRegion, blocks: RegionBlocks) -> None:
        self.blocks = blocks
        self.memory = blocks.memory.array
        self.offsets = blocks.numbers * blocks.memory.row_bytes
        self.rows: RequestRows | None = blocks.request_rows(np.arange(len(blocks.numbers)))
        """What the connection knows them by, until their operation ends."""

        self._region = region

    def block(self, row: int) -> bytes:
        """Return what lies in a row now, as long as its block is."""
        begin = int(self.offsets[row])
        return self.memory[begin : begin + int(self.blocks.lengths[row])].tobytes()

    def give_back(self, source: Sequence[NDArray[np.uint8]] = ()) -> None:
        """End the use of the rows, once their operation has ended. *source*: what a put had in them."""
        self.check_unused()
        for row, block in enumerate(source):
            if self.block(row) != block.tobytes():
                raise ViolationError("bytes landed in a row of a put")
        self._region.give(self.blocks)

    def check_unused(self) -> None:
        """Check that no frame to come or to go is left that uses the rows."""
        assert self.rows is not None, "they are given back once"
        memory, self.rows = weakref.ref(self.rows.memory), None
        if memory() is not None:
            raise ViolationError("rows are in use after the end of their operation")


class WatchedRegion:
    """One worker's. *share* of its operations are to use rows, by its own dice."""

    def __init__(self, dice: random.Random, share: float) -> None:
        self._dice = dice
        self._share = share
        self._rows = np.full((_ROWS, BLOCK_BYTES), _POISON, np.uint8)
        self._region = Region(RegionMemory(self._rows, None), RegionMemory.end)
        self._free = list(range(_ROWS))
        self.memory = self._region._memory.array
        """All rows, flat."""

    def take(self, lengths: NDArray[np.uint32], *, is_written: bool) -> LentRows | None:
        """Lend rows for blocks of these lengths, to a get or else to a put; None for the arena."""
        if self._dice.random() >= self._share or len(lengths) > len(self._free):
            return None
        self.check()
        numbers = self._dice.sample(self._free, len(lengths))
        self._free = [number for number in self._free if number not in numbers]
        blocks = self._region.rows(numbers, lengths=lengths).blocks(
            argument="rows", count=len(numbers), block_bytes=BLOCK_BYTES, is_written=is_written
        )
        blocks.claim()
        return LentRows(self, blocks)

    def give(self, blocks: RegionBlocks) -> None:
        """Take rows back."""
        numbers = blocks.numbers.tolist()
        for number, length in zip(numbers, blocks.lengths.tolist(), strict=True):
            if (self._rows[number, length:] != _POISON).any():
                raise ViolationError(f"bytes landed behind a block of {length} bytes in row {number}")
        blocks.release()
        self._rows[numbers] = _POISON
        self._free += numbers

    def check(self) -> None:
        """Check that nothing has landed in rows of no operation."""
        late = (self._rows[self._free] != _POISON).any(axis=1)
        if late.any():
            raise ViolationError(f"bytes landed in {late.sum()} rows whose operations have ended")
