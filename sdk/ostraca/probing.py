"""Probing: addresses that do not answer, and whether they do again.

Dialling such an address costs whoever needs the connection all of its time. So it is held off: nobody dials
it, and while the client has no session a thread says Hello there now and then, on connections that offer no
arena and are closed at once. An address that answers, or that refuses, may be dialled again.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ostraca.core.silence import pause_s
from ostraca.dial import UnreachableError, dial
from ostraca_fabric.errors import ConnectError, ProtocolError
from ostraca_fabric.threads import show_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ostraca.dial import Caller
    from ostraca.settings import ClientSettings
    from ostraca_fabric.wire.address import Address


class Prober:
    """The addresses that are held off. Thread-safe. Close it."""

    def __init__(
        self,
        caller: Caller,
        settings: ClientSettings,
        is_needed: Callable[[], bool],
        on_found: Callable[[], None],
    ) -> None:
        """Hold nothing off yet; *is_needed* tells whether the client is without a session, and *on_found* is
        called when an address answers again.
        """
        self._caller = replace(caller, ends={}, features=())
        self._settings = settings
        self._is_needed = is_needed
        self._on_found = on_found
        self._lock = threading.Lock()  # guards what follows
        self._held_off: list[Address] = []
        self._is_running = False
        self._closed = threading.Event()

    def hold_off(self, addresses: Iterable[Address]) -> None:
        """Have nobody dial these addresses before they have answered a probe. ``look`` begins with those."""
        with self._lock:
            self._held_off += [each for each in addresses if each not in self._held_off]

    def answers(self, address: Address) -> None:
        """Hold an address off no more: it has answered somebody else."""
        with self._lock:
            if address in self._held_off:
                self._held_off.remove(address)

    def at_hand(self, addresses: Sequence[Address]) -> list[Address]:
        """Return the addresses that may be dialled, in order."""
        with self._lock:
            return [each for each in addresses if each not in self._held_off]

    def look(self) -> None:
        """Begin to probe what is held off, if nobody does. Never blocks."""
        with self._lock:
            if self._is_running or self._closed.is_set() or not self._held_off:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._run, name="ostraca-prober", daemon=True).start()
        except RuntimeError:  # this process may have no more threads, and the next call tries again
            with self._lock:
                self._is_running = False

    def close(self) -> None:
        """Probe no more. A Hello that is out may still be answered; that harms nobody."""
        self._closed.set()

    def _run(self) -> None:
        show_name("prober")
        rounds = 0
        while True:
            with self._lock:
                if self._closed.is_set() or not self._held_off or not self._is_needed():
                    self._is_running = False
                    return
                held_off = tuple(self._held_off)
            if rounds:
                first_s, longest_s = self._settings.redial_s, self._settings.redial_max_s
                self._closed.wait(pause_s(rounds, first_s=first_s, longest_s=longest_s))
            rounds += 1
            for address in held_off:
                if not self._closed.is_set() and self._is_answered_at(address):
                    self.answers(address)
                    self._on_found()

    def _is_answered_at(self, address: Address) -> bool:
        """Say whether who is there answers in time, be it by a refusal."""
        try:
            dialled = dial([address], self._caller, until_s=time.monotonic() + self._settings.handshake_s_max)
        except UnreachableError as error:
            return address not in error.silent
        except (ConnectError, ProtocolError):
            return True
        dialled.line.close()
        return True
