"""Byte stream of one connection: non-blocking socket I/O of frames and blocks.

A ``ByteStream`` moves blocks directly between socket and memory. A TLS stream
(``ostraca._connection.tls_stream``) takes bytes before the socket does, and may hold received bytes. Before
waiting for the socket, check ``has_unsent`` and ``has_pending``. A thread may receive while another sends,
but never two of either.
"""

from __future__ import annotations

import os
import select
import socket
import time
from typing import TYPE_CHECKING

from ostraca_fabric.sockets.stream import SocketSender, receive

if TYPE_CHECKING:
    from ostraca_fabric.wire.frames import FrameReader


class ByteStream(SocketSender):
    """Both directions of one connection, directly on a socket. Makes the socket non-blocking."""

    closed_message = "the connection was closed before an answer to Hello"
    """Meaning of a close by the other end before any message."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.settimeout(0)

    @property
    def has_unsent(self) -> bool:
        """Whether accepted bytes wait for the socket; call ``flush`` when writable."""
        return False

    @property
    def has_pending(self) -> bool:
        """Whether bytes may be available though the socket is not readable."""
        return False

    def fileno(self) -> int:
        """Return the socket's descriptor, for waiting."""
        return self._socket.fileno()

    def flush(self) -> bool:
        """Write accepted bytes to the socket; tell whether none are left.

        Raises OSError.
        """
        return True

    def send_first(self, frame: bytes | bytearray, *, until_s: float) -> None:
        """Send a frame before any other, waiting for room until *until_s*.

        Raises OSError.
        """
        send_all(self._socket, frame, until_s=until_s)

    def receive(self, reader: FrameReader, *, wake: int = -1, wait_ms: int = 0) -> tuple[int, bool]:
        """Receive the available bytes into the reader's memory, many blocks in one call.

        A landing may be waited for, at most *wait_ms* and until the descriptor *wake* is readable. Returns
        the number of bytes, 0 at the end of the stream, and whether no more were available. Raises OSError;
        BlockingIOError means no bytes.
        """
        landing = reader.landing
        if landing is not None:
            return receive(
                self._socket.fileno(), reader, landing, landing.left_bytes, wake=wake, wait_ms=wait_ms
            )
        buffer = reader.buffer()
        count = self._socket.recv_into(buffer)
        return count, count < len(buffer)

    def shut_down(self) -> None:
        """End the connection in both directions; the receiver finds its end. Raises OSError."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child, without a shutdown of the connection."""
        os.close(self._socket.detach())


def can_be_read(stream: ByteStream | socket.socket, *, until_s: float) -> bool:
    """Wait until *until_s* for readable bytes."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, until_s - time.monotonic())))


def send_all(sock: socket.socket, content: bytes | bytearray, *, until_s: float) -> None:
    """Send all of *content* through a non-blocking socket. Raises OSError."""
    sock.settimeout(max(0.001, until_s - time.monotonic()))
    try:
        sock.sendall(content)
    finally:
        sock.settimeout(0)
