"""The worker's end over NIXL: it registers its arena and makes progress; the bytes are moved by the agent.

A NIXL agent of its own per arena, also when a process has several: its metadata then tells an agent about
that arena and nothing else. A worker never learns its agent's metadata, so it has no handle to the agent's
memory.

To make a NIXL agent takes 25 ms of a core: UCX looks at the machine's devices in thousands of system calls.
So the one that takes over may be made beforehand. Until then nobody has its metadata, and it makes no
progress.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.adapters.nixl_identity import NAME, sealed, unique_name
from ostraca_fabric.adapters.nixl_runtime import NixlAgent
from ostraca_fabric.errors import TransportError
from ostraca_fabric.wire.messages import ArenaOffer

if TYPE_CHECKING:
    from ostraca_fabric.adapters.nixl_runtime import Registration
    from ostraca_fabric.memory import HugeMemory
    from ostraca_fabric.slots import SlotPool

_given_up: list[object] = []
"""Ends closed while a transfer was not known to have ended: a peer may still reach their memory."""


@dataclass(frozen=True, slots=True)
class _Reachable:
    """The arena, registered with a NIXL agent, and the offer that tells of it."""

    agent: NixlAgent
    registration: Registration
    offer: ArenaOffer

    def cut_off(self) -> None:
        """Take the memory back. The agent goes with the last reference to this."""
        self.agent.deregister(self.registration)


class NixlArenaEnd:
    """Offers *memory*, cut into *slots*. Raises TransportError without NIXL. Blocks for some 100 ms.

    From its Hello until the Welcome, and while a request is out, its owner calls ``progress`` about every 0.5
    ms.
    """

    name = NAME

    def __init__(
        self, memory: HugeMemory, slots: SlotPool, *, label: str = "worker", made: _Reachable | None = None
    ) -> None:
        assert slots.memory_bytes <= memory.size_bytes
        self._memory = memory
        self._address = memory.address
        self._slots = slots
        self._label = label
        self._lock = threading.Lock()
        self._making = threading.Lock()  # held while a NIXL agent is made; taken before the other
        self._is_closed = False
        self._spare: _Reachable | None = None  # never offered to anybody
        self._used: _Reachable | None = made or self._made()
        self._offer = self._used.offer

    def _made(self) -> _Reachable:
        """Make a NIXL agent that reaches the arena."""
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
        return _Reachable(agent, registration, offer)

    def offer(self) -> ArenaOffer:
        """As in the port."""
        return self._offer

    def progress(self) -> None:
        """As in the port; from any thread. Does nothing after ``close``, or when another thread is at it."""
        if self._lock.acquire(blocking=False):
            try:
                if self._used is not None:
                    self._used.agent.progress()
            finally:
                self._lock.release()

    @property
    def needs_progress(self) -> bool:
        """As in the port."""
        return True

    def prepare_renewal(self) -> None:
        """As in the port: make the NIXL agent that is to take over, which nobody hears of until it does."""
        with self._making:
            if self._spare is None and not self._is_closed:
                with suppress(TransportError):
                    self._spare = self._made()

    def renew(self) -> None:
        """As in the port: another NIXL agent takes over. The one before, its endpoints and what they have
        received and not dealt with go together, while the memory is still mapped.
        """
        with self._making, self._lock:
            if self._is_closed:
                return
            used, self._used = self._used, None
            if used is not None:
                used.cut_off()
            del used
            spare, self._spare = self._spare, None
            self._used = spare or self._made()
            self._offer = self._used.offer

    def successor(self) -> NixlArenaEnd:
        """As in the port: it has a NIXL agent of its own."""
        with self._making:
            spare, self._spare = self._spare, None
        return NixlArenaEnd(self._memory, self._slots, label=self._label, made=spare)

    def cut_off(self) -> None:
        """As in the port: the NIXL agent goes, its endpoints and what they have received and not dealt with,
        while the memory is still mapped.
        """
        with self._making, self._lock:
            self._is_closed = True
            for each in (self._used, self._spare):
                if each is not None:
                    each.cut_off()
            self._used = self._spare = None

    def close(self) -> None:
        """As in the port. With slots in quarantine the registration stays, and the memory must be leaked."""
        with self._making, self._lock:
            self._is_closed = True
            used, self._used = self._used, None
            spare, self._spare = self._spare, None
            if spare is not None:
                spare.cut_off()
            if used is None:
                return
            if self._slots.quarantined_bytes:
                _given_up.append(used)
            else:
                used.cut_off()
