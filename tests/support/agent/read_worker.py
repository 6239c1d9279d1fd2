"""A worker whose memory the agent reads for puts."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    FAR_S,
    GROUPED,
    SLOT_BYTES,
    Assembly,
    MemoryWorker,
    assembled,
    content_of,
)
from tests.support.agent.held_copies import HoldingEngine

from ostraca_dpu_agent.adapters.transports.worker_memory import WorkerMemories, WorkerMemoryReader
from ostraca_fabric.model.outcome import Ack
from ostraca_fabric.runtime.process_memory import MemoryProof
from ostraca_fabric.wire.messages import Put, WorkerMemory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.support.agent.assembly import HeldDrive

    from ostraca_dpu_agent.settings import AgentSettings

NOWHERE = 8
"""An address in the first page, which no process maps."""


class ReadWorker(MemoryWorker):
    """A worker in this process whose memory the agent reads, and whose arena fails."""

    def __init__(self, fabric: Assembly, memory: WorkerMemoryReader, engine: HoldingEngine) -> None:
        super().__init__(fabric.worker().arena, memory=memory)
        self.copies = engine
        self.source = np.zeros(0, np.uint8)
        self._fabric = fabric

    def put_message(
        self, numbers: Sequence[int], *, deadline_s: float = FAR_S, ack: int = Ack.COMMITTED
    ) -> Put:
        """Write blocks to this worker's memory, in reverse order at odd places, and name their addresses."""
        count = len(numbers)
        message = self._fabric.put_message(self, numbers, deadline_s=deadline_s, ack=ack)
        self.arena.bytes[:] = bytes(len(self.arena.bytes))
        self.arena.fails = True
        self.source = np.zeros(count * SLOT_BYTES, np.uint8)
        for number, place in zip(numbers, self.places(count).tolist(), strict=True):
            self.source[place : place + BLOCK_BYTES] = np.frombuffer(content_of(number), np.uint8)
        return msgspec.structs.replace(message, addresses=self.addresses(count).tobytes())

    @staticmethod
    def places(count: int) -> NDArray[np.int64]:
        return np.arange(count, dtype=np.int64)[::-1] * SLOT_BYTES + 7

    def addresses(self, count: int) -> NDArray[np.int64]:
        return self.places(count) + self.source.ctypes.data


@asynccontextmanager
async def read_worker(
    settings: AgentSettings = GROUPED, *, others: Sequence[HeldDrive] = ()
) -> AsyncIterator[tuple[Assembly, ReadWorker]]:
    """Start an agent that reads a worker's memory, with one block stored and nothing under way."""
    engine, proof = HoldingEngine(), MemoryProof()
    memories = WorkerMemories(lambda: engine)
    async with assembled(settings, others=others) as fabric:
        reader = await memories.reader(os.getpid(), WorkerMemory(proof.address, proof.content))
        assert reader is not None
        await fabric.quiet()
        engine.begun.clear()
        engine.ended.clear()
        try:
            yield fabric, ReadWorker(fabric, reader, engine)
        finally:
            reader.close()
            memories.close()
