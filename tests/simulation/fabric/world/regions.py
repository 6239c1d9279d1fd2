"""A worker's own memory as source and destination of blocks, without its arena: the SDK's regions.

Rows hold poison but for the time of an operation. So a byte that lands before, or later, is noticed. And
nothing may even refer to an operation's rows once it has ended, where blocks cross inline. On the data plane,
rows are withheld from later operations as long as something may land there.
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
from ostraca._memory.row_writes import RowWrites

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostraca._memory.inline_arena import RequestRows
    from ostraca._protocol.ledger import Ledger
    from ostraca.results import LateWrite

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

        self.writes = RowWrites(blocks)
        """What agents write there, on the data plane."""

        self._region = region

    @property
    def addresses(self) -> NDArray[np.uint64]:
        return self.blocks.addresses(np.arange(len(self.blocks.numbers)))

    def block(self, row: int) -> bytes:
        """Return what lies in a row now, as long as its block is."""
        begin = int(self.offsets[row])
        return self.memory[begin : begin + int(self.blocks.lengths[row])].tobytes()

    def give_back(self, source: Sequence[NDArray[np.uint8]] = ()) -> int:
        """End the use of the rows, once their operation has ended; no row is withheld.

        *source*: what a put had in them. Late bytes of a lying data plane may have landed there.
        """
        self.check_unused()
        for row, block in enumerate(source):
            if not self._region.is_lied_to and self.block(row) != block.tobytes():
                raise ViolationError("bytes landed in a row of a put")
        self._region.give(self.blocks)
        return 0

    def give_back_written(self, ledger: Ledger) -> int:
        """End the use of the rows of a get on the data plane; return how many are withheld."""

        def when_settled(request: int, act: Callable[[], None]) -> None:
            if not ledger.when_settled(request, act):
                act()

        late = self.writes.end(when_settled)
        withheld = [position for write in late for position in write.positions]
        self._region.put_back(self.blocks, np.delete(np.arange(len(self.blocks.numbers)), withheld))
        for write in late:
            self._region.withhold(write, self.blocks)
        return len(withheld)

    def check_unused(self) -> None:
        """Check that no frame to come or to go is left that uses the rows."""
        assert self.rows is not None, "they are given back once"
        memory, self.rows = weakref.ref(self.rows.memory), None
        if memory() is not None:
            raise ViolationError("rows are in use after the end of their operation")


class WatchedRegion:
    """One worker's. *share* of its operations are to use rows, by its own dice.

    Blocks that a lying data plane mixes up land in each other's rows, longer ones too.
    """

    def __init__(self, dice: random.Random, share: float, *, is_lied_to: bool = False) -> None:
        self._dice = dice
        self._share = share
        self.is_lied_to = is_lied_to
        self._rows = np.full((_ROWS, BLOCK_BYTES), _POISON, np.uint8)
        self.offered = RegionMemory(self._rows, None, may_withhold=True)
        """For its offer to agents."""

        self._region = Region(self.offered, RegionMemory.end)
        self._free = list(range(_ROWS))
        self._uncertain: set[int] = set()
        self._late: list[tuple[LateWrite, RegionBlocks]] = []
        self.memory = self.offered.array
        """All rows, flat."""

        self.on_free: Callable[[NDArray[np.uint64]], None] = lambda _: None
        """Told the addresses of rows that belong to no operation from here on."""

    def take(self, lengths: NDArray[np.uint32], *, is_written: bool) -> LentRows | None:
        """Lend rows for blocks of these lengths, to a get or else to a put; None for the arena."""
        if self._dice.random() >= self._share or len(lengths) > len(self._free):
            return None
        self.check()
        numbers = self._dice.sample(self._free, len(lengths))
        self._free = [number for number in self._free if number not in numbers]
        self._uncertain.difference_update(numbers)
        blocks = self._region.rows(numbers, lengths=lengths).blocks(
            argument="rows", count=len(numbers), block_bytes=BLOCK_BYTES, is_written=is_written
        )
        blocks.claim()
        return LentRows(self, blocks)

    def give(self, blocks: RegionBlocks) -> None:
        """Take the rows of a put back. A lie may still land an earlier block there."""
        blocks.release()
        self.put_back(blocks, np.arange(len(blocks.numbers)))
        if self.is_lied_to:
            self._uncertain.update(blocks.numbers.tolist())

    def withhold(self, write: LateWrite, blocks: RegionBlocks) -> None:
        """Take rows back at the end of a late write."""
        self._late.append((write, blocks))

    def put_back(self, blocks: RegionBlocks, at: NDArray[np.intp]) -> None:
        """Take rows back that are released, those of the blocks *at* positions."""
        numbers = blocks.numbers[at].tolist()
        for number, length in zip(numbers, blocks.lengths[at].tolist(), strict=True):
            if not self.is_lied_to and (self._rows[number, length:] != _POISON).any():
                raise ViolationError(f"bytes landed behind a block of {length} bytes in row {number}")
        self._rows[numbers] = _POISON
        self._free += numbers
        self.on_free(blocks.addresses(at))

    @property
    def withheld(self) -> int:
        """Number of gets with withheld rows."""
        return len(self._late)

    def check(self) -> None:
        """Check that nothing has landed in rows of no operation."""
        ended = [each for each in self._late if each[0].is_ended]
        self._late = [each for each in self._late if not each[0].is_ended]
        for write, blocks in ended:
            self.put_back(blocks, np.array(write.positions))
        certain = [number for number in self._free if number not in self._uncertain]
        late = (self._rows[certain] != _POISON).any(axis=1)
        if late.any():
            raise ViolationError(f"bytes landed in {late.sum()} rows whose operations have ended")
