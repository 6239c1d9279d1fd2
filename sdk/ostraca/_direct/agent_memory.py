"""Reads of blocks from the memory of an agent on this host, without the agent.

The agent says where blocks lay a moment ago, and holds nothing for the reader. So a block may have given way
to another one. Its tag tells, as for all blocks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import MalformedError
from ostraca_fabric.runtime.process_memory import ProcessBlocks, shows_proof
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

    def blocks(self, places: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> ProcessBlocks:
        """Return blocks at these places of the agent's memory: columns of shape (n,), in bytes.

        Raises MalformedError for blocks outside of that memory.
        """
        size_bytes = self._size_bytes
        ends = places + lengths
        if int(places[places.argmax()]) > size_bytes or int(ends[ends.argmax()]) > size_bytes:
            raise MalformedError(f"blocks lie outside of the agent's {size_bytes} bytes of memory")
        return ProcessBlocks(self._process, places + np.uint64(self._address))

    def note(self, errors: Sequence[int]) -> None:
        """Give up the memory after failed copies: the agent delivers later blocks."""
        if errors and self.is_usable:
            self.is_usable = False
            log.warning("The agent's memory is read no more: %s", os.strerror(errors[0]))
