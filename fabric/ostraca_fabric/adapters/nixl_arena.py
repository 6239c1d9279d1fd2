"""The worker's end over NIXL: it registers its arena and makes progress; the bytes are moved by the agent.

A NIXL agent of its own per arena, also when a process has several: its metadata then tells an agent about
that arena and nothing else. A worker never learns its agent's metadata, so it has no handle to the agent's
memory.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ostraca_fabric.adapters.nixl_identity import NAME, sealed, unique_name
from ostraca_fabric.adapters.nixl_runtime import NixlAgent
from ostraca_fabric.wire.messages import ArenaOffer

if TYPE_CHECKING:
    from ostraca_fabric.memory import HugeMemory
    from ostraca_fabric.slots import SlotPool

_given_up: list[object] = []
"""Ends closed while a transfer was not known to have ended: a peer may still reach their memory."""


class NixlArenaEnd:
    """Offers *memory*, cut into *slots*. Raises TransportError without NIXL. Blocks for some 100 ms.

    From its Hello until the Welcome, and while a request is out, its owner calls ``progress`` about every 0.5
    ms.
    """

    name = NAME

    def __init__(self, memory: HugeMemory, slots: SlotPool, *, label: str = "worker") -> None:
        assert slots.memory_bytes <= memory.size_bytes
        self._address = memory.address
        self._slots = slots
        self._label = label
        self._lock = threading.Lock()
        self._agent: NixlAgent | None = None
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        """Make the NIXL agent."""
        slots = self._slots
        agent = NixlAgent(unique_name(self._label))
        self._registration = agent.register(self._address, slots.memory_bytes)
        self._offer = ArenaOffer(
            transport=NAME,
            arena_bytes=slots.memory_bytes,
            chunk_bytes=slots.chunk_bytes,
            base=self._address,
            metadata=sealed(agent.metadata()),
        )
        self._agent = agent

    def offer(self) -> ArenaOffer:
        """As in the port."""
        return self._offer

    def progress(self) -> None:
        """As in the port; from any thread. Does nothing after ``close``, or when another thread is at it."""
        if self._lock.acquire(blocking=False):
            try:
                if self._agent is not None:
                    self._agent.progress()
            finally:
                self._lock.release()

    @property
    def needs_progress(self) -> bool:
        """As in the port."""
        return True

    def renew(self) -> None:
        """As in the port: another NIXL agent takes over. The one before, its endpoints and what they have
        received and not dealt with go together, while the memory is still mapped.
        """
        with self._lock:
            if self._is_closed:
                return
            agent, self._agent = self._agent, None
            if agent is not None:
                agent.deregister(self._registration)
            del agent
            self._begin()

    def close(self) -> None:
        """As in the port. With slots in quarantine the registration stays, and the memory must be leaked."""
        with self._lock:
            self._is_closed = True
            agent, self._agent = self._agent, None
            if agent is None:
                return
            if self._slots.quarantined_bytes:
                _given_up.append(agent)
            else:
                agent.deregister(self._registration)
