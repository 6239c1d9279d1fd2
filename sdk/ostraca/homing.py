"""Going back: a worker that had to go to another agent returns to one that it prefers, once that is there.

The order of a client's addresses says what it prefers: first the agent of its own host, most often. While it
is with a later one, a thread says Hello at those before, on connections that offer no arena and are closed at
once. Where it is welcome, the client goes there as it would from an agent that ends: nothing that is under
way is lost. A process that has said that it ends is not gone back to, though it may answer for a while.

One that does not stay is gone back to less and less often::

    away --return_after_s--> back --lost soon--> away --2 x return_after_s--> back -- ... 32 x
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ostraca.dial import dial
from ostraca_fabric.errors import ConnectError, ProtocolError
from ostraca_fabric.threads import show_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostraca.dial import Caller
    from ostraca.settings import ClientSettings
    from ostraca_fabric.wire.address import Address

log = logging.getLogger("ostraca")

_DOUBLINGS_MAX = 5
_LASTED_PAUSES = 2.0
"""A return that lasted for so many of the pauses before it was a good one: the next begins anew."""


class Pauses:
    """How long to stay with another agent before going back. Not thread-safe; times are of one clock."""

    def __init__(self, first_s: float) -> None:
        """Wait for *first_s* at first."""
        self._first_s = first_s
        self._returns = 0
        self._returned_s = 0.0

    @property
    def pause_s(self) -> float:
        """How long to wait now."""
        return min(self._first_s * 2.0 ** min(self._returns, _DOUBLINGS_MAX), threading.TIMEOUT_MAX)

    def left(self, now_s: float) -> None:
        """Note that the client is away: it may have been back since the last time."""
        if now_s - self._returned_s >= _LASTED_PAUSES * self.pause_s:
            self._returns = 0

    def returned(self, now_s: float) -> None:
        """Note that it has gone back."""
        self._returns += 1
        self._returned_s = now_s


class Homing:
    """Looks in the background whether a client may go back. Thread-safe. Close it."""

    def __init__(
        self,
        caller: Caller,
        settings: ClientSettings,
        preferred: Callable[[], Sequence[Address]],
        has_ended: Callable[[bytes], bool],
        go: Callable[[Address], bool],
    ) -> None:
        """Look nowhere yet.

        *preferred* names the addresses that the client would rather be at than where it is, *has_ended* tells
        of a start of an agent whether it is one to go to no more, and *go* goes to an address: it says
        whether it did.
        """
        self._caller = replace(caller, ends={}, features=())
        self._settings = settings
        self._preferred = preferred
        self._has_ended = has_ended
        self._go = go
        self._lock = threading.Lock()  # guards what follows
        self._pauses = Pauses(settings.return_after_s)
        self._is_running = False
        self._closed = threading.Event()

    def look(self) -> None:
        """Begin to look, if the client is away and nobody does. Never blocks."""
        with self._lock:
            if self._is_running or self._closed.is_set() or not self._preferred():
                return
            self._pauses.left(time.monotonic())
            with suppress(
                RuntimeError
            ):  # this process may have no more threads, and stays until it dials anew
                threading.Thread(target=self._run, name="ostraca-home", daemon=True).start()
                self._is_running = True

    def close(self) -> None:
        """Look no more. A Hello that is out may still be answered; that harms nobody."""
        self._closed.set()

    def _run(self) -> None:
        show_name("home")
        while True:
            with self._lock:
                addresses = self._preferred()
                if self._closed.is_set() or not addresses:
                    self._is_running = False
                    return
                pause_s = self._pauses.pause_s
            if not self._closed.wait(pause_s):
                self._try(self._preferred())

    def _try(self, addresses: Sequence[Address]) -> None:
        """Go to the first of these where the client is welcome."""
        for address in addresses:
            if self._closed.is_set():
                return
            if self._is_welcome_at(address) and self._go(address):
                with self._lock:
                    self._pauses.returned(time.monotonic())
                return

    def _is_welcome_at(self, address: Address) -> bool:
        try:
            dialled = dial([address], self._caller, until_s=time.monotonic() + self._settings.handshake_s_max)
        except (ConnectError, ProtocolError) as error:
            log.debug("%s is no agent to go back to yet: %s", address, error)
            return False
        dialled.line.close()
        return not self._has_ended(dialled.welcome.start_id)
