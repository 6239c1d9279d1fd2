"""Reads of blocks from the memory of an agent on this host, without the agent.

The agent says where blocks lay a moment ago, and holds nothing for the reader. So a block may have given way
to another one. Its tag tells, as for all blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import MalformedError
from ostraca_fabric.runtime.process_memory import read_process, shows_proof
from ostraca_fabric.sockets.stream import ByteStream
from ostraca_fabric.wire.messages import AgentMemory

log = logging.getLogger("ostraca")


class AgentMemoryReader:
    """Reader of one agent's memory. Thread-safe."""

    def __init__(self, process: int, address: int, size_bytes: int) -> None:
        """Read the memory of *process* at *address*."""
        self._process = process
        self._address = address
        self._size_bytes = size_bytes
        self.is_usable = True
        """False after a failed read."""

    @classmethod
    def of(cls, memory: AgentMemory, stream: ByteStream) -> AgentMemoryReader | None:
        """Return a reader of the agent at the other end of a unix socket.

        Returns None if this process may not read the agent's memory.
        """
        try:
            process = stream.peer_process
            is_agent = shows_proof(process, memory.proof_address, memory.proof)
        except OSError as error:
            log.info("The agent's memory is not read: %s", error.strerror)
            return None
        if not is_agent:
            log.info("The agent's memory is not read: process %d is another one", process)
            return None
        return cls(process, memory.address, memory.size_bytes)

    def blocks(self, offsets: NDArray[np.int64], lengths: NDArray[np.uint32]) -> BlocksInMemory:
        """Return blocks at these places: columns of shape (n,), in bytes.

        Raises MalformedError for blocks outside of the agent's memory.
        """
        if ((offsets < 0) | (offsets > self._size_bytes - lengths.astype(np.int64))).any():
            raise MalformedError(f"blocks lie outside of the agent's {self._size_bytes} bytes of memory")
        return BlocksInMemory(self, offsets.astype(np.uint64) + np.uint64(self._address), lengths)

    def read(
        self,
        addresses: NDArray[np.uint64],
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.uint32],
    ) -> None:
        """Copy pieces of the agent's memory as ``read_process``. A failure is noted, not raised."""
        if not self.is_usable:
            return
        try:
            read_process(self._process, addresses, memory, offsets, lengths)
        except OSError as error:
            self.is_usable = False
            log.warning("The agent's memory is read no more: %s", error.strerror)


@dataclass(frozen=True, slots=True)
class BlocksInMemory:
    """Blocks in the agent's memory, in columns of shape (n,)."""

    reader: AgentMemoryReader
    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint32]

    def copier(self, memory: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Callable[[slice], None]:
        """Return a function that copies some of the blocks to their places in *memory*, a flat array."""

        def copy(some: slice) -> None:
            self.reader.read(self.addresses[some], memory, offsets[some], self.lengths[some])

        return copy
