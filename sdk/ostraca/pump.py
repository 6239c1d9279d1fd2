"""The pump: moves a client's frames and lets the transport make progress, in its own thread or a caller's.

Callers send from their own threads: straight into the socket when nothing is queued, so that a request costs
no hop; what the socket does not take is left to the pump. Whoever waits for an answer may *lead*: it then
does the pump's turns itself, and the answer costs no hop either. One thread does turns at a time. The pump's
own stands back while callers lead, and for ``_STAND_BACK_S`` after the last of them. Idle, it sleeps in the
kernel. While slots are in use and the transport's passive side must take part, it wakes at the pace it is
told.

It knows frames, not messages. Whoever makes one gives it four functions: ``on_message`` with each message's
bytes, from whichever thread does a turn (raising ProtocolError ends the connection), ``pace_s`` for how long
to sleep (None: until something happens, and the transport need not take part), ``quiet_until_s`` for when the
connection ends unless something comes (None: never), and ``on_lost``, from the pump's own thread, exactly
once and as the very last, after which nothing that comes from the agent touches memory. An agent that asks
and does not read ends its connection when what waits for it takes more than ``unsent_bytes_max`` of memory,
blocks aside.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ostraca_fabric.errors import ProtocolError, TransportError
from ostraca_fabric.stream import Outbox
from ostraca_fabric.threads import show_name
from ostraca_fabric.wire.frames import BulkEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ostraca.line import Line
    from ostraca_fabric.ports.transport import ArenaEnd
    from ostraca_fabric.wire.frames import BulkFrame, FrameReader

_READS_PER_TURN = 16
_BYTES_PER_CALL = 1 << 20
_SELECT_FD_MAX = 1023

_LINGER_MS = 2
"""How long a turn stays with a bulk frame that is coming in, unless it is woken: sleeping in C costs less
than a turn for each piece of it."""

_STAND_BACK_S = 0.01
"""How long the pump's thread leaves the connection to callers after one has led: handing it back and forth
for each request would cost what leading saves. Until then nobody reads, and word that no caller waits for is
late by so much."""

_alive: weakref.WeakSet[Pump] = weakref.WeakSet()


class Pump:
    """Moves frames between the line of one connection and whoever made it."""

    def __init__(
        self,
        line: Line,
        reader: FrameReader,
        end: ArenaEnd,
        *,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[str], None],
        pace_s: Callable[[], float | None],
        quiet_until_s: Callable[[], float | None],
        unsent_bytes_max: int,
    ) -> None:
        self._line = line
        self._unsent_bytes_max = unsent_bytes_max
        self._reader = reader
        self._end = end
        self._on_message = on_message
        self._on_lost = on_lost
        self._pace_s = pace_s
        self._quiet_until_s = quiet_until_s
        self._lock = threading.Lock()  # guards _outbox, _is_closed and writing to the socket
        self._outbox = Outbox()
        self._is_closed = False
        self._has_begun = False
        self._turns = threading.Lock()  # held while turns are done
        self._leading = threading.Lock()  # held by the caller that leads
        self._led_until_s = 0.0
        self._resumed = threading.Event()
        self._ended = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._why = ""
        self.heard_s = time.monotonic()
        """When bytes last came, on the monotonic clock."""

        self.taken_s = self.heard_s
        """When the socket last had room for bytes that waited for it, on the same clock."""

        self.fell_silent = False
        """Whether the connection was ended because nothing came."""

        self._thread = threading.Thread(target=self._run, name="ostraca-pump", daemon=True)
        _alive.add(self)

    def start(self) -> None:
        """Begin. Afterwards ``on_lost`` is certain to come: it has by then where no thread can be had."""
        try:
            self._thread.start()
        except RuntimeError as error:  # this process may have no more threads
            self._why = f"nobody can read what the agent sends: {error}"
            self._close()

    def send(self, frames: Iterable[bytes | bytearray]) -> None:
        """Send messages, in order, before bulk frames that have not begun.

        Never blocks. On a connection that is lost it does nothing: ``on_lost`` says so.
        """
        with self._lock:
            if self._is_closed:
                return
            try:
                for frame in frames:
                    self._outbox.send(self._line, frame)
            except OSError as error:
                self._sending_failed(error)
            if self._has_unsent:
                self._write_now()

    def send_bulk(self, frames: Sequence[BulkFrame]) -> None:
        """Send bulk frames, in order. Their blocks stay in use until they are sent or ``on_lost`` came."""
        with self._lock:
            if not self._is_closed:
                self._outbox.add_bulk(frames)
                self._write_now()

    def _write_now(self) -> None:
        """Give the socket what it takes, and leave the rest to the pump. The lock is held."""
        is_sent = self._write()
        if self._outbox.held_bytes > self._unsent_bytes_max:
            self._outbox.clear()
            self._shut_down("the agent does not read what it is sent")
        if not is_sent:
            os.eventfd_write(self._wake, 1)

    def wake(self) -> None:
        """Make the pump look at its pace again."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)

    def lead(self, is_done: Callable[[], bool], *, until_s: float) -> bool:
        """Do turns in the caller's thread until *is_done* or *until_s*, on the monotonic clock.

        Returns False when there is another leader, or the connection has ended: wait otherwise then.
        """
        if self._ended.is_set() or not self._leading.acquire(blocking=False):
            return False
        try:
            self._led_until_s = math.inf
            if not self._turns.acquire(blocking=False):
                self.wake()
                self._turns.acquire()
            try:
                while not (self._ended.is_set() or is_done()) and (left_s := until_s - time.monotonic()) > 0:
                    self._guarded_turn(left_s)
            finally:
                self._turns.release()
        finally:
            self._led_until_s = time.monotonic() + _STAND_BACK_S
            self._leading.release()
        return not self._ended.is_set()

    def resume(self) -> None:
        """Have the pump's thread read again: someone waits for an answer who will not lead."""
        if not self.is_led:
            self._led_until_s = 0.0
            self._resumed.set()

    @property
    def is_led(self) -> bool:
        """Whether a caller does the turns now."""
        return self._leading.locked()

    def break_off(self, why: str) -> None:
        """End the connection from any thread; ``on_lost`` follows from the pump's."""
        with self._lock:
            self._shut_down(why)

    def stop(self) -> None:
        """End the connection and wait until ``on_lost`` has returned. Not from the pump's own thread."""
        self.break_off("closed here")
        if self._thread.ident is not None:
            self._thread.join()

    def _shut_down(self, why: str) -> None:
        """Make the pump's next read the last one.

        The lock is held: a closed descriptor may be someone else's by now.
        """
        if not self._is_closed:
            self._why = self._why or why
            with contextlib.suppress(OSError):
                self._line.shut_down()

    @property
    def _has_unsent(self) -> bool:
        """Whether anything waits for the socket. The lock is held."""
        return not self._outbox.is_empty or self._line.has_unsent

    def _write(self) -> bool:
        """Give the socket what it takes; tell whether nothing is left. The lock is held."""
        try:
            return self._outbox.write(self._line, _BYTES_PER_CALL) and self._line.flush()
        except OSError as error:
            self._sending_failed(error)
            return True

    def _sending_failed(self, error: OSError) -> None:
        self._outbox.clear()
        self._shut_down(f"sending failed: {error}")

    def _run(self) -> None:
        show_name("pump")
        try:
            while not self._ended.is_set():
                if self._led_until_s > time.monotonic():
                    self._resumed.wait(_STAND_BACK_S)
                    self._resumed.clear()
                    continue
                with self._turns:
                    if not self._ended.is_set():
                        self._guarded_turn(None)
        finally:
            self._close()

    def _close(self) -> None:
        """Close the connection, and say so."""
        with self._turns:
            self._ended.set()
            with self._lock:
                self._is_closed = True
                self._outbox.clear()
                self._line.close()
                os.close(self._wake)
            self._reader.close()
        self._on_lost(self._why or "the agent closed the connection")

    def _guarded_turn(self, longest_s: float | None) -> None:
        """Do a turn; note it when the connection has ended."""
        goes_on = False
        try:
            goes_on = self._turn(longest_s)
        except ProtocolError as error:
            self._why = self._why or f"the agent broke the wire's rules: {error}"
        except TransportError as error:
            self._why = self._why or f"the data plane broke: {error}"
        finally:
            if not goes_on:
                self._ended.set()

    def _turn(self, longest_s: float | None) -> bool:
        """Sleep until there is something to do, and do it; False when the connection has ended."""
        if not self._has_begun:
            self._has_begun = True
            # What came behind the Welcome, in the same read.
            self._take(0)
        with self._lock:
            has_more = self._has_unsent
        pace_s = self._pace_s()
        looked_s, quiet_until_s = time.monotonic(), self._quiet_until_s()
        quiet_s = None if quiet_until_s is None else max(0.0, quiet_until_s - looked_s)
        paces_s = [each for each in (pace_s, longest_s, quiet_s) if each is not None]
        readable, writable = self._sleep(min(paces_s, default=None), wants_writing=has_more)
        if writable:
            self.taken_s = time.monotonic()
            with self._lock:
                self._write()
        if pace_s is not None:
            self._end.progress()
        if readable:
            return self._read()
        # This process may have stood still. What came meanwhile would have been found after that look.
        if quiet_until_s is not None and looked_s >= quiet_until_s and not writable:
            self.fell_silent = True
            self._why = self._why or "the agent has fallen silent: it does not even answer a Ping"
            return False
        return True

    def _sleep(self, timeout_s: float | None, *, wants_writing: bool) -> tuple[bool, bool]:
        """Wait for the socket, a wake or the timeout; tell whether the socket can be read and written."""
        connection, wake = self._line.fileno(), self._wake
        has_pending = self._line.has_pending
        timeout_s = 0.0 if has_pending else timeout_s
        if max(connection, wake) <= _SELECT_FD_MAX:
            # select keeps to microseconds, poll and epoll round up to the next millisecond.
            found = select.select([connection, wake], [connection] if wants_writing else [], [], timeout_s)
            readable, writable, woken = connection in found[0], bool(found[1]), wake in found[0]
        else:
            poll = select.poll()
            poll.register(connection, select.POLLIN | (select.POLLOUT if wants_writing else 0))
            poll.register(wake, select.POLLIN)
            events = dict(poll.poll(None if timeout_s is None else timeout_s * 1000))
            readable = bool(events.get(connection, 0) & ~select.POLLOUT)
            writable, woken = bool(events.get(connection, 0) & select.POLLOUT), wake in events
        if woken:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(wake)
        return readable or has_pending, writable

    def _read(self) -> bool:
        for _ in range(_READS_PER_TURN):
            try:
                count, is_all = self._receive()
            except BlockingIOError:
                return True
            except OSError as error:
                self._why = self._why or f"receiving failed: {error}"
                return False
            if not count:
                return False
            self.heard_s = time.monotonic()
            self._take(count)
            if is_all:
                return True
        return True

    def _receive(self) -> tuple[int, bool]:
        """Receive what is there; return how many bytes that was, and whether it was all."""
        with self._lock:
            wait_ms = 0 if self._has_unsent else _LINGER_MS
        return self._line.receive(self._reader, wake=self._wake, wait_ms=wait_ms)

    def _take(self, count: int) -> None:
        """Take what *count* more bytes completed. Raises ProtocolError."""
        for event in self._reader.received(count):
            if isinstance(event, ProtocolError):
                raise event
            if not isinstance(event, BulkEnd):
                self._on_message(event)

    def close_in_child(self) -> None:
        """Let a forked child go of the connection, without a word to the agent: it is the parent's."""
        with contextlib.suppress(OSError):
            self._line.let_go()


def _after_fork_in_child() -> None:
    """A child that kept the socket open would hide its parent's death from the agent."""
    for pump in list(_alive):
        pump.close_in_child()
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
