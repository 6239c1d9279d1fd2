"""How a connection's bytes leave, and how blocks come in beside the event loop's own reading.

A ``SocketLine`` writes through a second descriptor of the socket: blocks leave from where they lie and
are known to have left. uvloop and, from Python 3.12 on, asyncio keep *references* to memory that they could
not send at once, and say nothing when they let go of it. A ``TransportLine`` is for transports without a
socket that means anything to us: encrypted ones, and simulated ones. It gives them copies, as many as they
take before they ask to pause.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from ostraca_fabric.stream import CopyingExit, Exit, SocketExit, receive
from ostraca_fabric.tcp import be_watchful

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_fabric.connection.settings import ConnectionSettings
    from ostraca_fabric.wire.frames import FrameReader
    from ostraca_fabric.wire.passage import Passage

_ASKED_MAX = 3


class Line(Exit, Protocol):
    """One connection's way out, and what its protocol must tell it."""

    can_end_writing: bool
    """Whether the other end can be told that nothing more comes while it is still heard."""

    def watch(self, when_room: Callable[[], None]) -> None:
        """Call this, from the loop, whenever there is room, until ``unwatch``."""

    def unwatch(self) -> None:
        """Call nothing any more."""

    def pause(self) -> None:
        """Note that the transport has no room."""

    def resume(self) -> None:
        """Note that the transport has room again."""

    def end_writing(self) -> None:
        """Say that nothing more comes, if that can be said."""

    def receive(self, reader: FrameReader, landing: Passage, bytes_max: int) -> int:
        """Receive what else is there for blocks; return how many bytes that was."""

    def close(self) -> None:
        """Let go of what this holds beside the transport."""


def line_of(transport: asyncio.Transport, settings: ConnectionSettings) -> Line:
    """Return the line of a new connection."""
    found = transport.get_extra_info("socket")
    if found is None:
        return TransportLine(transport)
    own = socket.socket(fileno=os.dup(found.fileno()))
    tuned(own, settings)
    if transport.get_extra_info("ssl_object") is None:
        return SocketLine(own)
    own.close()
    return TransportLine(transport)


class SocketLine(SocketExit):
    """A socket's own line."""

    can_end_writing = True

    def __init__(self, own: socket.socket) -> None:
        """Take a descriptor of the connection that nobody else has."""
        super().__init__(own)
        self._loop = asyncio.get_running_loop()
        self._is_watched = False

    def watch(self, when_room: Callable[[], None]) -> None:
        """Have the loop look at the socket."""
        if not self._is_watched:
            self._is_watched = True
            self._loop.add_writer(self._socket.fileno(), when_room)

    def unwatch(self) -> None:
        """Have the loop look no more."""
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_writer(self._socket.fileno())

    def pause(self) -> None:
        """Take no notice: nothing is written through the transport."""

    def resume(self) -> None:
        """Take no notice."""

    def end_writing(self) -> None:
        """Shut the socket for writing."""
        with suppress(OSError):  # a connection that was reset, which the loop is about to find out
            self._socket.shutdown(socket.SHUT_WR)

    def receive(self, reader: FrameReader, landing: Passage, bytes_max: int) -> int:
        """Receive many blocks in one call: a transport takes one piece of memory at a time."""
        try:
            return receive(self._socket.fileno(), reader, landing, bytes_max)[0]
        except OSError:
            return 0  # nothing is there, or the connection is broken: the loop's own reading finds out which

    def close(self) -> None:
        """Close the descriptor."""
        self._socket.close()


class TransportLine(CopyingExit):
    """A line through the event loop's transport."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self.can_end_writing = transport.can_write_eof()
        self._is_paused = False
        self._is_due = False  # whether the loop is to call back in its next turn
        self._when_room: Callable[[], None] | None = None

    def send(self, frame: bytes | bytearray) -> int:
        """Give the transport all of a frame, or nothing while it has no room."""
        if self._is_paused:
            return 0
        self._transport.write(bytes(frame))
        return len(frame)

    def watch(self, when_room: Callable[[], None]) -> None:
        """Call back in the loop's next turn, or when the transport has room again."""
        self._when_room = when_room
        if not self._is_paused and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._call_back)

    def unwatch(self) -> None:
        """Call back no more."""
        self._when_room = None

    def pause(self) -> None:
        """Take nothing for now."""
        self._is_paused = True

    def resume(self) -> None:
        """Take more."""
        self._is_paused = False
        self._call_back()

    def end_writing(self) -> None:
        """Write the end, where a transport can."""
        if self.can_end_writing:
            self._transport.write_eof()

    def receive(self, reader: FrameReader, landing: Passage, bytes_max: int) -> int:  # noqa: ARG002
        """Receive nothing: the transport brings everything."""
        return 0

    def close(self) -> None:
        """Let the transport be."""

    def _call_back(self) -> None:
        self._is_due = False
        if self._when_room is not None and not self._is_paused:
            self._when_room()


def tuned(sock: socket.socket, settings: ConnectionSettings) -> None:
    """Make a unix socket hold more than it would, and TCP do what TCP is asked for here.

    TCP finds its buffers' sizes itself. It is to notice within about half a minute that the other host is
    gone, whether or not something is on its way there.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.send_buffer_bytes)
        return
    every_s = settings.keepalive_s
    be_watchful(
        sock, idle_s=every_s, every_s=every_s, asked_max=_ASKED_MAX, lost_after_s=_ASKED_MAX * every_s
    )
