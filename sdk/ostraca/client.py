"""The client: an arena, and a session with whichever of the known agents answers.

A client belongs to the process that made it. After a fork the child has neither its thread nor its memory:
everything but ``close`` raises ClosedError there.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ostraca.arena import Arena
from ostraca.core.checks import checked_seconds
from ostraca.crew import Crew, threads_for
from ostraca.cuda import CudaDevices
from ostraca.dial import Caller, checked_token, chosen_addresses, chosen_tls
from ostraca.meter import ClientMetrics, Meter
from ostraca.questions import ask_status
from ostraca.reach import Reach
from ostraca.settings import ClientSettings
from ostraca.shells import blocking
from ostraca.shells.done import Done, DoneQueue, Ticket
from ostraca.volume import Volume
from ostraca_fabric.errors import (
    ClosedError,
    RefusedError,
    UsageError,
)
from ostraca_fabric.ids import TenantId, checked_name
from ostraca_fabric.labels import worker_name
from ostraca_fabric.layout import Layout
from ostraca_fabric.outcome import Reason
from ostraca_fabric.status import AgentStatus
from ostraca_fabric.volume import VolumeRecord
from ostraca_fabric.wire.handshake import CLIENT_BYTES, LEAVING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from ostraca.devices import Devices
    from ostraca.jobs import Job
    from ostraca.shells.driver import Deliver, Driver
    from ostraca_fabric.tls import Tls
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
    """Connect to the first agent of *addresses* that answers; the others are for when it goes away or falls
    silent. List first the agent that is preferred, as that of the own host: the client goes back there when
    it answers again.

    Addresses are ``unix:///path``, ``tcp://host:port`` or, with a CA in the settings, ``tls://host:port``.
    Without any, the environment's OSTRACA_AGENT says where, else the sockets that ``ostraca up`` makes by
    default. *credentials* is a token; a unix socket may need none. Raises ConnectError (as
    AuthenticationError or VersionError where that is why), TransportError when no transport can be set up,
    UsageError.
    """
    chosen = settings or ClientSettings()
    until_s = time.monotonic() + checked_seconds("timeout_s", timeout_s, longest_s=chosen.deadline_s_max)
    where = chosen_addresses(addresses, os.environ)
    tls = chosen_tls(where, chosen, os.environ)
    token, name = checked_token(credentials), TenantId(checked_name("tenant", tenant))
    arena = Arena(chosen)
    client = Client(where, arena, tenant=name, token=token, settings=chosen, tls=tls)
    try:
        with client.reach.taken_up(until_s):
            """There is a session that lives."""
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
        tls: Tls | None = None,
    ) -> None:
        self.tenant = tenant
        self.settings = settings
        self.arena = arena
        """For the SDK's own modules, as are ``meter``, ``devices`` and ``reach``."""
        self.meter = Meter()
        self.devices: Devices = CudaDevices()
        """Whose memory may be a source or destination."""
        client_id = secrets.token_bytes(CLIENT_BYTES)
        self.worker = worker_name(client_id)
        """What this client is called in metrics and logs: made anew for each client."""

        self._crew = Crew(settings.copy_threads or threads_for(len(os.sched_getaffinity(0))))
        features = (LEAVING,) if len(addresses) > 1 else ()
        caller = Caller(tenant, token, arena.ends, client_id, features, tls)
        self.reach = Reach(addresses, caller, arena, self._crew, settings, self.worker)
        self._pid = os.getpid()
        self._is_closed = False
        self._running = 0  # operations under way; under the arena's lock
        self._tickets = itertools.count(1)
        self._submitted = 0  # not yet taken; under the arena's lock
        self._driver: Driver | None = None  # made when something is submitted
        self._done = DoneQueue()
        _alive.add(self)

    @property
    def agent(self) -> str:
        """The agent of the current or last connection; empty before the first."""
        session = self.reach.session
        return session.agent if session else ""

    @property
    def transport(self) -> str:
        """How blocks cross on the current or last connection: ``nixl`` or ``inline``."""
        session = self.reach.session
        return session.transport if session else ""

    @property
    def is_connected(self) -> bool:
        """Whether there is a live connection now."""
        return self.reach.live is not None

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
        self,
        name: str,
        layout: Layout,
        *,
        block_bytes: int,
        create: bool = False,
        break_even_tokens: int = 0,
        timeout_s: float = 5.0,
    ) -> Volume:
        """Open a volume of this client's tenant; with *create*, make it when it is not there.

        *block_bytes* is its largest block. Puts of chains shorter than *break_even_tokens* are declined, as
        loading them would take longer than computing them; docs/explanation/endurance.md says how to find the
        number, and 0 puts them all. Raises UsageError where it is to be made and the fabric has a drive that
        can't hold such a block, UnknownVolumeError, LayoutMismatchError when it exists with another layout or
        block size, RefusedError, ConnectError when no agent answers within *timeout_s*.
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
        if break_even_tokens < 0:
            raise UsageError(f"break_even_tokens is {break_even_tokens}: it is 0 or more")
        volume = Volume(self, record, create=create, break_even_tokens=break_even_tokens)
        with self.running():
            try:
                with self.reach.taken_up(until_s) as session:
                    self.reach.opened(session, volume, until_s)
            except RefusedError as error:
                if error.code == "usage":
                    raise UsageError(str(error)) from error
                raise
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
        if self._driver is not None:
            self._driver.cancel(ticket)

    def close(self) -> None:
        """End the connection and let the arena go. A second time does nothing.

        Calls of other threads, and what was submitted, end as DISCONNECTED. Memory that an agent may still
        write to stays mapped.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        changed = self.arena.changed
        with changed:
            self._is_closed = True
        self.reach.close()
        if self._driver is not None:
            self._driver.close()
        with changed:
            changed.wait_for(lambda: not self._running, timeout=_CLOSE_S)
            has_ended = not self._running
        self._crew.close()
        self._done.close()
        self.arena.close(is_used=not has_ended or not self.devices.close())
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
        """Begin a job whose result *deliver* is called with: in the driver's thread, or in this one where no
        other can be had. It must not block.
        """
        ticket = self._next_ticket()
        self._enter()

        def end(ended: Ticket, result: Any, error: BaseException | None) -> None:  # noqa: ANN401 (of any job)
            self._leave()
            deliver(ended, result, error)

        self._driving().submit(ticket, job, end)
        return ticket

    def _driving(self) -> Driver:
        from ostraca.shells.driver import Driver  # noqa: PLC0415 (a hundredth of a second, and most clients need none)

        with self.arena.changed:
            if self._driver is None:
                self._driver = Driver(self)
                self.arena.on_changed = self._driver.room_made
            return self._driver

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


@atexit.register
def _close_all() -> None:
    """Let every client go before the interpreter does.

    A pump must not run into a half torn down process.
    """
    for client in list(_alive):
        client.close()
