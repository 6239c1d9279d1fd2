"""Memory as NIXL's descriptor lists: a worker's arena, or the agent's staging memory.

A wave of slots of one length picks from a list prepared once for that length and slot size: one row per
chunk, so that any slot size is numbered as in ``ostraca_fabric.slots``, however little it divides the chunk.
Anything else (mixed lengths, offsets that are not on such a grid) is spelled out piece by piece, which costs
0.05 µs more per block.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.ports.transport import Direction
from ostraca_fabric.slots import slot_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_fabric.adapters.nixl_runtime import NixlAgent, Prepared, Transfer
    from ostraca_fabric.ports.transport import Wave

LISTS_MAX = 16
"""Prepared lists kept per memory, the least recently used go. A list costs microseconds to make."""


class NixlSlots:
    """Memory of *remote* (empty: our own) at *address*. Belongs to the thread that owns the agent."""

    def __init__(
        self, agent: NixlAgent, *, address: int, size_bytes: int, chunk_bytes: int, remote: str = ""
    ) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.chunk_bytes = chunk_bytes
        self.remote = remote
        self._agent = agent
        self._lists: OrderedDict[tuple[int, int], Prepared] = OrderedDict()

    def is_grid(self, offsets: NDArray[np.int64], slot_bytes: int) -> bool:
        """Tell whether slots of *slot_bytes* begin at these offsets, each within one chunk."""
        within = offsets % self.chunk_bytes
        return not (within % slot_bytes).any() and int(within.max()) + slot_bytes <= self.chunk_bytes

    def pick(
        self, offsets: NDArray[np.int64], length: int, slot_bytes: int
    ) -> tuple[Prepared, NDArray[np.int32]]:
        """Return a list of all slots and the numbers of these in it. Raises TransportError."""
        numbers = slot_numbers(offsets, chunk_bytes=self.chunk_bytes, slot_bytes=slot_bytes)
        found = self._lists.pop((length, slot_bytes), None)
        if found is None:
            found = self._agent.prepare(self.remote, self._rows(length, slot_bytes))
            if len(self._lists) == LISTS_MAX:
                self._agent.release_prepared(self._lists.popitem(last=False)[1])
        self._lists[length, slot_bytes] = found
        return found, numbers

    def spell_out(self, offsets: NDArray[np.int64], lengths: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """Return (address, length, 0) per piece."""
        pieces = np.zeros((len(offsets), 3), np.uint64)
        pieces[:, 0] = offsets + self.address
        pieces[:, 1] = lengths
        return pieces

    def release(self) -> None:
        """Let every list go."""
        while self._lists:
            self._agent.release_prepared(self._lists.popitem()[1])

    def _rows(self, length: int, slot_bytes: int) -> NDArray[np.uint64]:
        chunks = self.size_bytes // self.chunk_bytes
        rows = np.zeros((chunks, 5), np.uint64)
        rows[:, 0] = np.arange(chunks) * self.chunk_bytes + self.address
        rows[:, 1] = length
        rows[:, 3] = slot_bytes
        rows[:, 4] = self.chunk_bytes // slot_bytes
        return rows


def transfer_of(
    agent: NixlAgent, direction: Direction, own: NixlSlots, arena: NixlSlots, wave: Wave
) -> Transfer:
    """Make the transfer of one wave. Raises TransportError."""
    operation = "WRITE" if direction is Direction.TO_WORKER else "READ"
    length = int(wave.lengths[0])
    if (
        bool((wave.lengths == length).all())
        and own.is_grid(wave.staging, wave.staging_slot_bytes)
        and arena.is_grid(wave.arena, wave.arena_slot_bytes)
    ):
        return agent.pick(
            operation,
            own.pick(wave.staging, length, wave.staging_slot_bytes),
            arena.pick(wave.arena, length, wave.arena_slot_bytes),
        )
    return agent.spell_out(
        operation,
        own.spell_out(wave.staging, wave.lengths),
        arena.spell_out(wave.arena, wave.lengths),
        arena.remote,
    )
