"""The arena: the memory that blocks cross in, its slots, and the transports it is offered by.

One lock guards everything that several threads of a client look at: the ledger here, and each session's
books. It is held for bookkeeping only, never while bytes are copied or sent. ``changed`` is notified when
slots or requests may have become free.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from ostraca.core.ledger import Ledger
from ostraca_fabric.adapters.inline_arena import InlineArenaEnd
from ostraca_fabric.errors import TransportError, UsageError
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.slots import SlotPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from ostraca.settings import ClientSettings
    from ostraca_fabric.ports.transport import ArenaEnd


class Arena:
    """Memory, slots and transports of one client. Thread-safe where it says so."""

    def __init__(self, settings: ClientSettings) -> None:
        size_bytes = settings.arena_bytes_whole
        try:
            self._memory = HugeMemory(size_bytes, prefault=settings.prefault)
        except OSError as error:
            raise UsageError(
                f"an arena of {size_bytes} bytes does not fit this machine ({error}): lower arena_bytes in "
                "the settings"
            ) from error
        self.view = self._memory.view[:size_bytes]
        self.array = self._memory.array[:size_bytes]
        self.size_bytes = size_bytes
        self.chunk_bytes = settings.chunk_bytes
        self._pid = os.getpid()
        self.changed = threading.Condition(threading.Lock())
        self.on_changed: Callable[[], None] = _nobody
        """Called with ``changed`` held, and must not block."""

        slots = SlotPool(size_bytes, settings.chunk_bytes)
        self.ledger = Ledger(slots, quarantine_bytes_max=settings.quarantine_bytes_max)
        """Hold ``changed`` to use it."""
        self.ends: Mapping[str, ArenaEnd] = self._ends(settings, slots)
        """What was offered last."""

    def _ends(self, settings: ClientSettings, slots: SlotPool) -> dict[str, ArenaEnd]:
        """Set up the transports that can be set up here. Raises TransportError when there is none."""
        found: dict[str, ArenaEnd] = {}
        problems = []
        for name in settings.transports:
            try:
                found[name] = _end(name, self._memory, slots)
            except TransportError as error:
                problems.append(f"{name}: {error}")
        if not found:
            self._memory.close()
            raise TransportError(
                f'no transport can be set up here ({"; ".join(problems)}); add "inline" to transports'
            )
        return found

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that made it.

        In a forked child the memory is not there, and the lock may be held by a thread that is not either.
        """
        return os.getpid() == self._pid

    def slots_of(self, slot_bytes: int) -> int:
        """Count the slots of this size that the whole arena holds."""
        return self.size_bytes // self.chunk_bytes * (self.chunk_bytes // slot_bytes)

    def take_up_to(self, count: int, slot_bytes: int) -> NDArray[np.int64] | None:
        """Take *count* slots, or half as many, and so on; None when not even one is free. Thread-safe."""
        with self.changed:
            while count:
                offsets = self.ledger.take(count, slot_bytes)
                if offsets is not None:
                    return offsets
                count //= 2
        return None

    def give(self, offsets: NDArray[np.int64]) -> None:
        """Give back slots that no request ever named. Thread-safe."""
        if not self.is_ours:
            return
        with self.changed:
            self.ledger.give(offsets)
            self.tell_changed()

    @property
    def must_renew(self) -> bool:
        """Whether slots wait for word that only a new connection brings: ``renew`` comes before it then."""
        with self.changed:
            return self.ledger.is_stranded

    def renew(self) -> None:
        """See to it that nothing of earlier connections lands through the ends. Raises TransportError."""
        for end in self.ends.values():
            end.renew()

    def successors(self) -> dict[str, ArenaEnd]:
        """Make ends to offer on a connection that begins while another one goes on. Raises TransportError."""
        found: dict[str, ArenaEnd] = {}
        try:
            for name, end in self.ends.items():
                found[name] = end.successor()
        except TransportError:
            for end in found.values():
                end.cut_off()
            raise
        return found

    def tell_changed(self) -> None:
        """Slots or requests may have become free. Hold ``changed``."""
        self.changed.notify_all()
        self.on_changed()

    def close(self, *, is_used: bool = False) -> None:
        """Stop offering the memory, and unmap it unless something may still land there, or *is_used* here.

        No session may be left.
        """
        for end in self.ends.values():
            end.close()
        with self.changed:
            is_quiet = not is_used and not self.ledger.quarantined_bytes
        # Views that callers still hold keep it mapped in either case.
        self.view.release()
        del self.array
        if is_quiet:
            self._memory.close()
        else:
            self._memory.leak()


def _nobody() -> None:
    """Nobody waits but those that wait for ``changed``."""


def _end(name: str, memory: HugeMemory, slots: SlotPool) -> ArenaEnd:
    """Make one transport's end. NIXL is imported only when it is wanted: it takes a quarter of a second."""
    if name == "inline":
        return InlineArenaEnd(memory.view, slots)
    from ostraca_fabric.adapters.nixl_arena import NixlArenaEnd  # noqa: PLC0415

    return NixlArenaEnd(memory, slots)
