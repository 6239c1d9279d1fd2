"""Failback: return of a worker to a preferred agent, once that agent answers.

The order of a client's addresses is the order of preference, usually with the own host's agent first. While
the client uses a later address, a thread says Hello at the earlier addresses, on connections without an arena
that are closed at once. If an agent accepts, the client moves there as in a failover: no operation under way
is lost. A process after its announced end is no target, even while the process still answers.

Failback to an unstable agent becomes rarer and rarer::

    away --failback_after_s--> back --lost soon--> away --2 x failback_after_s--> back -- ... 32 x
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from ostraca._connection.dial import say_hello
from ostraca_fabric.errors import ConnectError, ProtocolError
from ostraca_fabric.policies.backoff import Backoff
from ostraca_fabric.runtime.threads import BackgroundTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ostraca._connection.dial import ClientIdentity
    from ostraca.settings import ClientSettings
    from ostraca_fabric.wire.address import Address

log = logging.getLogger("ostraca")

_PAUSE_GROWTH_MAX = 32
_LASTED_PAUSES = 2.0
"""A return longer than this many of its preceding pauses succeeded: the pauses start anew."""


class FailbackPauses:
    """Backoff of failback attempts. Not thread-safe; times are of one clock."""

    def __init__(self, first_s: float) -> None:
        """Begin with a pause of *first_s*."""
        longest_s = min(_PAUSE_GROWTH_MAX * first_s, threading.TIMEOUT_MAX)
        self._backoff = Backoff(min(first_s, longest_s), longest_s)
        self._returned_s = 0.0

    @property
    def pause_s(self) -> float:
        """Length of the next pause."""
        return self._backoff.bound_s

    def note_move(self, now_s: float) -> None:
        """Note that the client uses another agent, perhaps after a return."""
        if now_s - self._returned_s >= _LASTED_PAUSES * self.pause_s:
            self._backoff.reset()

    def note_return(self, now_s: float) -> None:
        """Note a return to a preferred agent."""
        self._backoff.next_s()
        self._returned_s = now_s


class Failback:
    """Background search for a preferred agent. Thread-safe. Close it."""

    def __init__(
        self,
        identity: ClientIdentity,
        settings: ClientSettings,
        preferred: Callable[[], Sequence[Address]],
        has_ended: Callable[[bytes], bool],
        go: Callable[[Address], bool],
    ) -> None:
        """Begin without a search.

        *preferred* returns the addresses preferred to the current address. *has_ended* tells whether the
        agent with a start id is excluded. *go* moves the client to an address and tells whether this
        succeeded.
        """
        self._identity = identity
        self._settings = settings
        self._preferred = preferred
        self._has_ended = has_ended
        self._go = go
        self._pauses = FailbackPauses(settings.failback_after_s)  # used by the task's thread alone
        self._task = BackgroundTask(
            "failback", self._try, is_needed=lambda: bool(preferred()), pauses_s=self._pauses_s
        )

    def look(self) -> None:
        """Start the search if the client is away and none runs. Never blocks."""
        self._task.start()

    def close(self) -> None:
        """Stop the search. A late answer to a Hello is harmless."""
        self._task.close()

    def _pauses_s(self) -> Iterator[float]:
        self._pauses.note_move(time.monotonic())
        while True:
            yield self._pauses.pause_s

    def _try(self) -> None:
        """Move to the first preferred address with a willing agent."""
        for address in self._preferred():
            if self._task.is_closed:
                return
            if self._is_welcome_at(address) and self._go(address):
                self._pauses.note_return(time.monotonic())
                return

    def _is_welcome_at(self, address: Address) -> bool:
        try:
            welcome = say_hello(address, self._identity, within_s=self._settings.handshake_s_max)
        except (ConnectError, ProtocolError) as error:
            log.debug("no failback to %s yet: %s", address, error)
            return False
        return not self._has_ended(welcome.start_id)
