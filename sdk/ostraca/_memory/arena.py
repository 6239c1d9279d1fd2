"""Arena: memory for all block transfers, with slots and transports.

A single lock guards all state shared by a client's threads: the ledger, and each session's bookkeeping. The
lock is held for bookkeeping only, never while bytes are copied or sent. ``changed`` is notified when slots or
requests may be free.

If NIXL can't be used, a log line names cause and loss. Each line is logged once per process: clients
reconnect, and a process may have many clients.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ostraca._memory.inline_arena import InlineArenaEnd
from ostraca._protocol.ledger import Ledger
from ostraca.settings import ClientSettings
from ostraca_fabric.errors import ConnectError, NoTransportError, TransportError
from ostraca_fabric.ports.transport import ArenaEnd
from ostraca_fabric.runtime.memory import HugeMemory, rooms
from ostraca_fabric.runtime.threads import run_in_background, show_name
from ostraca_fabric.tables.slots import SlotPool
from ostraca_fabric.wire.address import Address, UnixAddress

log = logging.getLogger("ostraca")

_leaked: list[Ledger] = []
"""Ledgers left with slots in quarantine, and with the regions of withheld rows: bytes may land there."""

_LOST = "blocks cross {instead}, over the connection, more slowly"
_LINES_MAX = 256

_logged: set[str] = set()


def note_missing(transport: str, error: Exception, *, instead: str) -> None:
    """Log that a transport can't be set up, unless none is left *instead*."""
    if transport != instead:
        _say(logging.WARNING, f"{transport} is not used: {error}; {_LOST.format(instead=instead)}")


def note_refused(address: Address, offered: Sequence[str], chosen: str) -> None:
    """Log that an agent did not take the transport offered first.

    The line is a warning on the agent's own host, where shared memory should work. The line is also a warning
    if a variable of this process may be the cause.
    """
    if not offered or not chosen or chosen == offered[0]:
        return
    from ostraca_fabric.nixl.runtime import foreign_variables  # noqa: PLC0415 (most need none of it)

    others = foreign_variables()
    is_odd = bool(others) or isinstance(address, UnixAddress)
    cause = f", perhaps because of {others}, set for this process" if others else ""
    _say(
        logging.WARNING if is_odd else logging.INFO,
        f"{offered[0]} is not used with {address}: the agent lacks this transport, or can't reach this "
        f"process over it{cause}; see the agent's log; {_LOST.format(instead=chosen)}",
    )


def _say(level: int, line: str) -> None:
    if line not in _logged and len(_logged) < _LINES_MAX:
        _logged.add(line)
        log.log(level, "%s", line)


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
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Condition over ``lock``: take ``lock`` itself unless you wait, in a third of the time."""

        slots = SlotPool(size_bytes, settings.chunk_bytes)
        self.ledger = Ledger(slots, quarantine_bytes_max=settings.quarantine_bytes_max)
        """Hold ``lock`` for any use."""

        self.ledger.listeners.append(self.changed.notify_all)
        self.offers_regions = True
        """Whether regions are offered to agents: False once an agent could not use an offer."""

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

    def stop_offers(self, why: str) -> None:
        """Offer no more regions: an agent can't use the offers, and ends each connection."""
        self.offers_regions = False
        log.warning("Blocks of regions are copied through the arena: %s", why)

    def give(self, offsets: NDArray[np.int64]) -> None:
        """Give back slots never named in a request. Thread-safe."""
        with self.changed:
            self.ledger.give(offsets)
            self.ledger.tell_changed()

    @property
    def must_renew(self) -> bool:
        """Whether ``renew`` must precede the next connection.

        True if slots wait for a report on a new connection, or an end has nothing to offer.
        """
        with self.changed:
            return bool(self.ledger.owing_agents) or not all(end.has_offer for end in self.ends.values())

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

    def close(self, *, is_used: bool = False) -> None:
        """Stop offering the memory, and unmap it unless still in use.

        The memory stays mapped if transfers may still land there, or with *is_used*. No session may be left.
        """
        for end in self.ends.values():
            end.close()
        with self.changed:
            is_quiet = not is_used and not self.ledger.quarantined_bytes
            if not is_quiet:
                _leaked.append(self.ledger)
        # Views held by callers keep the memory mapped in either case.
        self.view.release()
        del self.array
        self._memory.end(is_quiet=is_quiet)


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


def _end(name: str, memory: HugeMemory, slots: SlotPool) -> ArenaEnd:
    """Build the end of one transport."""
    if name == "inline":
        return InlineArenaEnd(memory.view, slots)
    from ostraca._memory.nixl_arena import NixlArenaEnd  # noqa: PLC0415 (takes a quarter of a second)

    return NixlArenaEnd(memory, slots)
