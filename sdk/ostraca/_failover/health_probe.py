"""Health probe: trial Hello to addresses that did not answer.

Dialling a silent address costs an operation all of its time. Such an address is held off: operations don't
dial it. While the client has no session, a thread says Hello there with backoff, on connections without an
arena that are closed at once. An address that answers or refuses may be dialled again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ostraca._connection.credentials import TokenError
from ostraca._connection.dial import UnreachableError, say_hello
from ostraca_fabric.errors import ConnectError, ProtocolError
from ostraca_fabric.policies.backoff import Backoff
from ostraca_fabric.runtime.threads import BackgroundTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ostraca._connection.dial import ClientIdentity
    from ostraca.settings import ClientSettings
    from ostraca_fabric.wire.address import Address


class HealthProbe:
    """Held-off addresses and their health probes. Thread-safe. Close it."""

    def __init__(
        self,
        identity: ClientIdentity,
        settings: ClientSettings,
        is_needed: Callable[[], bool],
        on_found: Callable[[], None],
    ) -> None:
        """Begin with no address held off.

        *is_needed* tells whether the client is without a session. *on_found* is called when an address
        answers again.
        """
        self._identity = identity
        self._settings = settings
        self._on_found = on_found
        self._lock = threading.Lock()  # guards the next field
        self._held_off: list[Address] = []
        self._task = BackgroundTask(
            "probe",
            self._probe,
            is_needed=lambda: bool(self._held_off) and is_needed(),
            pauses_s=self._pauses_s,
        )

    def hold_off(self, addresses: Iterable[Address]) -> None:
        """Exclude these addresses from dials until a probe is answered.

        ``look`` starts the probes.
        """
        with self._lock:
            self._held_off += [each for each in addresses if each not in self._held_off]

    def answers(self, address: Address) -> None:
        """Release an address after an answer on another connection."""
        with self._lock:
            if address in self._held_off:
                self._held_off.remove(address)

    def at_hand(self, addresses: Sequence[Address]) -> list[Address]:
        """Return the addresses available for dials, in order."""
        with self._lock:
            return [each for each in addresses if each not in self._held_off]

    def look(self) -> None:
        """Start the probes of held-off addresses, if none run. Never blocks."""
        self._task.start()

    def close(self) -> None:
        """Stop the probes. A late answer to a Hello is harmless."""
        self._task.close()

    def _pauses_s(self) -> Iterator[float]:
        longest_s = self._settings.redial_max_s
        backoff = Backoff(min(self._settings.redial_s, longest_s), longest_s)
        yield 0.0
        while True:
            yield backoff.next_s()

    def _probe(self) -> None:
        with self._lock:
            held_off = tuple(self._held_off)
        for address in held_off:
            if not self._task.is_closed and self._is_answered_at(address):
                self.answers(address)
                self._on_found()

    def _is_answered_at(self, address: Address) -> bool:
        """Tell whether an agent answers in time, even with a refusal."""
        try:
            say_hello(address, self._identity, within_s=self._settings.handshake_s_max)
        except UnreachableError as error:
            return address not in error.silent
        except TokenError:  # the token is missing: no agent was asked
            return False
        except (ConnectError, ProtocolError):
            pass
        return True
