"""Keeping in reach of an agent: a live session with whichever of the known ones answers.

When a session is lost, the next operation that has time for it dials again; until that succeeds, operations
end as DISCONNECTED. Addresses of agents that say nothing are not dialled by operations: those end at once
where there is no other, and a prober finds out when one answers again. Nothing else runs in the background
but the pump of the live session, a settler while agents that were left owe word about slots, and, once after
each dial, what prepares for the next one; and, before one, what takes back what was offered on the last.

An agent that ends in order says so beforehand. A thread then finds another one, over ends of its own, while
operations go on with the first. They go to the other from when it is there, and the session that was left
ends when those under way on it have. A client that is not with the first of its addresses goes back there in
the same way, once an agent answers.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from ostraca.ask import ask
from ostraca.batch import Target
from ostraca.core.operations import CALLER_CODES
from ostraca.dial import UnreachableError, dial
from ostraca.elsewhere import cut_off, dialled_elsewhere
from ostraca.homing import Homing
from ostraca.probing import Prober
from ostraca.renewal import Renewal
from ostraca.session import Session
from ostraca.settling import Settler
from ostraca_fabric.errors import ClosedError, ConnectError, ProtocolError, RefusedError, TransportError
from ostraca_fabric.ports.transport import INLINE
from ostraca_fabric.threads import show_name
from ostraca_fabric.wire.messages import OpenVolume, VolumeOpened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ostraca.arena import Arena
    from ostraca.crew import Crew
    from ostraca.dial import Caller, Dialled
    from ostraca.session import Mailbox
    from ostraca.settings import ClientSettings
    from ostraca.volume import Volume
    from ostraca_fabric.ports.transport import ArenaEnd
    from ostraca_fabric.wire.address import Address


log = logging.getLogger("ostraca")


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

        self._left: tuple[Session, ...] = ()
        """Retired ones that have not ended."""

        self._addresses = addresses
        self._caller = caller
        self._arena = arena
        self._crew = crew
        self._settings = settings
        self._worker = worker
        self._request_ids = itertools.count(1)
        self._dialling = threading.Lock()  # held while session and _redial_at_s change
        self._redial_at_s = 0.0
        self._closed = threading.Event()
        self._changing: list[threading.Thread] = []
        self._renewal = Renewal(arena)
        self._preparing: threading.Timer | None = None
        self._settler = Settler(addresses, caller, arena, self._agent_now)
        self._prober = Prober(caller, settings, lambda: self.live is None, self._found)
        self._ended: set[bytes] = set()
        """The starts of agents that have said that they end."""

        self._homing = Homing(caller, settings, self._preferred, self._has_ended, self._go_back)

    @property
    def live(self) -> Session | None:
        """The session there is now, if it is alive."""
        session = self.session
        return session if session is not None and session.is_alive else None

    @property
    def progress_s(self) -> float | None:
        """How often who waits for several sessions' first messages must call ``progress``; None for never.

        It changes as slots are taken and given back.
        """
        paces_s = [each.progress_s for each in self._sessions() if each.is_alive]
        return min((each for each in paces_s if each is not None), default=None)

    def progress(self) -> None:
        """Let the transports of all sessions make progress."""
        for session in self._sessions():
            session.progress()

    @contextmanager
    def taken_up(self, until_s: float) -> Iterator[Session]:
        """Lend a live session, taken up meanwhile. Raises as ``dialled``."""
        session = self._taken_up(until_s)
        try:
            yield session
        finally:
            session.put_down()

    def target_at_hand(self, volume: Volume, mail: Mailbox) -> Target | None:
        """Return the volume on the live session, if there is one that it is open on. Never blocks."""
        session = self.live
        handle = None if session is None else session.handles.get(volume.key)
        if session is None or handle is None or not session.take_up():
            return None
        return self._target(mail, session, volume, handle)

    def target(self, volume: Volume, mail: Mailbox, until_s: float) -> Target | None:
        """Return the volume on a live session; None when there is none and none can be had by *until_s*.

        Raises RefusedError when the agent says that the volume can't be opened as asked.
        """
        try:
            session = self._taken_up(min(until_s, time.monotonic() + self._settings.handshake_s_max))
            try:
                handle = self.opened(session, volume, until_s)
            except BaseException:
                session.put_down()
                raise
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
            asked = OpenVolume(
                0,
                record.name,
                record.layout,
                record.block_bytes,
                volume.create,
                volume.break_even_tokens,
            )
            handle = _opened(session, volume.key, asked, until_s)
        return handle

    def close(self) -> None:
        """End the session, and dial no more. Requests under way hear Disconnected."""
        self._settler.close()
        self._prober.close()
        self._homing.close()
        self._closed.set()
        with self._dialling:
            if self._preparing is not None:
                self._preparing.cancel()
                self._preparing.join()
            for session in self._sessions():
                session.close()
        self._renewal.close()
        for thread in self._changing:
            thread.join()

    def _sessions(self) -> tuple[Session, ...]:
        """Return the current or last one, and those that are left."""
        return self._left if self.session is None else (self.session, *self._left)

    def _taken_up(self, until_s: float) -> Session:
        """Return a live session that was taken up. Raises as ``dialled``."""
        session = self.dialled(until_s)
        if not session.take_up():  # it has ended just then
            session = self.dialled(until_s)
            if not session.take_up():
                raise ConnectError(session.lost_because)
        return session

    def _dial(self, until_s: float) -> Session:
        if self._closed.is_set():
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
        left = [each.address for each in self._left]
        addresses.sort(key=lambda address: address in left)
        self._renew(until_s)
        began_s = time.monotonic()
        try:
            dialled = dial(addresses, self._caller, until_s=until_s)
        except (ConnectError, ProtocolError, TransportError) as error:
            share_s = (until_s - began_s) / len(addresses)
            if isinstance(error, UnreachableError) and share_s >= self._settings.silent_deadline_least_s:
                self._prober.hold_off(error.silent)
            self._put_off(error)
            if isinstance(error, TransportError):
                raise ConnectError(str(error)) from error
            raise
        return self._begin(self._met(dialled))

    def _renew(self, until_s: float) -> None:
        """Let nothing land any more through what the last session offered. Raises ConnectError."""
        try:
            self._renewal.finish(until_s)
        except TimeoutError as error:  # it goes on, and the next call need not wait for all of it
            self.unreachable_because = "what was offered to the last agent is being taken back"
            raise ConnectError(self.unreachable_because) from error
        except TransportError as error:
            self._put_off(error)
            raise ConnectError(str(error)) from error

    def _put_off(self, error: Exception) -> None:
        """Let no operation dial for a while."""
        self.unreachable_because = str(error)
        self._redial_at_s = time.monotonic() + self._settings.redial_s
        if self.session is not None:
            self._prober.look()

    def _met(self, dialled: Dialled) -> Session:
        return Session(
            dialled,
            self._caller.ends,
            self._arena,
            self._settings,
            self._request_ids,
            self._worker,
            self._on_leaving,
        )

    def _begin(self, session: Session) -> Session:
        """Let operations have it."""
        self.unreachable_because = ""
        self._renewal.offered()
        self.session = session
        self._settler.look()
        self._prepare_renewal(session.transport)
        self._homing.look()
        return session

    def _on_leaving(self, session: Session) -> None:
        self._ended.add(session.start_id)
        thread = threading.Thread(
            target=self._change_over, args=(session,), name="ostraca-change", daemon=True
        )
        with suppress(RuntimeError):  # this process may have no more threads: then it is left when it is lost
            thread.start()
            self._changing = [each for each in self._changing if each.is_alive()] + [thread]

    def _change_over(self, leaving: Session) -> None:
        """Find another agent, begin there, and end what is left here."""
        show_name("change")
        spare: dict[str, ArenaEnd] = {}
        try:
            while True:
                with self._dialling:
                    if leaving is not self.live or self._closed.is_set():
                        break
                    dialled = self._another(leaving, spare, self._addresses)
                    if dialled is not None:
                        self._succeed(leaving, dialled, spare)
                        break
                self._closed.wait(self._settings.redial_s)
        finally:
            cut_off(spare)
        self._let_end(leaving)

    def _preferred(self) -> Sequence[Address]:
        """Return the addresses before that of the live session; none where there is no session."""
        session = self.live
        return () if session is None else self._addresses[: self._addresses.index(session.address)]

    def _has_ended(self, start_id: bytes) -> bool:
        """Say whether an agent is one to go to no more, or the one that the client is with."""
        session = self.live
        return start_id in self._ended or (session is not None and session.start_id == start_id)

    def _go_back(self, address: Address) -> bool:
        """Go to a preferred agent that answers there, and end what is left where the client was; say whether
        it went.
        """
        away = self.live
        spare: dict[str, ArenaEnd] = {}
        with self._dialling:
            if away is None or away is not self.live or self._closed.is_set():
                return False
            try:
                dialled = self._another(away, spare, [address])
                if dialled is None:
                    return False
                self._prober.answers(address)
                self._succeed(away, dialled, spare)
            finally:
                cut_off(spare)
        self._let_end(away)
        return True

    def _let_end(self, left: Session) -> None:
        """End a session that was left when nobody uses it any more; one that was not left goes on."""
        if left not in self._left:
            return
        left.end_unused()
        with self._dialling:
            self._left = tuple(each for each in self._left if each is not left)
        self._settler.look()

    def _another(
        self, leaving: Session, spare: dict[str, ArenaEnd], wanted: Sequence[Address]
    ) -> Dialled | None:
        """As ``dialled_elsewhere``. Addresses that are held off come last: nobody probes them while there is
        a session, nor waits here.
        """
        at_hand = self._prober.at_hand(wanted)
        return dialled_elsewhere(
            sorted(wanted, key=lambda address: address not in at_hand),
            (leaving, *self._left),
            self._caller,
            self._arena,
            spare,
            within_s=self._settings.handshake_s_max,
        )

    def _succeed(self, leaving: Session, dialled: Dialled, spare: dict[str, ArenaEnd]) -> None:
        """Have operations go to another agent from now on, with the volumes open that they have used, and by
        the ends in *spare*, where none are left.
        """
        leaving.retire()
        ends = dict(spare)
        spare.clear()
        self._arena.ends = ends
        self._caller = replace(self._caller, ends=ends)
        session = self._met(dialled)
        until_s = time.monotonic() + self._settings.handshake_s_max
        for key, asked in list(leaving.asked.items()):
            with suppress(ConnectError, ProtocolError, RefusedError):  # who needs it asks again, and is told
                _opened(session, key, asked, until_s)
        self._left = (*self._left, leaving)
        self._begin(session)
        log.debug("%s takes over from %s", session.agent, leaving.agent)

    def _note_silence(self, lost: Session) -> None:
        """Leave the address of an agent that has fallen silent alone, once for each such session."""
        if lost.fell_silent:
            lost.fell_silent = False
            self.unreachable_because = f"{lost.address}: {lost.lost_because}"
            self._prober.hold_off([lost.address])

    def _found(self) -> None:
        """Let the next operation dial, as an address answers again."""
        self._redial_at_s = 0.0

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


def _opened(session: Session, key: tuple[str, bytes, int, int], asked: OpenVolume, until_s: float) -> int:
    """Open a volume on a session, and return its handle. Raises as ``ask``."""
    answer = ask(session, lambda request: msgspec.structs.replace(asked, request=request), until_s=until_s)
    if not isinstance(answer, VolumeOpened):
        raise ProtocolError(f"{type(answer).__name__} is no answer to an OpenVolume")
    session.asked[key] = asked
    session.handles[key] = answer.handle
    return answer.handle


def _prepare(end: ArenaEnd) -> None:
    show_name("spare")
    end.prepare_renewal()
