"""Arena: memory for all block transfers, with slots and transports.

A single lock guards all state shared by a client's threads: the ledger, and each session's bookkeeping. The
lock is held for bookkeeping only, never while bytes are copied or sent. ``changed`` is notified when slots or
requests may be free.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ostraca._memory.inline_arena import InlineArenaEnd
from ostraca._memory.nixl_fallback import note_missing
from ostraca._protocol.ledger import Ledger
from ostraca_fabric.errors import ConnectError, NoTransportError, TransportError
from ostraca_fabric.runtime.memory import HugeMemory, rooms
from ostraca_fabric.runtime.threads import run_in_background, show_name
from ostraca_fabric.tables.slots import SlotPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from ostraca.settings import ClientSettings
    from ostraca_fabric.ports.transport import ArenaEnd


class Arena:
    """Memory, slots and transports of one client. Thread-safe where noted."""

    def __init__(self, settings: ClientSettings) -> None:
        size_bytes = settings.arena_bytes_whole
        _check_room(size_bytes)
        try:
            self._memory = HugeMemory(size_bytes, prefault=settings.prefault)
        except OSError as error:
            raise ConnectError(
                f"an arena of {size_bytes} bytes does not fit this machine ({error}): lower arena_bytes in "
                "the settings"
            ) from error
        self.view = self._memory.view[:size_bytes]
        self.array = self._memory.array[:size_bytes]
        self.size_bytes = size_bytes
        self.chunk_bytes = settings.chunk_bytes
        self._pid = os.getpid()
        self.changed = threading.Condition(threading.Lock())
        self.on_changed: Callable[[], None] = _ignore
        """Called with ``changed`` held; must not block."""

        slots = SlotPool(size_bytes, settings.chunk_bytes)
        self.ledger = Ledger(slots, quarantine_bytes_max=settings.quarantine_bytes_max)
        """Hold ``changed`` for any use."""
        self.ends: Mapping[str, ArenaEnd] = self._ends(settings, slots)
        """The ends offered last."""

    def _ends(self, settings: ClientSettings, slots: SlotPool) -> dict[str, ArenaEnd]:
        """Set up the transports available in this process.

        Raises NoTransportError for none.
        """
        found: dict[str, ArenaEnd] = {}
        problems = []
        for name in settings.transports:
            try:
                found[name] = _end(name, self._memory, slots)
            except TransportError as error:
                problems.append(f"{name}: {error}")
                note_missing(name, error, instead=settings.transports[-1])
        if not found:
            self._memory.close()
            raise NoTransportError(
                f'no transport can be set up here ({"; ".join(problems)}); add "inline" to transports'
            )
        return found

    @property
    def is_ours(self) -> bool:
        """Whether this process created the arena.

        In a forked child the memory is not mapped, and a thread that does not exist there may hold the lock.
        """
        return os.getpid() == self._pid

    def slots_of(self, slot_bytes: int) -> int:
        """Return the number of slots of this size in the whole arena."""
        return self.size_bytes // self.chunk_bytes * (self.chunk_bytes // slot_bytes)

    def take_up_to(self, count: int, slot_bytes: int) -> NDArray[np.int64] | None:
        """Take *count* slots, or half as many, and so on. Thread-safe.

        Returns None if not a single slot is free.
        """
        with self.changed:
            while count:
                offsets = self.ledger.take(count, slot_bytes)
                if offsets is not None:
                    return offsets
                count //= 2
        return None

    def give(self, offsets: NDArray[np.int64]) -> None:
        """Give back slots never named in a request. Thread-safe."""
        if not self.is_ours:
            return
        with self.changed:
            self.ledger.give(offsets)
            self.tell_changed()

    @property
    def must_renew(self) -> bool:
        """Whether ``renew`` must precede the next connection.

        True if slots wait for a report on a new connection, or an end has nothing to offer.
        """
        with self.changed:
            return self.ledger.is_stranded or not all(end.has_offer for end in self.ends.values())

    def renew(self) -> None:
        """Ensure that nothing of earlier connections lands through the ends.

        Raises TransportError if this can't be ensured, or if no end can be offered again.
        """
        for name, end in self.ends.items():
            try:
                end.renew()
            except TransportError as error:
                others = [other for other, each in self.ends.items() if other != name and each.has_offer]
                if end.has_offer or not others:
                    raise
                note_missing(name, error, instead=others[0])

    def successors(self) -> dict[str, ArenaEnd]:
        """Build ends to offer on a second connection beside the current connection.

        Raises TransportError.
        """
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
        """Notify waiters that slots or requests may be free. Hold ``changed``."""
        self.changed.notify_all()
        self.on_changed()

    def close(self, *, is_used: bool = False) -> None:
        """Stop offering the memory, and unmap it unless still in use.

        The memory stays mapped if transfers may still land there, or with *is_used*. No session may be left.
        """
        for end in self.ends.values():
            end.close()
        with self.changed:
            is_quiet = not is_used and not self.ledger.quarantined_bytes
        # Views held by callers keep the memory mapped in either case.
        self.view.release()
        del self.array
        if is_quiet:
            self._memory.close()
        else:
            self._memory.leak()


class ArenaRegistration:
    """Registration of the arena with agents: withdraws a lost connection's offer before the next one.

    With NIXL a renewal takes up to a fifth of a second: a new NIXL agent replaces the previous agent, unless
    a spare is prepared. A caller in need of the next connection waits for the renewal only until its
    deadline. Not thread-safe; close the object.
    """

    def __init__(self, arena: Arena) -> None:
        """Begin without an offer."""
        self._arena = arena
        self._is_due = False
        self._under_way: Future[None] | None = None
        self._preparation: threading.Timer | None = None

    def note_offer(self) -> None:
        """Note a new connection: renew the arena's ends before the next connection.

        Cancels a preparation begun for the previous connection.
        """
        self._is_due = True
        if self._preparation is not None:
            self._preparation.cancel()

    def finish(self, until_s: float) -> None:
        """Ensure that nothing lands through the last offer any more.

        Does nothing after the first success. Raises TransportError. Raises TimeoutError at *until_s*; the
        renewal then continues in the background.
        """
        if not self._is_due:
            return
        if self._under_way is None:
            if not self._arena.must_renew:
                self._is_due = False
                return
            self._under_way = run_in_background("renew", self._arena.renew)
        self._under_way.exception(max(0.0, until_s - time.monotonic()))
        ended, self._under_way = self._under_way, None
        ended.result()
        self._is_due = False

    def prepare(self, transport: str, after_s: float) -> None:
        """Prepare the next offer over *transport* after a while, in a thread."""
        timer = threading.Timer(min(after_s, threading.TIMEOUT_MAX), _prepare, (self._arena.ends[transport],))
        timer.name, timer.daemon = "ostraca-spare", True
        with suppress(RuntimeError):  # without another thread, the next dial is slower
            timer.start()
            self._preparation = timer

    def close(self) -> None:
        """Wait for the end of a running preparation or renewal."""
        if self._preparation is not None:
            self._preparation.cancel()
            self._preparation.join()
        if self._under_way is not None:
            self._under_way.exception()


def _prepare(end: ArenaEnd) -> None:
    show_name("spare")
    end.prepare_renewal()


def _check_room(size_bytes: int) -> None:
    """Check that the arena fits the memory of this process.

    Otherwise the kernel would kill the engine without a message. Raises ConnectError with both numbers.
    """
    least = min(rooms(), key=lambda room: room.free_bytes, default=None)
    if least is not None and size_bytes > least.free_bytes:
        raise ConnectError(
            f"an arena of {size_bytes} bytes does not fit: {least.name} is {least.limit_bytes} bytes, of "
            f"which {least.free_bytes} are free. Lower arena_bytes in the settings, or raise that limit"
        )


def _ignore() -> None:
    """Do nothing: only threads in ``changed.wait`` are waiting."""


def _end(name: str, memory: HugeMemory, slots: SlotPool) -> ArenaEnd:
    """Build the end of one transport."""
    if name == "inline":
        return InlineArenaEnd(memory.view, slots)
    from ostraca._memory.nixl_arena import NixlArenaEnd  # noqa: PLC0415 (takes a quarter of a second)

    return NixlArenaEnd(memory, slots)
