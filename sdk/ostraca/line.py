"""A line: the socket of one connection, as it takes bytes and brings them, without blocking.

A ``PlainLine`` moves blocks from and to where they lie. Over TLS the line is another (``ostraca.tls_line``);
it takes bytes before the socket does, and may hold some that have come, so whoever waits asks ``has_unsent``
and ``has_pending`` first. One thread receives at a time and one sends, which may be two at once.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Protocol

from ostraca_fabric.stream import Exit, SocketExit, receive

if TYPE_CHECKING:
    from ostraca_fabric.wire.frames import FrameReader


class Line(Exit, Protocol):
    """One connection's way out and in."""

    hung_up: str
    """What it means when the other end closes it before it has said anything."""

    @property
    def has_unsent(self) -> bool:
        """Whether bytes were taken that the socket has no room for yet; ``flush`` when it has."""

    @property
    def has_pending(self) -> bool:
        """Whether there may be something to receive though the socket does not say so."""

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for it."""

    def flush(self) -> bool:
        """Give the socket what it takes of what was taken; tell whether nothing is left. Raises OSError."""

    def say(self, frame: bytes | bytearray, *, until_s: float) -> None:
        """Send a frame before anything else, waiting for room until then. Raises OSError."""

    def receive(self, reader: FrameReader, *, wake: int = -1, wait_ms: int = 0) -> tuple[int, bool]:
        """Receive what is there to where the reader wants it.

        A landing may be waited for, at most *wait_ms* and until the descriptor *wake* can be read. Return how
        many bytes came, 0 at the end, and whether no more were there then. Raises OSError, of which
        BlockingIOError means that none came.
        """

    def shut_down(self) -> None:
        """End the connection; who receives finds its end. Raises OSError."""

    def close(self) -> None:
        """Close the descriptor."""

    def let_go(self) -> None:
        """Close the descriptor in a process that only inherited it."""


class SocketLine:
    """What a line has of its socket, whatever its bytes pass on their way there. The socket is made
    non-blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(0)
        self._socket = sock

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def shut_down(self) -> None:
        """Shut the socket both ways."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def let_go(self) -> None:
        """Close the descriptor, and shut nothing."""
        os.close(self._socket.detach())


class PlainLine(SocketLine, SocketExit):
    """A socket's own line."""

    hung_up = "the connection was closed before an answer to Hello"
    has_unsent = False
    has_pending = False

    def flush(self) -> bool:
        """Do nothing: what was taken is the socket's."""
        return True

    def say(self, frame: bytes | bytearray, *, until_s: float) -> None:
        """Send it through the socket."""
        send_all(self._socket, frame, until_s=until_s)

    def receive(self, reader: FrameReader, *, wake: int = -1, wait_ms: int = 0) -> tuple[int, bool]:
        """Receive many blocks in one call, or what else is there."""
        landing = reader.landing
        if landing is not None:
            return receive(
                self._socket.fileno(), reader, landing, landing.left_bytes, wake=wake, wait_ms=wait_ms
            )
        buffer = reader.buffer()
        count = self._socket.recv_into(buffer)
        return count, count < len(buffer)


def send_all(sock: socket.socket, content: bytes | bytearray, *, until_s: float) -> None:
    """Send all of it through a socket that does not block. Raises OSError."""
    sock.settimeout(max(0.001, until_s - time.monotonic()))
    try:
        sock.sendall(content)
    finally:
        sock.settimeout(0)
