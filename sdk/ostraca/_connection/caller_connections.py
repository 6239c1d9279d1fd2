"""Connections of callers: brief blocking operations in the caller's own thread.

An operation of the driver changes threads twice within this process. Each change takes some 20 microseconds,
and up to 5 ms beside a busy thread of Python. Three kinds of operations need nothing of the driver: lookups,
gets of blocks that the worker copies out of the agent's memory, and puts that the agent copies out of the
worker's. There the caller asks on a connection of its own, polls for the answer, and sleeps if it takes
longer.

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
from ostraca._memory.copy_pool import CopyPool
from ostraca._memory.host_blocks import CallerBlocks
from ostraca._protocol.operations import (
    NOT_HERE_CODES,
    NOT_STARTED_CODES,
    BlockOperation,
    Effect,
    Send,
    Ticked,
)
from ostraca._protocol.specs import VolumeKey, VolumeSpec
from ostraca.settings import ClientSettings
from ostraca_fabric.errors import ConnectError, ProtocolError, RefusedError
from ostraca_fabric.runtime.memory import huge_array
from ostraca_fabric.runtime.threads import BackgroundTask
from ostraca_fabric.sockets.stream import ByteStream
from ostraca_fabric.wire.frames import encode
from ostraca_fabric.wire.handshake import MEMORY
from ostraca_fabric.wire.messages import (
    DirectDrives,
    Failure,
    GetDone,
    LookupDone,
    Put,
    PutDone,
    VolumeOpened,
)

log = logging.getLogger("ostraca")

SCRATCH_BYTES = 4 << 20
"""Most bytes of a get or a put by its caller. Larger ones are shared among threads."""

ALONE = CopyPool(1)
"""Copies and tags in the calling thread."""

_CONNECTIONS_MAX = 4
"""Connections beside the session's: callers at one time that need no driver."""

_OPERATIONS_EACH = 4
"""Operations of the driver before a first connection, and before each further one: a program that asks once
needs none.
"""

_PASSES_MAX = 64
"""Most gets in a row that take the driver's way because an earlier one found no blocks in memory."""

_DIAL_S = 2.0

_Answer = LookupDone | GetDone | PutDone | Failure

_alive: weakref.WeakSet[CallerConnections] = weakref.WeakSet()


