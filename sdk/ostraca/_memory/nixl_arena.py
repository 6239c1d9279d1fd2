"""Arena end of the NIXL transport: registration and progress.

The agent moves the bytes. Each arena has a NIXL agent of its own, even with several arenas in a process: the
metadata then describes that arena and nothing else. A worker never gets the metadata of its Ostraca agent, so
it has no access to the agent's memory.

Creating a NIXL agent takes 25 ms of a core, because UCX inspects the machine's devices in thousands of system
calls. The successor may therefore be created in advance. Until its use no other process has its metadata, and
it makes no progress.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.errors import TransportError
from ostraca_fabric.nixl.runtime import NAME, NixlAgent, sealed, unique_name
from ostraca_fabric.wire.messages import ArenaOffer

if TYPE_CHECKING:
    from ostraca_fabric.nixl.runtime import Registration
    from ostraca_fabric.runtime.memory import HugeMemory
    from ostraca_fabric.tables.slots import SlotPool

_leaked: list[object] = []
"""Ends closed during transfers not known to have ended: a peer may still reach their memory."""


@dataclass(frozen=True, slots=True)
class _RegisteredAgent:
    """Arena registered with a NIXL agent, and the matching offer."""

    agent: NixlAgent
    registration: Registration
    offer: ArenaOffer

    def cut_off(self) -> None:
        """Deregister the memory. The agent goes with the last reference to this object."""
        self.agent.deregister(self.registration)


class NixlArenaEnd:
    """NIXL offer of *memory*, cut into *slots*.

    Raises TransportError without NIXL. Blocks for some 100 ms. The owner calls ``progress`` about every 0.5
    ms from Hello to Welcome, and while a request is under way.
    """

    name = NAME
    needs_progress = True

    def __init__(
        self,
        memory: HugeMemory,
        slots: SlotPool,
        *,
        label: str = "worker",
        spare: _RegisteredAgent | None = None,
    ) -> None:
        assert slots.memory_bytes <= memory.size_bytes
        self._memory = memory
        self._address = memory.address
        self._slots = slots
        self._label = label
        self._lock = threading.Lock()
        self._making = threading.Lock()  # held while a NIXL agent is made; taken before ``_lock``
        self._is_closed = False
        self._spare: _RegisteredAgent | None = None  # never offered
        self._used: _RegisteredAgent | None = spare or self._create_agent()
        self._offer = self._used.offer
        self.has_offer = True

    def _create_agent(self) -> _RegisteredAgent:
        """Create a NIXL agent with the arena registered."""
        slots = self._slots
        agent = NixlAgent(unique_name(self._label))
        registration = agent.register(self._address, slots.memory_bytes)
        offer = ArenaOffer(
            transport=NAME,
            arena_bytes=slots.memory_bytes,
            chunk_bytes=slots.chunk_bytes,
            base=self._address,
            metadata=sealed(agent.metadata()),
        )
        return _RegisteredAgent(agent, registration, offer)

    def offer(self) -> ArenaOffer:
        """Return the offer."""
        return self._offer

    def progress(self) -> None:
        """Let the transport make progress, from any thread.

        Does nothing after ``close``, or while another thread makes progress.
        """
        if self._lock.acquire(blocking=False):
            try:
                if self._used is not None:
                    self._used.agent.progress()
            finally:
                self._lock.release()

    def prepare_renewal(self) -> None:
        """Create the next NIXL agent in advance, unknown to any peer until its use."""
        with self._making:
            if self._spare is None and not self._is_closed:
                with suppress(TransportError):
                    self._spare = self._create_agent()

    def renew(self) -> None:
        """Replace the NIXL agent by another.

        The previous agent goes while the memory is still mapped, with its endpoints and their unprocessed
        data.
        """
        with self._making, self._lock:
            if self._is_closed:
                return
            used, self._used = self._used, None
            if used is not None:
                used.cut_off()
            del used
            self.has_offer = False
            spare, self._spare = self._spare, None
            self._used = spare or self._create_agent()
            self._offer = self._used.offer
            self.has_offer = True

    def successor(self) -> NixlArenaEnd:
        """Return another end with a NIXL agent of its own."""
        with self._making:
            spare, self._spare = self._spare, None
        return NixlArenaEnd(self._memory, self._slots, label=self._label, spare=spare)

    def cut_off(self) -> None:
        """Remove the NIXL agent, while the memory is still mapped.

        The agent's endpoints and their unprocessed data go too.
        """
        with self._making, self._lock:
            self._is_closed = True
            for each in (self._used, self._spare):
                if each is not None:
                    each.cut_off()
            self._used = self._spare = None

    def close(self) -> None:
        """Deregister the memory, unless slots are in quarantine.

        With slots in quarantine the registration stays, and the caller must leak the memory.
        """
        with self._making, self._lock:
            self._is_closed = True
            used, self._used = self._used, None
            spare, self._spare = self._spare, None
            if spare is not None:
                spare.cut_off()
            if used is None:
                return
            if self._slots.quarantined_bytes:
                _leaked.append(used)
            else:
                used.cut_off()
