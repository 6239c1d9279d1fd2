"""Connections of callers: blocking lookups in the caller's own thread.

An operation of the driver changes threads twice within this process. Each change takes some 20 microseconds,
and up to 5 ms beside a busy thread of Python. A lookup moves no blocks, and needs nothing of the driver. So
the caller asks on a connection of its own, and waits for the answer there.

A connection has one caller at a time, and shares no state with other threads. So an exception of a signal
handler, raised between any two bytecodes, costs the connection alone. A lookup that fits no single request,
or whose connection fails, takes the driver's way.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from contextlib import suppress
from itertools import repeat

from ostraca._connection.dial import ClientIdentity, ControlChannel, dial
from ostraca._connection.session import AgentSession
from ostraca._protocol.operations import BlockOperation, Finish, blocks_per_request
from ostraca._protocol.specs import LookupSpec, VolumeKey, VolumeSpec
from ostraca.settings import ClientSettings
from ostraca_fabric.errors import ConnectError, ProtocolError
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.runtime.threads import BackgroundTask
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.messages import SPANS_MAX, Failure, LookupDone, VolumeOpened

log = logging.getLogger("ostraca")

_CONNECTIONS_MAX = 4
"""Connections beside the session's: callers at one time that need no driver."""

_LOOKUPS_EACH = 4
"""Blocking lookups of the driver before a first connection, and before each further one: a program that asks
once needs none.
"""

_DIAL_S = 2.0

_alive: weakref.WeakSet[CallerConnection] = weakref.WeakSet()


class CallerConnection:
    """A connection beside a session, to the same agent. For one thread at a time."""

    def __init__(self, session: AgentSession, channel: ControlChannel) -> None:
        self.session = session
        self._channel = channel
        self._handles: dict[VolumeKey, int] = {}
        self.is_closed = False
        _alive.add(self)

    def look_up(self, spec: LookupSpec, until_s: float) -> Outcomes | None:
        """Ask the agent, and wait for its answer; None if the lookup fits no single request.

        Without an answer by *until_s*, on the monotonic clock, the blocks are LATE, and the connection is
        closed. Raises RefusedError as an operation, OSError for a lost connection, and ProtocolError.
        """
        session, spans = self.session, tuple(chain.span() for chain in spec.parts)
        blocks_max = blocks_per_request(session.limits, spec.volume.hash_bytes)
        if not 0 < spec.blocks <= blocks_max or len(spans) > SPANS_MAX:
            return None
        handle = self._handle(spec.volume, until_s)
        now_s = time.monotonic()
        if handle is None or now_s >= until_s:
            return None
        question = spec.message(session.next_request(), handle, until_s - now_s, spans)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%s asked by its caller: lookup of %d blocks", session.label(question.request), spec.blocks
            )
        answer = self._channel.ask(question, until_s=until_s)
        if answer is None:
            self.close()
            return Outcomes.filled(spec.blocks, spec.states.LATE, Reason.DEADLINE)
        if not isinstance(answer, LookupDone | Failure) or answer.request != question.request:
            raise ProtocolError(f"{type(answer).__name__} is no answer to this Lookup")
        (end,) = BlockOperation(question, until_s=until_s).on(answer, now_s)
        assert isinstance(end, Finish), "an answer ends a lookup"
        return end.outcomes

    def _handle(self, volume: VolumeSpec, until_s: float) -> int | None:
        """Return the handle of a volume, opened if necessary; None if the agent does not open it now."""
        handle = self._handles.get(volume.key)
        if handle is not None:
            return handle
        request = self.session.next_request()
        match self._channel.ask(volume.message(request, may_create=False), until_s=until_s):
            case VolumeOpened(request=answered, handle=handle) if answered == request:
                self._handles[volume.key] = handle
                return handle
        return None

    def shut_down(self) -> None:
        """End a wait for an answer, from another thread."""
        with suppress(OSError):
            self._channel.stream.shut_down()

    def close(self) -> None:
        """Close the connection: the agent ends its lookup."""
        self.is_closed = True
        self._channel.stream.close()

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child, without a message to the agent."""
        with suppress(OSError):
            self._channel.stream.close_in_child()


class CallerConnections(BackgroundTask):
    """Connections of one client's callers, opened in the background as they are wanted. Close it.

    ``look_up`` is for callers' threads, without a lock: a connection in use is in no list. All other methods
    are for the client's own threads.
    """

    def __init__(self, identity: ClientIdentity, settings: ClientSettings) -> None:
        """Begin without connections."""
        self._identity = identity.without_arena()
        self._connections_max = _CONNECTIONS_MAX if settings.caller_connections else 0
        self._session: AgentSession | None = None
        self._idle: deque[CallerConnection] = deque()
        self._open: weakref.WeakSet[CallerConnection] = weakref.WeakSet()
        self._lookups = 0
        """Blocking lookups of the driver since the last failure to connect."""

        super().__init__(
            "callers", self._connect, is_needed=self._is_one_missing, pauses_s=lambda: repeat(0.0)
        )

    def look_up(self, spec: LookupSpec, until_s: float) -> Outcomes | None:
        """Look blocks up in this thread; None if the driver must do so.

        Raises RefusedError as an operation.
        """
        connection = self._take()
        if connection is None:
            return None
        try:
            outcomes = connection.look_up(spec, until_s)
        except (OSError, ProtocolError) as error:
            log.debug("A connection of callers to %s ended: %s", connection.session.agent, error)
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        if not connection.is_closed:
            self._idle.append(connection)
        return outcomes

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
        for connection in list(self._open):
            if connection.session is not session:
                connection.shut_down()
        for _ in range(len(self._idle)):
            with suppress(IndexError):
                connection = self._idle.popleft()
                if connection.session is session:
                    self._idle.append(connection)
                else:
                    connection.close()

    def want_another(self) -> None:
        """Note a blocking lookup that found no connection."""
        self._lookups += 1
        self.start()

    def close(self) -> None:
        """End all connections."""
        super().close()
        self.use(None)

    def _is_one_missing(self) -> bool:
        session = self._session
        if session is None or not session.is_alive:
            return False
        wanted = min(self._connections_max, self._lookups // _LOOKUPS_EACH)
        return sum(each.session is session and not each.is_closed for each in self._open) < wanted

    def _connect(self) -> None:
        session = self._session
        if session is None:
            return
        try:
            channel = dial([session.address], self._identity, until_s=time.monotonic() + _DIAL_S)
        except (ConnectError, ProtocolError) as error:
            log.debug("No connection of callers to %s: %s", session.agent, error)
            self._lookups = 0
            return
        connection = CallerConnection(session, channel)
        if channel.welcome.start_id != session.start_id:  # the agent was started anew
            connection.close()
            self._lookups = 0
            return
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