class CallerJob(Protocol):
    """A blocking operation that its caller may do."""

    is_for_memory: bool
    """Whether the operation is of no use unless blocks are in the agent's memory."""

    lacks_connection: bool
    """Whether no connection was free."""

    memory: CallerBlocks | None
    """Blocks in memory of the caller."""

    def suits(self, session: AgentSession) -> bool:
        """Tell whether a connection beside this session is of use."""

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

        self.reads_worker = channel.welcome.reads_worker
        """Whether the agent reads the blocks of puts out of this process's memory."""

    @cached_property
    def scratch(self) -> NDArray[np.uint8]:
        """Memory for blocks before their check: a block with wrong bytes goes nowhere else."""
        return huge_array(SCRATCH_BYTES)

    def ask(
        self,
        volume: VolumeSpec,
        start: Callable[[int, int], BlockOperation],
        until_s: float,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[BlockOperation, list[Effect]]:
        """Start an operation; return the operation, and the effects of its answer: none for the driver.

        *start* takes the request's id and the volume's handle. *meanwhile* is called while the agent works.
        Without an answer by *until_s*, on the monotonic clock, the connection is closed, as it is after an
        answer that another message follows. Raises RefusedError as the operation, OSError for a lost
        connection, and ProtocolError.
        """
        handle = self._handle(volume, until_s)
        now_s = time.monotonic()
        operation = start(self.session.next_request(), handle)
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
        if not isinstance(answer, _Answer) or answer.request != operation.request:
            raise ProtocolError(f"{type(answer).__name__} is no answer to {operation.name}")
        if isinstance(first.message, Put) and not _is_last(answer):
            self.close()
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

    def close(self) -> None:
        """Close the connection: the agent ends its operation."""
        self.is_closed = True
        self._channel.stream.close()


def _is_last(answer: _Answer) -> bool:
    """Tell whether no further message about a put follows, to tell when the agent reads no more."""
    if isinstance(answer, Failure):
        return answer.code in NOT_STARTED_CODES or answer.code in NOT_HERE_CODES
    return isinstance(answer, PutDone) and not answer.unsettled


class _Opened:
    """The stream of a connection, which an interrupted caller may have dropped."""

    def __init__(self, connection: CallerConnection, stream: ByteStream) -> None:
        self._connection = weakref.ref(connection)
        self._stream = stream

    @property
    def connection(self) -> CallerConnection | None:
        """The connection; None once closed. A dropped one is closed here."""
        connection = self._connection()
        if connection is None:
            self._stream.close()
            return None
        return None if connection.is_closed else connection

    def shut_down(self) -> None:
        """End a wait for an answer, from another thread."""
        with suppress(OSError):
            self._stream.shut_down()

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child, without a message to the agent."""
        with suppress(OSError):
            self._stream.close_in_child()


class CallerConnections(BackgroundTask):
    """Connections of one client's callers, opened in the background as they are wanted. Close it.

    ``run`` is for callers' threads, without a lock: a connection in use is in no list. All other methods are
    for the client's own threads.
    """

    def __init__(self, identity: ClientIdentity, settings: ClientSettings) -> None:
        """Begin without connections."""
        features = (MEMORY,) if settings.direct_memory else ()
        self._identity = replace(identity.without_arena(), features=features, proof=identity.proof)
        self._connections_max = _CONNECTIONS_MAX if settings.caller_connections else 0
        self._session: AgentSession | None = None
        self._idle: deque[CallerConnection] = deque()
        self._opening = threading.Lock()  # guards the next field
        self._open: list[_Opened] = []
        self._wanted = 0
        """Operations of the driver that lacked a connection, since the last failure of any."""

        self._passes = self._passes_next = 0
        """Gets that still take the driver's way, and those since the last failure. Several callers may change
        both at once.
        """

        super().__init__(
            "callers", self._connect, is_needed=self._is_one_missing, pauses_s=lambda: repeat(0.0)
        )
        _alive.add(self)

    def run(self, job: CallerJob) -> bool:
        """Do an operation in this thread; False if the driver must do it.

        Raises RefusedError as an operation.
        """
        session = self._session
        if session is None or not job.suits(session):
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
            self._wanted = 0
            connection.close()
        except RefusedError:
            self._give_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        if job.is_for_memory:
            self._passes_next = 0 if is_done else min(_PASSES_MAX, max(1, 2 * self._passes_next))
            self._passes = self._passes_next
        self._give_back(connection)
        if is_done:
            job.memory = None
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

    def _give_back(self, connection: CallerConnection) -> None:
        """Let other callers take an open connection."""
        if connection.is_closed:
            return
        self._idle.append(connection)
        if connection.session is not self._session:  # ``use`` may have come before
            self._close_others()

    def use(self, session: AgentSession | None) -> None:
        """Connect to this session's agent from now on, and close connections to others."""
        self._session = session
        for opened in self._still_open():
            connection = opened.connection
            if connection is not None and connection.session is not session:
                opened.shut_down()
        self._close_others()

    def _close_others(self) -> None:
        """Close idle connections to other agents than the current one."""
        for _ in range(len(self._idle)):
            with suppress(IndexError):
                connection = self._idle.popleft()
                if connection.session is self._session:
                    self._idle.append(connection)
                else:
                    connection.close()

    def _still_open(self) -> list[_Opened]:
        """Return the open connections."""
        with self._opening:
            self._open = [opened for opened in self._open if opened.connection is not None]
            return self._open

    def want_another(self) -> None:
        """Note an operation that lacked a connection."""
        self._wanted += 1
        self.start()

    def close(self) -> None:
        """End all connections."""
        super().close()
        self.use(None)

    def close_in_child(self) -> None:
        """Close all descriptors in a forked child, where another thread may have held the lock."""
        for opened in self._open:
            opened.close_in_child()

    def _is_one_missing(self) -> bool:
        session = self._session
        if session is None or not session.is_alive:
            return False
        wanted = min(self._connections_max, self._wanted // _OPERATIONS_EACH)
        connections = [opened.connection for opened in self._still_open()]
        return sum(each is not None and each.session is session for each in connections) < wanted

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
        with self._opening:
            self._open.append(_Opened(connection, channel.stream))
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
        self._give_back(connection)


def _after_fork_in_child() -> None:
    """Close inherited sockets, which would hide the parent's death from agents."""
    for connections in list(_alive):
        connections.close_in_child()
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
