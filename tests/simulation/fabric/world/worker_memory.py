"""Memory of workers, out of which the agents beside them copy the blocks of puts.

In place of the kernel's copies. An agent's copy may stand still before a block, or in the middle of it, and
finds what the worker's memory holds by that time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tests.support.simulated.virtual_hosts import running_host

from ostraca_fabric.model.extent import rounded_up
from ostraca_fabric.tables.digests import GOOD, CheckState, are_good
from ostraca_fabric.wire.messages import WorkerMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.fabric.world.agent_memory import AgentMemories
    from tests.support.simulated.virtual_hosts import VirtualHost

    from ostraca_fabric.tables.digests import TagCheck

_SPACE_BITS = 32
"""A worker has several arrays of memory, each of less than 4 GiB: their numbers are the high bits."""


class OfferedMemory:
    """Memory of one worker, which it offers to agents."""

    def __init__(self, proof: bytes, *spaces: NDArray[np.uint8]) -> None:
        """Offer *spaces*, as the running process."""
        host = running_host()
        assert host is not None, "workers are made in their processes"
        self.host: VirtualHost = host
        self.offer = WorkerMemory(0, proof)
        self._spaces = spaces

    def addresses(self, space: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the addresses of places in one of the spaces."""
        number = [each.ctypes.data for each in self._spaces].index(space.ctypes.data)
        return offsets.astype(np.uint64) + np.uint64(number << _SPACE_BITS)

    def at(self, address: int, length: int) -> NDArray[np.uint8] | None:
        """Return what lies at an address now; None where the process has ended."""
        if self.host.is_dead:
            return None
        offset = address & ((1 << _SPACE_BITS) - 1)
        return self._spaces[address >> _SPACE_BITS][offset : offset + length]


class OfferedMemories:
    """Memory of all workers, as the agents beside them see it."""

    def __init__(self, agent_memories: AgentMemories) -> None:
        """Let copies stand still as often as those of workers do."""
        self.copies = agent_memories
        self._offered: dict[bytes, OfferedMemory] = {}

    def offer(self, memory: OfferedMemory) -> None:
        """Let agents read a worker's memory."""
        self._offered[memory.offer.proof] = memory

    async def reader(self, _process: int, offer: WorkerMemory) -> CopiedMemory:
        """Stand in for ``WorkerMemories.reader``."""
        return CopiedMemory(self, self._offered[offer.proof])


class CopiedMemory:
    """One agent's reader of one worker's memory: implements ``ReadableMemory``."""

    def __init__(self, memories: OfferedMemories, memory: OfferedMemory) -> None:
        self._memories = memories
        self._memory = memory
        self._is_closed = False

    def fetch(self, check: TagCheck, addresses: NDArray[np.int64]) -> CopiedBlocks:
        """Start copying blocks, as the port specifies."""
        return CopiedBlocks(
            self._memories.copies, self._memory.at, check, addresses, is_closed=self._is_closed
        )

    def close(self) -> None:
        """Begin no other copy."""
        self._is_closed = True


class CopiedBlocks:
    """Blocks on their way out of a worker's memory: implements ``ports.transport.BlockStream``."""

    def __init__(
        self,
        copies: AgentMemories,
        at: Callable[[int, int], NDArray[np.uint8] | None],
        check: TagCheck,
        addresses: NDArray[np.int64],
        *,
        is_closed: bool,
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._copies = copies
        self._at = at
        self._check = check
        self._addresses = addresses.copy()
        self._row = len(addresses) if is_closed else 0
        self._copying = asyncio.get_running_loop().create_task(self._copy())

    def stop(self) -> NDArray[np.intp]:
        """Return the rows that may still be copied: a copy can't be stopped."""
        first = len(self._addresses) if self.ended.done() else self._row
        return np.arange(first, len(self._addresses))

    async def _copy(self) -> None:
        while self._row < len(self._addresses):
            if not await self._copied(self._row):
                self._copies.happened["puts of workers that have died"] += 1
                break
            self._row += 1
        self.ended.set_result(None)

    async def _copied(self, row: int) -> bool:
        """Copy a block, and check it; return whether its process was there."""
        check, half = self._check, 0
        length, begin = int(check.lengths[row]), int(check.pieces.memory_offsets[row])
        slot = check.pieces.memory[begin : begin + rounded_up(length)]
        address = int(self._addresses[row])
        if pause_s := self._copies.pause_s():
            if self._copies.is_torn():
                half = length // 2
                if not self._copied_part(address, slot, 0, half):
                    return False
            await asyncio.sleep(pause_s)
        if not self._copied_part(address, slot, half, length):
            return False
        slot[length:] = 0
        rows = slice(row, row + 1)
        places, columns = check.pieces.memory_offsets[rows], (check.lengths[rows], check.seeds[rows])
        is_good = are_good(check.pieces.memory, places, *columns, check.tags[rows])[0]
        check.states[row] = GOOD if is_good else CheckState.DAMAGED
        self._copies.happened["blocks of puts copied" if is_good else "blocks of puts changed meanwhile"] += 1
        return True

    def _copied_part(self, address: int, slot: NDArray[np.uint8], begin: int, end: int) -> bool:
        there = self._at(address + begin, end - begin)
        if there is None:
            return False
        slot[begin:end] = there
        return True
