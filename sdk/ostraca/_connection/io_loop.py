"""I/O loop: moves a client's frames and lets the transport make progress.

A turn of the loop runs in the loop's own thread or in a leading thread. The driver and its helpers send from
their own threads: directly into the socket when nothing is queued, so that a request needs no change of
threads. The loop sends the rest when the socket has room.

A thread waiting for an answer may *lead*: this thread does the turns, so the answer needs no change of
threads either. The driver leads also while idle: to take over from another thread takes two changes of
threads, up to 5 ms each beside a busy thread of Python. A leader delivers to all waiting threads
(``Waiters``), and hands on to another when done. Only one thread does turns at a time. The loop's own thread
stands back while another leads (``_LED_S``), and for ``_STAND_BACK_S`` afterwards. While slots are in use and
the transport's passive side must take part, the loop wakes at the given pace.

No caller's thread runs this code: an exception of a signal handler between two bytecodes could leave a lock
held.

The loop knows frames, not messages. The owner passes four functions:

- ``on_message`` gets each message's bytes, in the thread that does the turn. A ProtocolError ends the
  connection.
- ``pace_s`` returns the longest sleep; None means until an event, without progress of the transport.
- ``silent_at_s`` returns the time at which a connection without new bytes ends; None means never.
- ``on_loss`` is the last call, exactly once and in the loop's own thread. Nothing from the agent touches
  memory afterwards.

An agent that asks without reading loses its connection when the memory for waiting bytes, without blocks,
exceeds ``unsent_bytes_max``.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import ProtocolError, TransportError
from ostraca_fabric.ports.transport import ArenaEnd
from ostraca_fabric.runtime.events import clear_event, set_event
from ostraca_fabric.runtime.threads import show_name
from ostraca_fabric.sockets.stream import ByteStream, Outbox
from ostraca_fabric.wire.frames import BulkEnd, BulkFrame, FrameReader

_Item_co = TypeVar("_Item_co", covariant=True)

_READS_PER_TURN = 16
_BYTES_PER_CALL = 1 << 20
_SELECT_FD_MAX = 1023

_LINGER_MS = 2
"""How long a turn stays with an incoming bulk frame, unless woken: a sleep in C costs less than a turn per
piece.
"""

_STAND_BACK_S = 0.01
"""How long the loop's thread stands back after a caller has led: a handover per request would cost as much as
leading saves. No thread reads until then, so messages without a waiting caller are late by this time, or by
``_LED_S`` unless the leader calls ``resume``.
"""

_LED_S = 0.1
"""The same while the leader goes on, as an idle driver does. Each look of the thread may cost the leader the
GIL.
"""

_alive: weakref.WeakSet[IoLoop] = weakref.WeakSet()


class IoLoop:
    """I/O loop between the byte stream of one connection and its owner."""

    def __init__(
        self,
        stream: ByteStream,
        reader: FrameReader,
        end: ArenaEnd,
        *,
        on_message: Callable[[bytes], None],
        on_loss: Callable[[str], None],
        pace_s: Callable[[], float | None],
        silent_at_s: Callable[[], float | None],
        unsent_bytes_max: int,
    ) -> None:
        self._stream = stream
        self._unsent_bytes_max = unsent_bytes_max
        self._reader = reader
        self._end = end
        self._on_message = on_message
        self._on_loss = on_loss
        self._pace_s = pace_s
        self._silent_at_s = silent_at_s
        self._lock = threading.Lock()  # guards _outbox, _is_closed and writing to the socket
        self._outbox = Outbox()
        self._is_closed = False
        self._has_begun = False
        self._turns = threading.Lock()  # held while turns are done
        self._receiving = threading.Lock()  # held while bytes are received and processed
        self._gate = threading.Lock()  # passed before ``_receiving``: ``detach`` waits for one receipt alone
        self._leading = threading.Lock()  # held by the caller that leads
        self._led_until_s = 0.0
        self._resumed = threading.Event()
        self._ended = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._leader_wake = -1  # wakes the leader, beside ``_wake``
        self._cause = ""
        self.received_s = time.monotonic()
        """Time of the last received bytes, on the monotonic clock."""

        self.accepted_s = self.received_s
        """Time at which the socket last had room for waiting bytes, on the same clock."""

        self.is_silent = False
        """Whether the connection was ended because of a silent agent."""

        self._thread = threading.Thread(target=self._run, name="ostraca-io", daemon=True)
        _alive.add(self)

    def start(self) -> None:
        """Start the loop; from here on ``on_loss`` is certain to be called.

        ``on_loss`` has been called on return if no thread could be started.
        """
        try:
            self._thread.start()
        except RuntimeError as error:  # the process can start no more threads
            self._cause = f"the messages of the agent can't be read: {error}"
            self._close()

    def send(self, frames: Iterable[bytes | bytearray]) -> None:
        """Send messages in order, before bulk frames not yet begun.

        Never blocks. On a lost connection the call does nothing: ``on_loss`` reports the loss.
        """
        with self._lock:
            if self._is_closed:
                return
            try:
                for frame in frames:
                    self._outbox.send(self._stream, frame)
            except OSError as error:
                self._fail_sending(error)
            if self._has_unsent:
                self._write_now()

    def send_bulk(self, frames: Sequence[BulkFrame]) -> None:
        """Send bulk frames in order.

        Their blocks stay in use until sent, or until ``on_loss``.
        """
        with self._lock:
            if not self._is_closed:
                self._outbox.add_bulk(frames)
                self._write_now()

    def _write_now(self) -> None:
        """Write to the socket, leaving the rest to the loop. The lock is held."""
        is_sent = self._write()
        if self._outbox.held_bytes > self._unsent_bytes_max:
            self._outbox.clear()
            self._shut_down("the agent does not read its messages")
        if not is_sent:
            set_event(self._wake)

    def detach(self, memory: NDArray[np.uint8]) -> None:
        """Ensure that blocks in *memory*, an array object, are neither received nor sent any more.

        The rest of a frame under way is discarded, or sent as zeros. Waits for the end of one receipt, which
        takes milliseconds. The caller must have ensured that no later frame finds the memory.
        """
        with self._gate, self._receiving:
            self._reader.divert(memory)
        with self._lock:
            self._outbox.blank(memory)

    def wake(self) -> None:
        """Make the loop read its pace again."""
        with self._lock:
            if not self._is_closed:
                set_event(self._wake)

    def lead(self, is_done: Callable[[], bool], *, until_s: float, wake: int = -1) -> bool:
        """Do turns in this thread until *is_done* or *until_s*, on the monotonic clock.

        A turn also ends when the eventfd *wake* is readable; the turn reads the eventfd. Returns False with
        another leader, or after the end of the connection: the caller must then wait in another way.
        """
        if self._ended.is_set() or not self._leading.acquire(blocking=False):
            return False
        try:
            self._led_until_s = math.inf
            if not self._turns.acquire(blocking=False):
                self.wake()
                self._turns.acquire()
            try:
                self._leader_wake = wake
                while not (self._ended.is_set() or is_done()) and (left_s := until_s - time.monotonic()) > 0:
                    self._guarded_turn(left_s)
            finally:
                self._leader_wake = -1
                self._turns.release()
        finally:
            self._led_until_s = time.monotonic() + _STAND_BACK_S
            self._leading.release()
            if self._ended.is_set():  # the loop's thread tells the owner of the loss
                self._resumed.set()
        return not self._ended.is_set()

    def resume(self) -> None:
        """Make the loop's thread read again, for a waiter that does not lead."""
        if not self.is_led:
            self._led_until_s = 0.0
            self._resumed.set()

    @property
    def is_led(self) -> bool:
        """Whether a caller does the turns now."""
        return self._leading.locked()

    def break_off(self, cause: str) -> None:
        """End the connection from any thread; ``on_loss`` follows in the loop's."""
        with self._lock:
            self._shut_down(cause)
        self._led_until_s = 0.0
        self._resumed.set()

    def stop(self) -> None:
        """End the connection, and wait for the return of ``on_loss``.

        Not from the loop's own thread.
        """
        self.break_off("closed here")
        if self._thread.ident is not None:
            self._thread.join()

    def _shut_down(self, cause: str) -> None:
        """Make the loop's next read the last. The lock is held."""
        # The descriptor of a closed socket may belong to another file by now.
        if not self._is_closed:
            self._cause = self._cause or cause
            with contextlib.suppress(OSError):
                self._stream.shut_down()

    @property
    def _has_unsent(self) -> bool:
        """Whether bytes wait for the socket. The lock is held."""
        return not self._outbox.is_empty or self._stream.has_unsent

    def _write(self) -> bool:
        """Write to the socket; tell whether nothing is left. The lock is held."""
        try:
            return self._outbox.write(self._stream, _BYTES_PER_CALL) and self._stream.flush()
        except OSError as error:
            self._fail_sending(error)
            return True

    def _fail_sending(self, error: OSError) -> None:
        self._outbox.clear()
        self._shut_down(f"sending failed: {error}")

    def _run(self) -> None:
        show_name("io")
        try:
            while not self._ended.is_set():
                if self._led_until_s > time.monotonic():
                    is_stable = self.is_led and self._pace_s() is None
                    self._resumed.wait(_LED_S if is_stable else _STAND_BACK_S)
                    self._resumed.clear()
                    continue
                with self._turns:
                    if not self._ended.is_set():
                        self._guarded_turn(None)
        finally:
            self._close()

    def _close(self) -> None:
        """Close the connection, and call ``on_loss``."""
        with self._turns:
            self._ended.set()
            with self._lock:
                self._is_closed = True
                self._outbox.clear()
                self._stream.close()
                os.close(self._wake)
            self._reader.close()
        self._on_loss(self._cause or "the agent closed the connection")

    def _guarded_turn(self, longest_s: float | None) -> None:
        """Do a turn, and note the end of the connection."""
        goes_on = False
        try:
            goes_on = self._turn(longest_s)
        except ProtocolError as error:
            self._cause = self._cause or f"the agent broke the wire's rules: {error}"
        except TransportError as error:
            self._cause = self._cause or f"the data plane broke: {error}"
        finally:
            if not goes_on:
                self._ended.set()

    def _turn(self, longest_s: float | None) -> bool:
        """Sleep until there is work, and do it; False at the end of the connection."""
        if not self._has_begun:
            self._has_begun = True
            # Bytes behind the Welcome, in the same read.
            self._take(0)
        with self._lock:
            has_more = self._has_unsent
        pace_s = self._pace_s()
        looked_s, silent_at_s = time.monotonic(), self._silent_at_s()
        quiet_s = None if silent_at_s is None else max(0.0, silent_at_s - looked_s)
        paces_s = [each for each in (pace_s, longest_s, quiet_s) if each is not None]
        readable, writable = self._sleep(min(paces_s, default=None), wants_writing=has_more)
        if writable:
            self.accepted_s = time.monotonic()
            with self._lock:
                self._write()
        if pace_s is not None:
            self._end.progress()
        if readable:
            return self._read()
        # After a standstill of this process, bytes that came meanwhile are found after ``looked_s``.
        if silent_at_s is not None and looked_s >= silent_at_s and not writable:
            self.is_silent = True
            self._cause = self._cause or "the agent is silent: no answer even to a Ping"
            return False
        return True

    def _sleep(self, timeout_s: float | None, *, wants_writing: bool) -> tuple[bool, bool]:
        """Wait for the socket, a wake or the timeout; return readable and writable."""
        connection = self._stream.fileno()
        wakes = [self._wake] if self._leader_wake < 0 else [self._wake, self._leader_wake]
        has_pending = self._stream.has_pending
        timeout_s = 0.0 if has_pending else timeout_s
        if max(connection, *wakes) <= _SELECT_FD_MAX:
            # select keeps to microseconds, poll and epoll round up to the next millisecond.
            found = select.select([connection, *wakes], [connection] if wants_writing else [], [], timeout_s)
            readable, writable = connection in found[0], bool(found[1])
            woken = [wake for wake in wakes if wake in found[0]]
        else:
            poll = select.poll()
            poll.register(connection, select.POLLIN | (select.POLLOUT if wants_writing else 0))
            for wake in wakes:
                poll.register(wake, select.POLLIN)
            events = dict(poll.poll(None if timeout_s is None else timeout_s * 1000))
            readable = bool(events.get(connection, 0) & ~select.POLLOUT)
            writable = bool(events.get(connection, 0) & select.POLLOUT)
            woken = [wake for wake in wakes if wake in events]
        for wake in woken:
            clear_event(wake)
        return readable or has_pending, writable

    def _read(self) -> bool:
        for _ in range(_READS_PER_TURN):
            with self._gate:
                self._receiving.acquire()
            try:
                goes_on = self._read_once()
            finally:
                self._receiving.release()
            if goes_on is not None:
                return goes_on
        return True

    def _read_once(self) -> bool | None:
        """Receive and process bytes; None if more are likely, False at the end of the connection."""
        try:
            count, is_all = self._receive()
        except BlockingIOError:
            return True
        except OSError as error:
            self._cause = self._cause or f"receiving failed: {error}"
            return False
        if not count:
            return False
        self.received_s = time.monotonic()
        self._take(count)
        return True if is_all else None

    def _receive(self) -> tuple[int, bool]:
        """Receive the available bytes; return their number, and whether that was all."""
        with self._lock:
            wait_ms = 0 if self._has_unsent else _LINGER_MS
        wake = self._wake if self._leader_wake < 0 else self._leader_wake
        return self._stream.receive(self._reader, wake=wake, wait_ms=wait_ms)

    def _take(self, count: int) -> None:
        """Process the frames completed by *count* more bytes. Raises ProtocolError."""
        for event in self._reader.received(count):
            if isinstance(event, ProtocolError):
                raise event
            if not isinstance(event, BulkEnd):
                self._on_message(event)

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child, without a message to the agent.

        The connection is the parent's.
        """
        with contextlib.suppress(OSError):
            self._stream.close_in_child()


class Reader(Protocol[_Item_co]):
    """The queue of a waiting thread."""

    @property
    def descriptor(self) -> int:
        """An eventfd, readable after an item from another thread; -1 if no other thread adds items."""

    def empty(self) -> bool:
        """Tell whether the queue is empty."""

    def get(self, *, timeout: float | None = None) -> _Item_co:
        """Take the oldest item. Raises queue.Empty."""

    def wake(self) -> None:
        """Wake the thread to try to read the connection."""


class Waiters:
    """The waiting threads of a connection. Thread-safe."""

    def __init__(self, loop: IoLoop, has_others: Callable[[object], bool]) -> None:
        """Begin without readers; *has_others* tells whether any other reader is owed mail."""
        self._loop = loop
        self._has_others = has_others
        self._readers: deque[Reader[object]] = deque()

    def wait(self, reader: Reader[_Item_co], *, until_s: float) -> _Item_co | None:
        """Return the next item of *reader*, or None at *until_s* on the monotonic clock.

        The thread reads from the connection meanwhile, unless another thread does.
        """
        self._readers.append(reader)
        try:
            while reader.empty() and self._loop.lead(
                lambda: not reader.empty(), until_s=until_s, wake=reader.descriptor
            ):
                if time.monotonic() >= until_s:
                    return None
            return reader.get(timeout=max(0.0, until_s - time.monotonic()))
        except Empty:
            return None
        finally:
            self._readers.remove(reader)
            self._hand_on(reader)

    def _hand_on(self, reader: object) -> None:
        """Let another waiting thread read after *reader* has stopped."""
        if self._loop.is_led:
            return
        if self._readers:
            with contextlib.suppress(IndexError):
                self._readers[0].wake()
                return
        if self._has_others(reader):
            self._loop.resume()


def _after_fork_in_child() -> None:
    """Close inherited sockets, which would hide the parent's death from agents."""
    for loop in list(_alive):
        loop.close_in_child()
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
