"""The client: an arena, and a session with whichever of the known agents answers.

When a session is lost, the next operation that has time for it dials again; until that succeeds, operations
end as DISCONNECTED. Nothing here runs in the background but the pump of the live session.

A client belongs to the process that made it. After a fork the child has neither its thread nor its memory:
everything but ``close`` raises ClosedError there.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ostraca.arena import Arena
from ostraca.ask import ask
from ostraca.batch import Target
from ostraca.core.checks import checked_seconds
from ostraca.core.operations import CALLER_CODES
from ostraca.dial import Caller, Dialled, checked_token, chosen_addresses, dial
from ostraca.meter import ClientMetrics, Meter
from ostraca.questions import ask_status
from ostraca.session import Session
from ostraca.settings import ClientSettings
from ostraca.shells import blocking
from ostraca.shells.done import Done, DoneQueue
from ostraca.shells.driver import Deliver, Driver, Ticket
from ostraca.volume import Volume
from ostraca_fabric.errors import (
    ClosedError,
    ConnectError,
    ProtocolError,
    RefusedError,
    TransportError,
    UsageError,
)
from ostraca_fabric.ids import TenantId, checked_name
from ostraca_fabric.labels import worker_name
from ostraca_fabric.layout import Layout
from ostraca_fabric.outcome import Reason
from ostraca_fabric.status import AgentStatus
from ostraca_fabric.volume import VolumeRecord
from ostraca_fabric.wire.handshake import CLIENT_BYTES
from ostraca_fabric.wire.messages import OpenVolume, VolumeOpened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from ostraca.jobs import Job
    from ostraca.session import Mailbox
    from ostraca_fabric.wire.address import Address

_Result = TypeVar("_Result")

_CLOSE_S = 5.0
"""How long ``close`` waits for calls of other threads; they end at once when the session does."""

_alive: weakref.WeakSet[Client] = weakref.WeakSet()


def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    credentials: str | None = None,
    tenant: str = "default",
    settings: ClientSettings | None = None,
    timeout_s: float = 5.0,
) -> Client:
    """Connect to the first agent of *addresses* that answers; the others are for when it goes away.

    Addresses are ``unix:///path`` or ``tcp://host:port``. Without any, the environment's OSTRACA_AGENT says
    where, else the sockets that ``ostraca up`` makes by default. *credentials* is a token; a unix socket may
    need none. Raises ConnectError (as AuthenticationError or VersionError where that is why), TransportError
    when no transport can be set up, UsageError.
    """
    chosen = settings or ClientSettings()
    until_s = time.monotonic() + checked_seconds("timeout_s", timeout_s, longest_s=chosen.deadline_s_max)
    where = chosen_addresses(addresses, os.environ)
    token, name = checked_token(credentials), TenantId(checked_name("tenant", tenant))
    arena = Arena(chosen)
    client = Client(where, arena, tenant=name, token=token, settings=chosen)
    try:
        client.reach(until_s)
    except BaseException:
        client.close()
        raise
    return client


class Client:
    """A worker's way into the fabric.

    Thread-safe. ``connect`` makes it; close it, or use it as a context manager.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        arena: Arena,
        *,
        tenant: TenantId,
        token: str,
        settings: ClientSettings,
    ) -> None:
        self.tenant = tenant
        self.settings = settings
        self.arena = arena
        """For the SDK's own modules, as is ``meter``."""
        self.meter = Meter()
        self.unreachable_because = ""
        """Why the last dial failed; empty when it did not."""

        self._client_id = secrets.token_bytes(CLIENT_BYTES)
        self._addresses = addresses
        self._caller = Caller(tenant, token, arena.ends, self._client_id)
        self._pid = os.getpid()
        self._request_ids = itertools.count(1)
        self._dialling = threading.Lock()  # held while _session and _redial_at_s change
        self._session: Session | None = None
        self._redial_at_s = 0.0
        self._is_closed = False
        self._running = 0  # operations under way; under the arena's lock
        self._tickets = itertools.count(1)
        self._submitted = 0  # not yet taken; under the arena's lock
        self._driver = Driver(self)
        arena.on_changed = self._driver.room_made
        self._done = DoneQueue()
        _alive.add(self)

    @property
    def worker(self) -> str:
        """What this client is called in metrics and logs: made anew for each client."""
        return worker_name(self._client_id)

    @property
    def agent(self) -> str:
        """The agent of the current or last connection; empty before the first."""
        return self._session.agent if self._session else ""

    @property
    def transport(self) -> str:
        """How blocks cross on the current or last connection: ``nixl`` or ``inline``."""
        return self._session.transport if self._session else ""

    @property
    def is_connected(self) -> bool:
        """Whether there is a live connection now."""
        return self._session is not None and self._session.is_alive

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of the arena under transfers that are not known to have ended."""
        with self.arena.changed:
            return self.arena.ledger.quarantined_bytes

    def metrics(self) -> ClientMetrics:
        """Return what this client's operations have come to. Never blocks; usable after ``close``."""
        return self.meter.snapshot(
            worker=self.worker,
            agent=self.agent,
            transport=self.transport,
            arena_bytes=self.settings.arena_bytes_whole,
            quarantined_bytes=self.quarantined_bytes,
        )

    def __repr__(self) -> str:
        """Name the agent."""
        state = "closed" if self._is_closed else "connected" if self.is_connected else "not connected"
        way = f"agent {self.agent} by {self.transport}" if self.agent else "no agent yet"
        return f"<Client of tenant {self.tenant}, {state}, {way}>"

    def volume(
        self, name: str, layout: Layout, *, block_bytes: int, create: bool = False, timeout_s: float = 5.0
    ) -> Volume:
        """Open a volume of this client's tenant; with *create*, make it when it is not there.

        *block_bytes* is its largest block. Raises UnknownVolumeError, LayoutMismatchError when it exists with
        another layout or block size, RefusedError, ConnectError when no agent answers within *timeout_s*.
        """
        if not isinstance(layout, Layout):
            raise UsageError(
                f"layout is a {type(layout).__name__}: pass an ostraca.Layout, which says what blocks mean"
            )
        record = VolumeRecord(self.tenant, checked_name("volume", name), layout, block_bytes)
        if record.slot_bytes > self.settings.chunk_bytes:
            raise UsageError(
                f"block_bytes is {block_bytes} and chunk_bytes in the settings {self.settings.chunk_bytes}: "
                "raise chunk_bytes"
            )
        until_s = time.monotonic() + checked_seconds(
            "timeout_s", timeout_s, longest_s=self.settings.deadline_s_max
        )
        volume = Volume(self, record, create=create)
        with self.running():
            self._opened(self.reach(until_s), volume, until_s)
        return volume

    def status(self, *, timeout_s: float = 5.0) -> AgentStatus:
        """Ask the agent what it believes. Raises ConnectError when it does not answer in time."""
        return ask_status(self, timeout_s=timeout_s)

    def take_done(self) -> list[Done]:
        """Return what has become of submitted operations since the last call. Never blocks.

        Usable from any thread, and after ``close``.
        """
        self._check_process()
        taken = self._done.take()
        if taken:
            with self.arena.changed:
                self._submitted -= len(taken)
        return taken

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``take_done`` has something: for select, poll or epoll.

        Only look at it; ``take_done`` is what reads it. It is closed with the client.
        """
        return self._done.fileno()

    def cancel(self, ticket: Ticket) -> None:
        """Want no more of a submitted operation. Never blocks.

        It still ends, soon, and ``take_done`` tells how: blocks handed over before are HITs, others LATE with
        reason CANCELLED. Of a ticket that has ended it does nothing.
        """
        self._check_process()
        self._driver.cancel(ticket)

    def close(self) -> None:
        """End the connection and let the arena go. A second time does nothing.

        Calls of other threads, and what was submitted, end as DISCONNECTED. Memory that an agent may still
        write to stays mapped.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        changed = self.arena.changed
        with self._dialling:
            with changed:
                self._is_closed = True
            if self._session is not None:
                self._session.close()
        self._driver.close()
        with changed:
            changed.wait_for(lambda: not self._running, timeout=_CLOSE_S)
        self._done.close()
        self.arena.close()
        _alive.discard(self)

    def __enter__(self) -> Self:
        """Lend the client to the ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    # For the SDK's own modules.

    @property
    def live_session(self) -> Session | None:
        """The session there is now, if it is alive."""
        session = self._session
        return session if session is not None and session.is_alive else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the arena from being let go meanwhile.

        Raises ClosedError after close, and in a forked child.
        """
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def run(self, job: Job[_Result]) -> _Result:
        """Do a job in this thread, and return its result."""
        with self.running():
            return blocking.run(self, job)

    def submit(self, job: Job[Any]) -> Ticket:
        """Begin a job; ``take_done`` tells what became of it."""

        def deliver(ticket: Ticket, result: Any, error: BaseException | None) -> None:  # noqa: ANN401 (of any job)
            self._done.put(Done(ticket, result, error))

        with self.arena.changed:
            is_full = self._submitted >= self.settings.submitted_max
            self._submitted += 1
        if not is_full:
            return self.carry(job, deliver)
        ticket = self._next_ticket()
        full = job.ended(job.declined, Reason.OVERLOADED, "too much is submitted and not taken")
        deliver(ticket, job.skipped(full), None)
        return ticket

    def carry(self, job: Job[Any], deliver: Deliver) -> Ticket:
        """Begin a job whose result *deliver* is called with, in the driver's thread; it must not block."""
        ticket = self._next_ticket()
        self._enter()

        def end(ended: Ticket, result: Any, error: BaseException | None) -> None:  # noqa: ANN401 (of any job)
            self._leave()
            deliver(ended, result, error)

        self._driver.submit(ticket, job, end)
        return ticket

    def target_at_hand(self, volume: Volume, mail: Mailbox) -> Target | None:
        """Return the volume on the live session, if there is one that it is open on. Never blocks."""
        session = self.live_session
        handle = None if session is None else session.handles.get(volume.key)
        if session is None or handle is None:
            return None
        return self._target(mail, session, volume, handle)

    def target(self, volume: Volume, mail: Mailbox, until_s: float) -> Target | None:
        """Return the volume on a live session; None when there is none and none can be had by *until_s*."""
        try:
            session = self.reach(min(until_s, time.monotonic() + self.settings.handshake_s_max))
            handle = self._opened(session, volume, until_s)
        except (ConnectError, ProtocolError) as error:
            self.unreachable_because = str(error)
            return None
        except RefusedError as error:
            if error.code in CALLER_CODES:
                raise
            self.unreachable_because = f"{error.code}: {error}"
            return None
        return self._target(mail, session, volume, handle)

    def reach(self, until_s: float) -> Session:
        """Return a live session, dialling when there is none.

        Raises ConnectError, ProtocolError or ClosedError.
        """
        session = self.live_session
        if session is not None:
            return session
        if not self._dialling.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise ConnectError("another call is still dialling")
        try:
            return self._dial(until_s)
        finally:
            self._dialling.release()

    def _target(self, mail: Mailbox, session: Session, volume: Volume, handle: int) -> Target:
        return Target(mail, session, self.arena, self.settings, volume.identity, volume.record, handle)

    def _next_ticket(self) -> Ticket:
        return Ticket(next(self._tickets))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "this client was made before a fork, and the child has neither its thread nor its memory: "
                "connect in the child, "
                "or start workers with spawn"
            )

    def _enter(self) -> None:
        self._check_process()
        with self.arena.changed:
            if self._is_closed:
                raise ClosedError("this client is closed: connect again")
            self._running += 1

    def _leave(self) -> None:
        with self.arena.changed:
            self._running -= 1
            self.arena.tell_changed()

    def _dial(self, until_s: float) -> Session:
        if self._is_closed:
            raise ClosedError("this client is closed: connect again")
        if self._session is not None:
            if self._session.is_alive:
                return self._session
            self._session.close()
        if time.monotonic() < self._redial_at_s:
            raise ConnectError(self.unreachable_because)
        try:
            dialled = self._dialled(until_s)
        except (ConnectError, ProtocolError) as error:
            self.unreachable_because = str(error)
            self._redial_at_s = time.monotonic() + self.settings.redial_s
            raise
        self.unreachable_because = ""
        self._session = Session(dialled, self.arena, self.settings, self._request_ids, self.worker)
        return self._session

    def _dialled(self, until_s: float) -> Dialled:
        try:
            self.arena.renew()
        except TransportError as error:
            raise ConnectError(str(error)) from error
        return dial(self._addresses, self._caller, until_s=until_s)

    def _opened(self, session: Session, volume: Volume, until_s: float) -> int:
        """Return the volume's handle on a session, opening it there the first time. Raises as ``ask``."""
        handle = session.handles.get(volume.key)
        if handle is None:
            record = volume.record
            answer = ask(
                session,
                lambda request: OpenVolume(
                    request, record.name, record.layout, record.block_bytes, volume.create
                ),
                until_s=until_s,
            )
            if not isinstance(answer, VolumeOpened):
                raise ProtocolError(f"{type(answer).__name__} is no answer to an OpenVolume")
            handle = session.handles[volume.key] = answer.handle
        return handle


@atexit.register
def _close_all() -> None:
    """Let every client go before the interpreter does.

    A pump must not run into a half torn down process.
    """
    for client in list(_alive):
        client.close()
