"""Background work of a client beside its session: probes, failback, redials, transfer reconciliation.

Each is a repeated task, started whenever possibly needed; ``start`` never blocks. Connections made in this
module have no arena and are closed at once. After ``close``, a late answer is harmless.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, repeat

from ostraca._connection.credentials import TokenError
from ostraca._connection.dial import ClientIdentity, ControlChannel, UnreachableError, dial, say_hello
from ostraca._memory.arena import Arena
from ostraca.settings import ClientSettings
from ostraca_fabric.errors import ConnectError, OstracaError, ProtocolError
from ostraca_fabric.policies.backoff import Backoff
from ostraca_fabric.runtime.threads import BackgroundTask
from ostraca_fabric.wire.address import Address
from ostraca_fabric.wire.messages import PastSettled, SettlePast

log = logging.getLogger("ostraca")

_PAUSE_GROWTH_MAX = 32
_LASTED_PAUSES = 2.0
"""A return longer than this many of its preceding pauses succeeded: the pauses start anew."""

_AGAIN_S = 1.0
_DIAL_S = 2.0
_ANSWER_S = 5.0
_REDIAL_S = 1.0
"""Longest dial without an operation: an operation that dials waits for its end."""

_REQUEST = 1


class HealthProbe(BackgroundTask):
    """Held-off addresses and their health probes.

    Dialling a silent address costs an operation all of its time. Such an address is held off: operations
    don't dial it. While the client has no session, a thread says Hello there with backoff. An address that
    answers or refuses may be dialled again.
    """

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
        super().__init__(
            "probe",
            self._probe,
            is_needed=lambda: bool(self._held_off) and is_needed(),
            pauses_s=self._probe_pauses_s,
        )

    def hold_off(self, addresses: Iterable[Address]) -> None:
        """Exclude these addresses from dials until a probe is answered.

        ``start`` begins the probes.
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

    def _probe_pauses_s(self) -> Iterator[float]:
        longest_s = self._settings.redial_max_s
        backoff = Backoff(min(self._settings.redial_s, longest_s), longest_s)
        yield 0.0
        while True:
            yield backoff.next_s()

    def _probe(self) -> None:
        with self._lock:
            held_off = tuple(self._held_off)
        for address in held_off:
            if not self.is_closed and self._is_answered_at(address):
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


class FailbackPauses:
    """Backoff of failback attempts: failback to an unstable agent becomes rarer and rarer.

    Not thread-safe; times are of one clock::

        away --failback_after_s--> back --lost soon--> away --2 x failback_after_s--> ... 32 x
    """

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


class Failback(BackgroundTask):
    """Return of a worker to a preferred agent, once that agent answers.

    The order of a client's addresses is the order of preference, usually with the own host's agent first.
    While the client uses a later address, a thread says Hello at the earlier addresses. If an agent accepts,
    the client moves there as in a failover: no operation under way is lost. A process after its announced end
    is no target, even while the process still answers.
    """

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
        super().__init__(
            "failback", self._try, is_needed=lambda: bool(preferred()), pauses_s=self._search_pauses_s
        )

    def _search_pauses_s(self) -> Iterator[float]:
        self._pauses.note_move(time.monotonic())
        while True:
            yield self._pauses.pause_s

    def _try(self) -> None:
        """Move to the first preferred address with a willing agent."""
        for address in self._preferred():
            if self.is_closed:
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


class Redial(BackgroundTask):
    """Dials for rows whose agent may still use them, though their operation has ended.

    After the loss of the connection, only another one brings the agent's report, and a program that waits for
    its rows may start no operation.
    """

    def __init__(self, settings: ClientSettings, arena: Arena, dial: Callable[[float], object]) -> None:
        """Begin without a thread; *dial* dials until a time if the session is lost, and may raise."""
        self._arena = arena
        self._dial = dial
        self._backoff = Backoff(settings.redial_s, settings.redial_max_s)
        super().__init__("redial", self._redial, is_needed=self._is_awaited, pauses_s=self._redial_pauses_s)

    def _is_awaited(self) -> bool:
        with self._arena.lock:
            return self._arena.ledger.has_waiters

    def _redial_pauses_s(self) -> Iterator[float]:
        self._backoff.reset()
        while True:
            yield self._backoff.next_s()

    def _redial(self) -> None:
        try:
            self._dial(time.monotonic() + _REDIAL_S)
        except (OstracaError, OSError) as error:
            log.debug("no agent takes over from the lost one: %s", error)
        else:
            self._backoff.reset()


class TransferReconciler(BackgroundTask):
    """Questions to earlier agents whether their transfers have ended.

    After a failover, slots of the first agent's transfers are in quarantine, and only that agent can report
    the end. While such slots exist, a thread looks for the agent at every address until the report arrives. A
    connection to the current agent is closed at once: the client's own session asks the current agent.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        identity: ClientIdentity,
        arena: Arena,
        agent_now: Callable[[], str],
    ) -> None:
        """Begin without questions; *agent_now* names the current agent."""
        self._addresses = addresses
        self._identity = identity.without_arena()
        self._arena = arena
        self._agent_now = agent_now
        super().__init__(
            "reconciler",
            self._ask_all,
            is_needed=lambda: bool(self._owing()),
            pauses_s=lambda: chain((0.0,), repeat(_AGAIN_S)),
        )

    def _owing(self) -> frozenset[str]:
        with self._arena.changed:
            return self._arena.ledger.owing_agents - {self._agent_now()}

    def _ask_all(self) -> None:
        for address in self._addresses:
            if self._owing() and not self.is_closed:
                self._settle_at(address)

    def _settle_at(self, address: Address) -> None:
        """Ask the agent at *address*, if it owes a report."""
        try:
            channel = dial([address], self._identity, until_s=time.monotonic() + _DIAL_S)
        except (ConnectError, ProtocolError) as error:
            log.debug("no report on earlier transfers from %s: %s", address, error)
            return
        with closing(channel.stream):
            agent = channel.welcome.agent
            if agent not in self._owing():
                return
            with self._arena.changed:
                past = self._arena.ledger.meet_agent(agent, channel.welcome.start_id)
                self._arena.ledger.tell_changed()
            if past and _ask_settled(channel, until_s=time.monotonic() + _ANSWER_S):
                with self._arena.changed:
                    self._arena.ledger.settle_past(past)
                    self._arena.ledger.tell_changed()


def _ask_settled(channel: ControlChannel, *, until_s: float) -> bool:
    """Tell whether the agent reports by *until_s* that no transfer is under way."""
    try:
        return isinstance(channel.ask(SettlePast(_REQUEST), until_s=until_s), PastSettled)
    except (OSError, ProtocolError) as error:
        log.debug("no report on earlier transfers from %s: %s", channel.welcome.agent, error)
    return False
