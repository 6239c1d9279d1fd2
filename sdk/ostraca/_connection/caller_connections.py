"""Connections of callers: brief blocking operations in the caller's own thread.

An operation of the driver changes threads twice within this process. Each change takes some 20 microseconds,
and up to 5 ms beside a busy thread of Python. Two kinds of operations need nothing of the driver: lookups,
and gets of blocks that the worker copies out of the agent's memory. There the caller asks on a connection of
its own, and waits for the answer.

A connection has one caller at a time, and shares no state with other threads. So an exception of a signal
handler, raised between any two bytecodes, costs the connection alone. An operation that does not fit, or
whose connection fails, takes the driver's way.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca._connection.dial import ClientIdentity, ControlChannel, dial
from ostraca._connection.session import AgentSession
from ostraca._protocol.operations import (
    NOT_HERE_CODES,
    BlockOperation,
    Effect,
    Send,
    Ticked,
    blocks_per_request,
)
from ostraca._protocol.specs import VolumeKey, VolumeSpec
from ostraca.settings import ClientSettings
from ostraca_fabric.errors import ConnectError, ProtocolError
from ostraca_fabric.runtime.threads import BackgroundTask
from ostraca_fabric.wire.frames import encode
from ostraca_fabric.wire.handshake import MEMORY
from ostraca_fabric.wire.messages import DirectDrives, Failure, GetDone, LookupDone, VolumeOpened

log = logging.getLogger("ostraca")

SCRATCH_BYTES = 4 << 20
"""Most bytes of a get by its caller. Larger gets are shared among threads."""

_CONNECTIONS_MAX = 4
"""Connections beside the session's: callers at one time that need no driver."""

_OPERATIONS_EACH = 4
"""Operations of the driver before a first connection, and before each further one: a program that asks once
needs none.
"""

_PASSES_MAX = 64
"""Most gets in a row that take the driver's way because an earlier one found no blocks in memory."""

_DIAL_S = 2.0

_alive: weakref.WeakSet[CallerConnection] = weakref.WeakSet()


class CallerJob(Protocol):
    """A blocking operation that its caller may do."""

    is_for_memory: bool
    """Whether the operation is of no use unless blocks are in the agent's memory."""

    lacks_connection: bool
    """Whether no connection was free."""

    def run_at(self, connection: CallerConnection) -> bool:
        """Do the operation in this thread; False if the driver must do it."""


