"""Connection manager: keeps a live session with one of the known agents.

After the loss of a session, the next operation with enough time dials again; until a dial succeeds,
operations end as DISCONNECTED. Operations never dial addresses of silent agents. If all addresses are silent,
operations end at once, and a health probe looks for an address that answers again.

Background work is limited to:

- the I/O loop of the live session;
- transfer reconciliation, while earlier agents owe a report on slots;
- the withdrawal of the last arena offer before a dial, and the preparation of the next offer after a dial;
- redials, while rows of regions wait for a report on a lost session;
- connections of callers, after some blocking lookups;
- failover, failback and health probes, as follows.

An agent announces an orderly end. A thread then connects to a second agent over arena ends of its own, while
operations continue on the first session. New operations use the second session once it exists, and the first
session ends after its running operations. A client away from its first address fails back in the same way,
once a preferred agent answers.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from ostraca._connection.caller_connections import CallerConnections
from ostraca._connection.dial import ClientIdentity, ControlChannel, UnreachableError, dial
from ostraca._connection.rpc import ask
from ostraca._connection.session import AgentSession
from ostraca._failover.background import Failback, HealthProbe, Redial, TransferReconciler
from ostraca._memory.arena import Arena, ArenaRegistration
from ostraca._protocol.operations import CALLER_CODES
from ostraca._protocol.specs import VolumeSpec
from ostraca.settings import ClientSettings
from ostraca_fabric.errors import (
    ClosedError,
    ConnectError,
    ProtocolError,
    RefusedError,
    TransportError,
)
from ostraca_fabric.ports.transport import INLINE, ArenaEnd
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.wire.address import Address
from ostraca_fabric.wire.messages import VolumeOpened

log = logging.getLogger("ostraca")


class ConnectionManager:
    """The session of one client, dialled on demand. Thread-safe. Close it."""

    def __init__(
        self,
        addresses: Sequence[Address],
        identity: ClientIdentity,
        arena: Arena,
        settings: ClientSettings,
        worker: str,
    ) -> None:
        """Begin without a session; *worker* is the client's name in logs."""
        self.unreachable_because = ""
        """Reason for the last dial's failure; empty after a success."""

        self.session: AgentSession | None = None
        """The current or last session."""

        self.retired: tuple[AgentSession, ...] = ()
        """Retired sessions still in use."""

        self._addresses = addresses
        self._identity = identity
        self._arena = arena
        self._settings = settings
        self._worker = worker
        self._request_ids = itertools.count(1)
        self._dialling = threading.Lock()  # held while session and _redial_at_s change
        self._redial_at_s = 0.0
        self._closed = threading.Event()
        self._failovers: list[threading.Thread] = []
        self._registration = ArenaRegistration(arena)
        self._reconciler = TransferReconciler(addresses, identity, arena, self._agent_now)
        self._health_probe = HealthProbe(identity, settings, lambda: self.live is None, self.dial_soon)
        self.redial = Redial(settings, arena, self.dial)
        """To be started when rows are held back until an agent's report."""

        self.callers = CallerConnections(identity, settings)
        """Connections on which callers do blocking lookups themselves."""

        self._ended_agents: set[bytes] = set()
        """Start ids of agents that announced their end."""

        self._failback = Failback(
            identity, settings, self._preferred_addresses, self._has_ended, self._fail_back
        )

    @property
    def live(self) -> AgentSession | None:
        """The current session, if alive."""
        session = self.session
        return session if session is not None and session.is_alive else None

    @contextmanager
    def borrow_session(self, until_s: float) -> Iterator[AgentSession]:
        """Lend a live session, acquired meanwhile.

        Raises as ``dial``.
        """
        session = self._acquire_session(until_s)
        try:
            yield session
        finally:
            session.release()

    def find_volume(self, volume: VolumeSpec, until_s: float) -> tuple[AgentSession, int] | None:
        """Return a live session and the volume's handle; None without a session by *until_s*.

        The caller must release the session. Raises RefusedError if the agent refuses to open the volume as
        requested.
        """
        try:
            session = self._acquire_session(min(until_s, time.monotonic() + self._settings.handshake_s_max))
            try:
                return session, self.open_volume(session, volume, until_s)
            except BaseException:
                session.release()
                raise
        except (ConnectError, ProtocolError) as error:
            self.unreachable_because = str(error)
            return None
        except RefusedError as error:
            if error.code in CALLER_CODES:
                raise
            self.unreachable_because = f"{error.code}: {error}"
            return None

    def dial(self, until_s: float) -> AgentSession:
        """Return a live session, dialling if necessary.

        Raises ConnectError, ProtocolError or ClosedError.
        """
        session = self.live
        if session is not None:
            return session
        if not self._dialling.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise ConnectError("another call is still dialling")
        try:
            return self._dial(until_s)
        finally:
            self._dialling.release()

    def open_volume(self, session: AgentSession, volume: VolumeSpec, until_s: float) -> int:
        """Return the volume's handle on a session, opening the volume if necessary.

        Raises as ``ask``.
        """
        handle = session.handles.get(volume.key)
        if handle is None:
            handle = ask(session, volume.message, VolumeOpened, until_s=until_s).handle
            session.volumes[volume.key] = volume
            session.handles[volume.key] = handle
        return handle

    def close(self) -> None:
        """End the session and stop dialling. Requests under way get Disconnected."""
        self._reconciler.close()
        self.redial.close()
        self._health_probe.close()
        self._failback.close()
        self.callers.close()
        self._closed.set()
        with self._dialling:
            self._registration.close()
            for session in (self.session, *self.retired):
                if session is not None:
                    session.close()
        for thread in self._failovers:
            thread.join()

    def _acquire_session(self, until_s: float) -> AgentSession:
        """Return a live session, acquired for the caller.

        Raises as ``dial``.
        """
        session = self.dial(until_s)
        if not session.acquire():  # the session ended in between
            session = self.dial(until_s)
            if not session.acquire():
                raise ConnectError(session.lost_because)
        return session

    def _dial(self, until_s: float) -> AgentSession:
        if self._closed.is_set():
            raise ClosedError("the client is closed: connect again")
        if self.session is not None:
            if self.session.is_alive:
                return self.session
            self.session.close()
            self._note_silence(self.session)
        if time.monotonic() < self._redial_at_s:
            raise ConnectError(self.unreachable_because)
        addresses = self._health_probe.at_hand(self._addresses)
        if not addresses:
            self._health_probe.start()
            raise ConnectError(self.unreachable_because)
        left = [each.address for each in self.retired]
        addresses.sort(key=lambda address: address in left)
        self._renew(until_s)
        began_s = time.monotonic()
        try:
            channel = dial(addresses, self._identity, until_s=until_s)
        except (ConnectError, ProtocolError, TransportError) as error:
            share_s = (until_s - began_s) / len(addresses)
            if isinstance(error, UnreachableError) and share_s >= self._settings.silent_deadline_min_s:
                self._health_probe.hold_off(error.silent)
            self._delay_redial(error)
            if isinstance(error, TransportError):
                raise ConnectError(str(error)) from error
            raise
        return self._begin(self._begin_session(channel))

    def _renew(self, until_s: float) -> None:
        """Withdraw the last session's offer, so that nothing lands through it.

        Raises ConnectError.
        """
        try:
            self._registration.finish(until_s)
        except TimeoutError as error:  # the renewal continues: the next call waits only for the rest
            self.unreachable_because = "the offer to the last agent is being withdrawn"
            raise ConnectError(self.unreachable_because) from error
        except TransportError as error:
            self._delay_redial(error)
            raise ConnectError(str(error)) from error

    def _delay_redial(self, error: Exception) -> None:
        """Keep operations from dialling for ``redial_s``."""
        self.unreachable_because = str(error)
        self._redial_at_s = time.monotonic() + self._settings.redial_s
        if self.session is not None:
            self._health_probe.start()

    def _begin_session(self, channel: ControlChannel) -> AgentSession:
        return AgentSession(
            channel,
            self._identity.ends,
            self._arena,
            self._settings,
            self._request_ids,
            self._worker,
            self._on_leaving,
        )

    def _begin(self, session: AgentSession) -> AgentSession:
        """Make a session the current session of operations."""
        self.unreachable_because = ""
        self._registration.note_offer()
        self.session = session
        self.callers.use(session)
        self._reconciler.start()
        if session.transport != INLINE and len(self._addresses) > 1:
            self._registration.prepare(session.transport, self._settings.spare_after_s)
        self._failback.start()
        return session

    def _on_leaving(self, session: AgentSession) -> None:
        self._ended_agents.add(session.start_id)
        thread = threading.Thread(
            target=self._fail_over, args=(session,), name="ostraca-failover", daemon=True
        )
        with suppress(RuntimeError):  # without another thread, failover follows the loss of the session
            thread.start()
            self._failovers = [each for each in self._failovers if each.is_alive()] + [thread]

    def _fail_over(self, leaving: AgentSession) -> None:
        """Find a second agent, begin a session there, and end the first session."""
        show_name("failover")
        spare: dict[str, ArenaEnd] = {}
        try:
            while True:
                with self._dialling:
                    if leaving is not self.live or self._closed.is_set():
                        break
                    channel = self._dial_other(leaving, spare, self._addresses)
                    if channel is not None:
                        self._move_to(leaving, channel, spare)
                        break
                self._closed.wait(self._settings.redial_s)
        finally:
            _cut_off(spare)
        self._end_retired(leaving)

    def _preferred_addresses(self) -> Sequence[Address]:
        """Return the addresses before the live session's; none without a session."""
        session = self.live
        return () if session is None else self._addresses[: self._addresses.index(session.address)]

    def _has_ended(self, start_id: bytes) -> bool:
        """Tell whether an agent has announced its end, or is the current agent."""
        session = self.live
        return start_id in self._ended_agents or (session is not None and session.start_id == start_id)

    def _fail_back(self, address: Address) -> bool:
        """Fail back to a preferred agent at *address*; tell whether this succeeded.

        Ends the session with the other agent after its operations.
        """
        away = self.live
        spare: dict[str, ArenaEnd] = {}
        with self._dialling:
            if away is None or away is not self.live or self._closed.is_set():
                return False
            try:
                channel = self._dial_other(away, spare, [address])
                if channel is None:
                    return False
                self._health_probe.answers(address)
                self._move_to(away, channel, spare)
            finally:
                _cut_off(spare)
        self._end_retired(away)
        return True

    def _end_retired(self, left: AgentSession) -> None:
        """End a retired session once unused; a session not retired continues."""
        if left not in self.retired:
            return
        left.end_unused()
        with self._dialling:
            self.retired = tuple(each for each in self.retired if each is not left)
        self._reconciler.start()

    def _dial_other(
        self, leaving: AgentSession, spare: dict[str, ArenaEnd], addresses: Sequence[Address]
    ) -> ControlChannel | None:
        """Connect to an agent at the first of *addresses* without a known session.

        Offers the ends in *spare*, created if missing. All addresses share the time of a handshake. Returns
        None if no such agent answers now, or if an end broke.
        """
        known = (leaving, *self.retired)
        wanted = [each for each in addresses if all(each != session.address for session in known)]
        # No health probe runs while a session is live, and no operation waits here, so held-off addresses are
        # tried too, after the others.
        at_hand = self._health_probe.at_hand(wanted)
        wanted.sort(key=lambda address: address not in at_hand)
        try:
            if wanted and not spare:
                spare.update(self._arena.successors())
        except TransportError as error:
            log.debug("no end can be offered to another agent: %s", error)
            return None
        identity = replace(self._identity, ends=spare)
        for address in wanted:
            until_s = time.monotonic() + self._settings.handshake_s_max / len(wanted)
            try:
                channel = dial([address], identity, until_s=until_s)
            except (ConnectError, ProtocolError) as error:
                log.debug("%s does not take over: %s", address, error)
                continue
            except TransportError as error:
                log.debug("an arena end offered to another agent broke: %s", error)
                _cut_off(spare)
                return None
            if all(channel.welcome.start_id != session.start_id for session in known):
                return channel
            channel.stream.close()  # another address of a known agent
        return None

    def _move_to(self, leaving: AgentSession, channel: ControlChannel, spare: dict[str, ArenaEnd]) -> None:
        """Move operations to another agent's session, over the ends in *spare*.

        Opens the used volumes there, and leaves *spare* empty.
        """
        leaving.retire()
        ends = dict(spare)
        spare.clear()
        self._arena.ends = ends
        self._identity = replace(self._identity, ends=ends)
        session = self._begin_session(channel)
        until_s = time.monotonic() + self._settings.handshake_s_max
        for volume in list(leaving.volumes.values()):
            with suppress(
                ConnectError, ProtocolError, RefusedError
            ):  # an operation on the volume opens it again and gets the error
                self.open_volume(session, volume, until_s)
        self.retired = (*self.retired, leaving)
        self._begin(session)
        log.debug("%s takes over from %s", session.agent, leaving.agent)

    def _note_silence(self, lost: AgentSession) -> None:
        """Hold off the address of a silent agent, once per session."""
        if lost.is_silent:
            lost.is_silent = False
            self.unreachable_because = f"{lost.address}: {lost.lost_because}"
            self._health_probe.hold_off([lost.address])

    def dial_soon(self) -> None:
        """Let the next operation dial: an address answers again, or the token changed."""
        self._redial_at_s = 0.0

    def _agent_now(self) -> str:
        session = self.session
        return session.agent if session is not None else ""


def _cut_off(spare: dict[str, ArenaEnd]) -> None:
    """Cut off all ends in *spare*, and leave none there."""
    while spare:
        _, end = spare.popitem()
        with suppress(TransportError):  # no request used this end, so nothing lands
            end.cut_off()
