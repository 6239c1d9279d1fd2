"""Keeping in reach of an agent: a live session with whichever of the known ones answers.

When a session is lost, the next operation that has time for it dials again; until that succeeds, operations
end as DISCONNECTED. Addresses of agents that say nothing are not dialled by operations: those end at once
where there is no other, and a prober finds out when one answers again. Nothing else runs in the background
but the pump of the live session, a settler while agents that were left owe word about slots, and, once after
each dial, what prepares for the next one.
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ostraca.ask import ask
from ostraca.batch import Target
from ostraca.core.operations import CALLER_CODES
from ostraca.dial import UnreachableError, dial
from ostraca.probing import Prober
from ostraca.session import Session
from ostraca.settling import Settler
from ostraca_fabric.errors import ClosedError, ConnectError, ProtocolError, RefusedError, TransportError
from ostraca_fabric.ports.transport import INLINE
from ostraca_fabric.threads import show_name
from ostraca_fabric.wire.messages import OpenVolume, VolumeOpened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca.arena import Arena
    from ostraca.crew import Crew
    from ostraca.dial import Caller
    from ostraca.session import Mailbox
    from ostraca.settings import ClientSettings
    from ostraca.volume import Volume
    from ostraca_fabric.ports.transport import ArenaEnd
    from ostraca_fabric.wire.address import Address


class Reach:
    """The session of one client, dialled when it is needed. Thread-safe. Close it."""

    def __init__(
        self,
        addresses: Sequence[Address],
        caller: Caller,
        arena: Arena,
        crew: Crew,
        settings: ClientSettings,
        worker: str,
    ) -> None:
        """Dial nobody yet; *worker* is what the client is called in logs."""
        self.unreachable_because = ""
        """Why the last dial failed; empty when it did not."""

        self.session: Session | None = None
        """The current or last one."""

        self._addresses = addresses
        self._caller = caller
        self._arena = arena
        self._crew = crew
        self._settings = settings
        self._worker = worker
        self._request_ids = itertools.count(1)
        self._dialling = threading.Lock()  # held while session and _redial_at_s change
        self._redial_at_s = 0.0
        self._is_closed = False
        self._is_renewed = True
        self._preparing: threading.Timer | None = None
        self._settler = Settler(addresses, caller, arena, self._agent_now)
        self._prober = Prober(caller, settings, lambda: self.live is None, self._found)

    @property
    def live(self) -> Session | None:
        """The session there is now, if it is alive."""
        session = self.session
        return session if session is not None and session.is_alive else None

    def target_at_hand(self, volume: Volume, mail: Mailbox) -> Target | None:
        """Return the volume on the live session, if there is one that it is open on. Never blocks."""
        session = self.live
        handle = None if session is None else session.handles.get(volume.key)
        if session is None or handle is None:
            return None
        return self._target(mail, session, volume, handle)

    def target(self, volume: Volume, mail: Mailbox, until_s: float) -> Target | None:
        """Return the volume on a live session; None when there is none and none can be had by *until_s*.

        Raises RefusedError when the agent says that the volume can't be opened as asked.
        """
        try:
            session = self.dialled(min(until_s, time.monotonic() + self._settings.handshake_s_max))
            handle = self.opened(session, volume, until_s)
        except (ConnectError, ProtocolError) as error:
            self.unreachable_because = str(error)
            return None
        except RefusedError as error:
            if error.code in CALLER_CODES:
                raise
            self.unreachable_because = f"{error.code}: {error}"
            return None
        return self._target(mail, session, volume, handle)

    def dialled(self, until_s: float) -> Session:
        """Return a live session, dialling when there is none.

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

    def opened(self, session: Session, volume: Volume, until_s: float) -> int:
        """Return the volume's handle on a session, opening it there the first time. Raises as ``ask``."""
        handle = session.handles.get(volume.key)
        if handle is None:
            record = volume.record
            answer = ask(
                session,
                lambda request: OpenVolume(
                    request,
                    record.name,
                    record.layout,
                    record.block_bytes,
                    volume.create,
                    volume.break_even_tokens,
                ),
                until_s=until_s,
            )
            if not isinstance(answer, VolumeOpened):
                raise ProtocolError(f"{type(answer).__name__} is no answer to an OpenVolume")
            handle = session.handles[volume.key] = answer.handle
        return handle

    def close(self) -> None:
        """End the session, and dial no more. Requests under way hear Disconnected."""
        self._settler.close()
        self._prober.close()
        with self._dialling:
            self._is_closed = True
            if self._preparing is not None:
                self._preparing.cancel()
                self._preparing.join()
            if self.session is not None:
                self.session.close()

    def _dial(self, until_s: float) -> Session:
        if self._is_closed:
            raise ClosedError("this client is closed: connect again")
        if self.session is not None:
            if self.session.is_alive:
                return self.session
            self.session.close()
            self._note_silence(self.session)
        if time.monotonic() < self._redial_at_s:
            raise ConnectError(self.unreachable_because)
        addresses = self._prober.at_hand(self._addresses)
        if not addresses:
            self._prober.look()
            raise ConnectError(self.unreachable_because)
        began_s = time.monotonic()
        try:
            self._renew()
            began_s = time.monotonic()
            dialled = dial(addresses, self._caller, until_s=until_s)
        except (ConnectError, ProtocolError, TransportError) as error:
            self.unreachable_because = str(error)
            self._redial_at_s = time.monotonic() + self._settings.redial_s
            share_s = (until_s - began_s) / len(addresses)
            if isinstance(error, UnreachableError) and share_s >= self._settings.silent_deadline_least_s:
                self._prober.hold_off(error.silent)
            if self.session is not None:
                self._prober.look()
            if isinstance(error, TransportError):
                raise ConnectError(str(error)) from error
            raise
        self.unreachable_because = ""
        self._is_renewed = False
        self.session = Session(dialled, self._arena, self._settings, self._request_ids, self._worker)
        self._settler.look()
        self._prepare_renewal(self.session.transport)
        return self.session

    def _note_silence(self, lost: Session) -> None:
        """Leave the address of an agent that has fallen silent alone, once for each such session."""
        if lost.fell_silent:
            lost.fell_silent = False
            self.unreachable_because = f"{lost.address}: {lost.lost_because}"
            self._prober.hold_off([lost.address])

    def _found(self) -> None:
        """Let the next operation dial, as an address answers again."""
        self._redial_at_s = 0.0

    def _renew(self) -> None:
        """Let nothing land any more through what the last session offered. Once is enough."""
        if not self._is_renewed:
            self._arena.renew()
            self._is_renewed = True

    def _prepare_renewal(self, transport: str) -> None:
        """Have the next offer made ready in a while, where there is another agent to make it to."""
        if self._preparing is not None:
            self._preparing.cancel()
        if transport == INLINE or len(self._addresses) < 2:  # noqa: PLR2004 (one, and another)
            return
        after_s = min(self._settings.spare_after_s, threading.TIMEOUT_MAX)
        timer = threading.Timer(after_s, _prepare, (self._arena.ends[transport],))
        timer.name, timer.daemon = "ostraca-spare", True
        with suppress(RuntimeError):  # this process may have no more threads, and dials more slowly then
            timer.start()
            self._preparing = timer

    def _agent_now(self) -> str:
        session = self.session
        return session.agent if session is not None else ""

    def _target(self, mail: Mailbox, session: Session, volume: Volume, handle: int) -> Target:
        return Target(
            mail, session, self._arena, self._crew, self._settings, volume.identity, volume.record, handle
        )


def _prepare(end: ArenaEnd) -> None:
    show_name("spare")
    end.prepare_renewal()