class CallerConnection:
    """A connection beside a session, to the same agent. For one thread at a time."""

    def __init__(self, session: AgentSession, channel: ControlChannel) -> None:
        self.session = session
        self._channel = channel
        self._handles: dict[VolumeKey, int] = {}
        self.is_closed = False
        self.reads_memory = channel.welcome.memory is not None and session.memory is not None
        """Whether blocks may be copied out of the agent's memory, by the session's reader."""

        _alive.add(self)

    @cached_property
    def scratch(self) -> NDArray[np.uint8]:
        """Memory for blocks before their check: a block with wrong bytes goes nowhere else."""
        return np.empty(SCRATCH_BYTES, np.uint8)

    def fits(self, blocks: int, volume: VolumeSpec) -> bool:
        """Tell whether a request takes so many blocks of a chain."""
        return 0 < blocks <= blocks_per_request(self.session.limits, volume.hash_bytes)

    def ask(
        self,
        volume: VolumeSpec,
        start: Callable[[int, int, float], BlockOperation],
        until_s: float,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[BlockOperation, list[Effect]]:
        """Start an operation, and return it with the effects of its answer: none if it needs an arena.

        *start* takes the request's id, the volume's handle, and the remaining time. *meanwhile* is called
        while the agent works. Without an answer by
        *until_s*, on the monotonic clock, the connection is closed. Raises RefusedError as the operation,
        OSError for a lost connection, and ProtocolError.
        """
        handle = self._handle(volume, until_s)
        now_s = time.monotonic()
        operation = start(self.session.next_request(), handle, until_s - now_s)
        (first,) = operation.start(now_s)
        if not isinstance(first, Send):
            return operation, [first]
        if log.isEnabledFor(logging.DEBUG):
            label = self.session.label(operation.request)
            log.debug("%s sent by its caller: %s of %d blocks", label, operation.name, operation.blocks)
        answer = self._channel.ask(first.message, until_s=until_s, meanwhile=meanwhile)
        if answer is None:
            self.close()
            return operation, operation.on(Ticked(), until_s)
        if not isinstance(answer, LookupDone | GetDone | Failure) or answer.request != operation.request:
            raise ProtocolError(f"{type(answer).__name__} is no answer to {operation.name}")
        if isinstance(answer, Failure) and answer.code in NOT_HERE_CODES:
            return operation, []
        return operation, operation.on(answer, time.monotonic())

    def _handle(self, volume: VolumeSpec, until_s: float) -> int:
        """Return the handle of a volume, opened if necessary. Raises ConnectError."""
        handle = self._handles.get(volume.key)
        if handle is not None:
            return handle
        request = self.session.next_request()
        match self._channel.ask(volume.message(request, may_create=False), until_s=until_s):
            case VolumeOpened(request=answered, handle=handle) if answered == request:
                self._handles[volume.key] = handle
                return handle
            case answer:
                raise ConnectError(f"the agent does not open the volume here: {answer}")

    def shut_down(self) -> None:
        """End a wait for an answer, from another thread."""
        with suppress(OSError):
            self._channel.stream.shut_down()

    def close(self) -> None:
        """Close the connection: the agent ends its operation."""
        self.is_closed = True
        self._channel.stream.close()

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child, without a message to the agent."""
        with suppress(OSError):
            self._channel.stream.close_in_child()


class CallerConnections(BackgroundTask):
    """Connections of one client's callers, opened in the background as they are wanted. Close it.

    ``run`` is for callers' threads, without a lock: a connection in use is in no list. All other methods are
    for the client's own threads.
    """

    def __init__(self, identity: ClientIdentity, settings: ClientSettings) -> None:
        """Begin without connections."""
        features = (MEMORY,) if settings.direct_memory else ()
        self._identity = replace(identity.without_arena(), features=features)
        self._connections_max = _CONNECTIONS_MAX if settings.caller_connections else 0
        self._session: AgentSession | None = None
        self._idle: deque[CallerConnection] = deque()
        self._opening = threading.Lock()  # guards the next field
        self._open: weakref.WeakSet[CallerConnection] = weakref.WeakSet()
        self._wanted = 0
        """Operations of the driver that lacked a connection, since the last failure to connect."""

        self._passes = self._passes_next = 0
        """Gets that still take the driver's way, and those since the last failure. Several callers may change
        both at once.
        """

        super().__init__(
            "callers", self._connect, is_needed=self._is_one_missing, pauses_s=lambda: repeat(0.0)
        )

    def run(self, job: CallerJob) -> bool:
        """Do an operation in this thread; False if the driver must do it.

        Raises RefusedError as an operation.
        """
        session = self._session
        if session is None or (job.is_for_memory and session.memory is None):
            return False
        if job.is_for_memory and self._passes > 0:
            self._passes -= 1
            return False
        connection = self._take()
        if connection is None:
            job.lacks_connection = True
            return False
        is_done = False
        try:
            is_done = job.run_at(connection)
        except (OSError, ProtocolError) as error:
            log.debug("A connection of callers to %s ended: %s", connection.session.agent, error)
            connection.close()
        except BaseException:
            connection.close()
            raise
        if job.is_for_memory:
            self._passes_next = 0 if is_done else min(_PASSES_MAX, max(1, 2 * self._passes_next))
            self._passes = self._passes_next
        if not connection.is_closed:
            self._idle.append(connection)
        return is_done

    def _take(self) -> CallerConnection | None:
        """Take a connection to the current agent; close those to others."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.session is self._session and connection.session.is_alive:
                return connection
            connection.close()

    def use(self, session: AgentSession | None) -> None:
        """Connect to this session's agent from now on, and close connections to others."""
        self._session = session
        with self._opening:
            left = [connection for connection in self._open if connection.session is not session]
        for connection in left:
            connection.shut_down()
        for _ in range(len(self._idle)):
            with suppress(IndexError):
                connection = self._idle.popleft()
                if connection.session is session:
                    self._idle.append(connection)
                else:
                    connection.close()

    def want_another(self) -> None:
        """Note an operation that lacked a connection."""
        self._wanted += 1
        self.start()

    def close(self) -> None:
        """End all connections."""
        super().close()
        self.use(None)

    def _is_one_missing(self) -> bool:
        session = self._session
        if session is None or not session.is_alive:
            return False
        wanted = min(self._connections_max, self._wanted // _OPERATIONS_EACH)
        with self._opening:
            return sum(each.session is session and not each.is_closed for each in self._open) < wanted

    def _connect(self) -> None:
        session = self._session
        if session is None:
            return
        try:
            channel = dial([session.address], self._identity, until_s=time.monotonic() + _DIAL_S)
        except (ConnectError, ProtocolError) as error:
            log.debug("No connection of callers to %s: %s", session.agent, error)
            self._wanted = 0
            return
        connection = CallerConnection(session, channel)
        try:
            if channel.welcome.start_id != session.start_id:
                raise ConnectError("it was started anew")
            if connection.reads_memory:
                announced = encode(DirectDrives((), reads_memory=True))
                channel.stream.send_first(announced, until_s=time.monotonic() + _DIAL_S)
        except OSError as error:
            log.debug("No connection of callers to %s: %s", session.agent, error)
            self._wanted = 0
            connection.close()
            return
        with self._opening:
            self._open.add(connection)
        self._idle.append(connection)
        if self._session is not session:
            self.use(self._session)


def _after_fork_in_child() -> None:
    """Close inherited sockets, which would hide the parent's death from agents."""
    for connection in list(_alive):
        connection.close_in_child()
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
