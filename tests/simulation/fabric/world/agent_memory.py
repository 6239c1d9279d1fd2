"""Memory of the agent beside a worker, out of which the worker copies blocks: nothing is held for it there.

In place of the SDK's reader of another process. A worker may pause before a copy, or in the middle of it, and
is told then what the memory holds by that time.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tests.simulation.shard.model import ViolationError

from ostraca._protocol.operations import Verified
from ostraca_fabric.tables.digests import CheckState, are_good
from ostraca_fabric.wire import codec

if TYPE_CHECKING:
    from tests.simulation.fabric.world.process import AgentProcess

    from ostraca._protocol.operations import Verify
    from ostraca_dpu_agent.agent import Agent

_REST_S = 0.5
"""With so much time left, a get is not late."""

_KINDS = {
    (True, True): "memory HITs",
    (True, False): "memory HITs of blocks that gave way",
    (False, False): "memory reads of replaced blocks",
    (False, True): "memory reads of wrong bytes",
}
"""By whether a copied block is good, and whether the agent still had it where it has said."""


@dataclass(frozen=True)
class MemoryReads:
    """How workers copy blocks out of their agents' memory. Chances are from 0 to 1."""

    workers: float = 1.0
    """The share of workers that do."""

    pauses: float = 0.0
    """Of gets whose blocks were left to the worker: those that it pauses in, for up to ``pause_s``."""

    pause_s: float = 2.0
    tears: float = 0.0
    """Of these: those that pause between the halves of all blocks, not before them."""


class AgentMemories:
    """Memory of all agents, as workers see it."""

    def __init__(
        self,
        agents: Mapping[str, AgentProcess],
        dice: random.Random,
        usual: MemoryReads,
        happened: Counter[str],
        *,
        is_lied_to: bool,
    ) -> None:
        """*agents* are those of now, by name; transfers that lie may scribble over what they have."""
        self.happened = happened
        self.is_lied_to = is_lied_to
        self.reads = usual
        self._agents = agents
        self._dice = dice
        self._usual = usual

    def well(self) -> None:
        """Let no worker pause from now on."""
        self.reads = replace(self._usual, pauses=0.0)

    def as_usual(self) -> None:
        """Let the usual happen."""
        self.reads = self._usual

    def are_read(self) -> bool:
        """Draw whether a worker reads memory."""
        return self._dice.random() < self._usual.workers

    def agent(self, name: str, start_id: bytes) -> Agent | None:
        """Return a start of an agent; None where it has ended."""
        process = self._agents[name]
        return process.agent if process.is_alive and process.agent.start_id == start_id else None

    def pause_s(self) -> float:
        """Draw how long a copy stands still."""
        return self._dice.uniform(0, self.reads.pause_s) if self._rolls(self.reads.pauses) else 0.0

    def is_torn(self) -> bool:
        """Draw whether a copy that stands still does so half-way."""
        return self._rolls(self.reads.tears)

    def _rolls(self, chance: float) -> bool:
        return chance > 0 and self._dice.random() < chance


@dataclass(eq=False)
class MemoryReader:
    """Reader of one start of an agent."""

    memories: AgentMemories
    agent: str
    start_id: bytes
    is_usable: bool = True
    """False after a failed read."""

    def opened(self) -> Agent | None:
        """Return the agent to copy from; None where the copy fails."""
        agent = self.memories.agent(self.agent, self.start_id)
        self.is_usable &= agent is not None
        return agent if self.is_usable else None


@dataclass(frozen=True)
class MemoryBlocks:
    """Blocks that an agent has left in its memory, in columns with a row per block."""

    positions: NDArray[np.uint32]
    """Positions in the request."""

    keys: NDArray[np.uint8]
    tags: NDArray[np.uint8]
    lengths: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    destinations: NDArray[np.int64]

    def are_there(self, agent: Agent) -> NDArray[np.bool_]:
        """Say which blocks an agent still has where it has said."""
        are_there, cache = np.zeros(len(self.positions), np.bool_), agent._staging.cache
        places = []
        if cache.limit_bytes:
            found, rows = cache.find(self.keys, self.lengths)
            places.append((found, cache.offsets[rows], cache.tags(rows)))
        for wave in agent._data_path.context.staged.find(self.keys, self.lengths):
            its = wave.group
            places.append((wave.positions, its.lease.offsets[wave.rows], its.tags[wave.rows]))
        for found, offsets, tags in places:
            are_there[found] |= (offsets == self.offsets[found]) & (tags == self.tags[found]).all(axis=1)
        return are_there

    def copy(self, agent: Agent, to: NDArray[np.uint8], begin: float, end: float) -> None:
        """Copy a part of each block, from one share of it to another."""
        memory = agent._staging.memory.array
        for destination, offset, length in zip(
            self.destinations.tolist(), self.offsets.tolist(), self.lengths.tolist(), strict=True
        ):
            if not 0 <= offset <= len(memory) - length:
                raise ViolationError(f"a block at {offset} of an agent's {len(memory)} bytes of memory")
            first, last = int(begin * length), int(end * length)
            to[destination + first : destination + last] = memory[offset + first : offset + last]


