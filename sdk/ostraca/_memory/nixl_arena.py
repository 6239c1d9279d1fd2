"""Arena end of the NIXL transport: registration and progress.

The agent moves the bytes. Each arena has a NIXL agent of its own, even with several arenas in a process: the
metadata then describes that arena, with regions offered beside it, and nothing else. A worker never gets the
metadata of its Ostraca agent, so it has no access to the agent's memory.

Creating a NIXL agent takes 25 ms of a core, because UCX inspects the machine's devices in thousands of system
calls. The successor may therefore be created in advance. Until its use no other process has the metadata,
and the successor makes no progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from ostraca._memory.offered_regions import OfferedRegions
from ostraca_fabric.errors import TransportError
from ostraca_fabric.nixl.runtime import NAME, RegisteredMemory, unique_name
from ostraca_fabric.ports.transport import RegionPlace
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.tables.slots import SlotPool
from ostraca_fabric.wire.messages import ArenaOffer

_leaked: list[object] = []
"""Registrations left during transfers not known to have ended: a peer may still reach their memory."""


class NixlArenaEnd:
    """NIXL offer of *memory*, cut into *slots*.

    Raises TransportError without NIXL. Blocks for some 100 ms. The owner calls ``progress`` about every 0.5
    ms from Hello to Welcome, and while a request is under way.
    """

    name = NAME
    needs_progress = True

    progress: Callable[[], None]
    """Progress of the registration in use, from any thread."""

    def __init__(
        self,
        memory: HugeMemory,
        slots: SlotPool,
        *,
        label: str = "worker",
        spare: RegisteredMemory | None = None,
    ) -> None:
        assert slots.memory_bytes <= memory.size_bytes
        self._memory = memory
        self._slots = slots
        self._label = label
        self._making = threading.Lock()  # held while registrations change
        self._is_closed = False
        self._spare: RegisteredMemory | None = None  # never offered
        self._use(spare or self._register())

    def _register(self) -> RegisteredMemory:
        return RegisteredMemory(unique_name(self._label), self._memory.address, self._slots.memory_bytes)

    def _use(self, registered: RegisteredMemory) -> None:
        self._used, self.progress, self.has_offer = registered, registered.progress, True
        self._regions = OfferedRegions(registered)

    def offer(self) -> ArenaOffer:
        """Return the offer."""
        return ArenaOffer(
            transport=NAME,
            arena_bytes=self._slots.memory_bytes,
            chunk_bytes=self._slots.chunk_bytes,
            base=self._memory.address,
            metadata=self._used.metadata,
        )

    def offer_region(self, region: RegionPlace) -> bytes | None:
        """Return the metadata of peers for a region, once it is registered."""
        offer = self._regions.offer(region)
        return offer.result() if offer.done() and offer.exception() is None else None

    def prepare_renewal(self) -> None:
        """Create the next NIXL agent in advance, unknown to any peer until its use."""
        with self._making, suppress(TransportError):
            if self._spare is None and not self._is_closed:
                self._spare = self._register()

    def renew(self) -> None:
        """Replace the NIXL agent by another.

        The previous agent goes while the memory is still mapped, with its endpoints and their unprocessed
        data.
        """
        with self._making:
            if not self._is_closed:
                self._used.close()
                self.has_offer = False
                spare, self._spare = self._spare, None
                self._use(spare or self._register())

    def successor(self) -> NixlArenaEnd:
        """Return another end with a NIXL agent of its own."""
        with self._making:
            spare, self._spare = self._spare, None
        return NixlArenaEnd(self._memory, self._slots, label=self._label, spare=spare)

    def cut_off(self) -> None:
        """Remove the NIXL agent, while the memory is still mapped.

        The agent's endpoints and their unprocessed data go too.
        """
        self._close(self._used)

    def close(self) -> None:
        """Deregister the memory, unless slots are in quarantine.

        With slots in quarantine the registration stays, and the caller must leak the memory.
        """
        if self._slots.quarantined_bytes:
            _leaked.append(self._used)
            self._close(None)
        else:
            self._close(self._used)

    def _close(self, used: RegisteredMemory | None) -> None:
        with self._making:
            self._is_closed = True
            for each in (used, self._spare):
                if each is not None:
                    each.close()
