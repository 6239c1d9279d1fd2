"""Socket side of a connection: outgoing bytes, and reception of blocks beside the event loop.

A ``DescriptorStream`` writes through a second descriptor of the socket: blocks are sent from their own
memory, and the stream knows when the bytes have left. uvloop and, from Python 3.12 on, asyncio keep
*references* to unsent memory, and do not report the release of the memory. A ``TransportStream`` serves
transports without a usable socket: encrypted and simulated ones. It passes copies until the transport asks to
pause.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.limits import check_above_zero, check_one_at_least
from ostraca_fabric.sockets.stream import CopyingSender, SocketSender, be_watchful, receive
from ostraca_fabric.wire.frames import FrameReader, Passage

_ASKED_MAX = 3


def open_stream(transport: asyncio.Transport, settings: ConnectionSettings) -> ConnectionStream:
    """Return the stream of a new connection."""
    found = transport.get_extra_info("socket")
    if found is None:
        return TransportStream(transport)
    own = socket.socket(fileno=os.dup(found.fileno()))
    tuned(own, settings)
    if transport.get_extra_info("ssl_object") is None:
        return DescriptorStream(own)
    own.close()
    return TransportStream(transport)


class DescriptorStream(SocketSender):
    """Stream through a socket's own descriptor."""

    is_for_threads = True
    """Whether other threads than the event loop's may send."""

    can_end_writing = True
    """Whether the stream can end writing while the peer can still send."""

    def __init__(self, own: socket.socket) -> None:
        """Take an exclusive descriptor of the connection."""
        super().__init__(own)
        self._loop = asyncio.get_running_loop()
        self._is_watched = False

    def watch(self, when_room: Callable[[], None]) -> None:
        """Call *when_room* from the loop whenever there is room, until ``unwatch``."""
        if not self._is_watched:
            self._is_watched = True
            self._loop.add_writer(self._socket.fileno(), when_room)

    def unwatch(self) -> None:
        """Remove the socket from the loop."""
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_writer(self._socket.fileno())

    def pause(self) -> None:
        """Do nothing: this stream does not write through the transport."""

    def resume(self) -> None:
        """Do nothing."""

    def end_writing(self) -> None:
        """Shut the socket for writing."""
        with suppress(OSError):  # a reset connection: the loop will notice soon
            self._socket.shutdown(socket.SHUT_WR)

    def receive(self, reader: FrameReader, landing: Passage, bytes_max: int) -> int:
        """Receive many blocks in one call: a transport takes one piece of memory at a time."""
        try:
            return receive(self._socket.fileno(), reader, landing, bytes_max)[0]
        except OSError:
            return 0  # no bytes, or a broken connection: the loop's own reading decides

    def close(self) -> None:
        """Close the descriptor."""
        self._socket.close()


class TransportStream(CopyingSender):
    """Stream through the event loop's transport."""

    is_for_threads = False

    def __init__(self, transport: asyncio.Transport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self.can_end_writing = transport.can_write_eof()
        self._is_paused = False
        self._is_due = False  # whether a call back is scheduled
        self._when_room: Callable[[], None] | None = None

    def send(self, frame: bytes | bytearray) -> int:
        """Hand over a whole frame, or nothing while the transport is paused."""
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
        """Stop the calls."""
        self._when_room = None

    def pause(self) -> None:
        """Refuse frames until ``resume``."""
        self._is_paused = True

    def resume(self) -> None:
        """Accept frames again."""
        self._is_paused = False
        self._call_back()

    def end_writing(self) -> None:
        """Write the end of the stream, if the transport can."""
        if self.can_end_writing:
            self._transport.write_eof()

    def receive(self, reader: FrameReader, landing: Passage, bytes_max: int) -> int:  # noqa: ARG002
        """Receive nothing: all bytes arrive through the transport."""
        return 0

    def close(self) -> None:
        """Do nothing: the connection closes the transport."""

    def _call_back(self) -> None:
        self._is_due = False
        if self._when_room is not None and not self._is_paused:
            self._when_room()


_SEND_BUFFER_BYTES_MAX = 1 << 30
_KEEPALIVE_S_MAX = 32_767
"""Largest values that the kernel takes for every socket."""

ConnectionStream = DescriptorStream | TransportStream
"""Outgoing side of one connection, with the calls for its protocol to make."""


def tuned(sock: socket.socket, settings: ConnectionSettings) -> None:
    """Enlarge a unix socket's send buffer, or set TCP keepalive.

    TCP sizes its buffers alone. Keepalive detects a lost host within about half a minute, with or without
    unacknowledged data.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.send_buffer_bytes)
        return
    every_s = settings.keepalive_s
    be_watchful(
        sock, idle_s=every_s, every_s=every_s, asked_max=_ASKED_MAX, lost_after_s=_ASKED_MAX * every_s
    )


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Limits of one end's connections."""

    connections_max: int = 1024
    """Connections that a server holds; more are refused. Each holds 64 KiB plus its requests' memory. If
    raised, raise the limit of open files by twice as much."""

    refusing_max: int = 64
    """Connections beyond ``connections_max`` that receive a refusal; further connections are cut."""

    handshake_s: float = 5.0
    """Time limit from connecting to the Welcome, at either end. Raise the limit for slow links."""

    handshake_bytes_max: int = 256 << 10
    """Longest frame before the Welcome. An arena offer's metadata takes a few KiB."""

    unread_bytes_max: int = 64 << 20
    """Send backlog at which another message closes the connection: the peer is stuck."""

    send_buffer_bytes: int = 1 << 20
    """Socket buffer of a unix socket, up to ``net.core.wmem_max``. A larger buffer wakes both ends less
    often."""

    close_s: float = 2.0
    """Time for the last messages of a connection before the connection is cut."""

    drain_s: float = 10.0
    """Wait of a closing server for requests in progress. Set the wait above the longest deadline in use."""

    keepalive_s: int = 10
    """Silence before TCP probes the peer, and the interval between three probes. Unacknowledged data is
    allowed three times as long; then the connection is lost."""

    def __post_init__(self) -> None:
        """Refuse limits that let nobody in."""
        check_above_zero(self, "handshake_s")
        check_one_at_least(
            self,
            "connections_max",
            "handshake_bytes_max",
            "unread_bytes_max",
            "send_buffer_bytes",
            "keepalive_s",
        )
        if self.send_buffer_bytes > _SEND_BUFFER_BYTES_MAX or self.keepalive_s > _KEEPALIVE_S_MAX:
            raise UsageError(
                f"send_buffer_bytes is {self.send_buffer_bytes} and keepalive_s {self.keepalive_s}: the "
                f"kernel takes {_SEND_BUFFER_BYTES_MAX} and {_KEEPALIVE_S_MAX} at most"
            )