@dataclass(eq=False)
class MemoryGet:
    """Blocks of one get that its worker copies out of an agent's memory."""

    reader: MemoryReader
    memory: NDArray[np.uint8]
    """Destination: the arena, or a region."""

    offsets: NDArray[np.int64]
    """Places of the blocks there."""

    under_copy: Counter[int]
    """Slots that copies are under way to, or to rows that they are names of."""

    slots: NDArray[np.int64]
    keys: NDArray[np.uint8]
    lengths: NDArray[np.uint32]
    seeds: NDArray[np.uint64]
    is_slow: bool = False
    """Whether a pause has left too little time for the rest of the get."""

    copied: set[int] = field(default_factory=set)
    """Positions of blocks left to the worker."""

    async def read(self, wanted: Verify, until_s: float) -> Verified:
        """Copy blocks with places in memory, and verify them, as the SDK's get does."""
        positions = codec.positions(wanted.positions, len(self.slots))
        blocks = MemoryBlocks(
            positions,
            self.keys[positions],
            codec.rows16(wanted.tags, len(positions)),
            self.lengths[positions],
            codec.u64(wanted.places, len(positions)).astype(np.int64),
            self.offsets[positions],
        )
        slots = self.slots[positions].tolist()
        self.copied |= set(positions.tolist())
        self.under_copy.update(slots)
        were_there = await self._copied(blocks, until_s)
        self.under_copy.subtract(slots)
        if asyncio.get_running_loop().time() >= until_s:
            self.reader.memories.happened["memory reads not in time"] += len(positions)
            return Verified(positions.tobytes(), bytes([CheckState.PENDING] * len(positions)))
        good = are_good(self.memory, blocks.destinations, blocks.lengths, self.seeds[positions], blocks.tags)
        self._judge(good, were_there)
        return Verified(
            positions.tobytes(),
            np.where(good, CheckState.GOOD, CheckState.DAMAGED).astype(np.uint8).tobytes(),
        )

    async def _copied(self, blocks: MemoryBlocks, until_s: float) -> NDArray[np.bool_]:
        """Copy blocks; return which were where the agent has said whenever something was copied."""
        memories, begin = self.reader.memories, 0.0
        were_there = np.ones(len(blocks.positions), np.bool_)
        if pause_s := memories.pause_s():
            if memories.is_torn():
                were_there &= self._copied_part(blocks, 0.0, 0.5)
                begin = 0.5
            loop = asyncio.get_running_loop()
            await asyncio.sleep(max(0.0, min(pause_s, until_s - loop.time())))
            self.is_slow = until_s - loop.time() < _REST_S
        return were_there & self._copied_part(blocks, begin, 1.0)

    def _copied_part(self, blocks: MemoryBlocks, begin: float, end: float) -> NDArray[np.bool_]:
        agent = self.reader.opened()
        if agent is None:
            self.reader.memories.happened["copies from the memory of dead agents"] += 1
            return np.zeros(len(blocks.positions), np.bool_)
        blocks.copy(agent, self.memory, begin, end)
        return blocks.are_there(agent)

    def _judge(self, good: NDArray[np.bool_], were_there: NDArray[np.bool_]) -> None:
        """Count verified blocks; those that did not give way must be good."""
        memories = self.reader.memories
        for is_good, was_there in zip(good.tolist(), were_there.tolist(), strict=True):
            memories.happened[_KINDS[is_good, was_there]] += 1
        if (~good & were_there).any() and not memories.is_lied_to:
            raise ViolationError(f"{self.reader.agent} has blocks in its memory, and their bytes are others")
