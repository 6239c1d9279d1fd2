"""Stream of PDUs over a TCP socket, with a deadline for each wait.

A closed connection drops its unsent bytes at once (``SO_LINGER`` of zero), also after ``kill -9``: a write
given up by this host can't leave its kernel later. Each call waits for its deadline at most, however slowly
bytes trickle in.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence

from ostraca_fabric.sockets.nvme_tcp.pdus import COMMON_BYTES, PduHeader, parse_common

Buffers = Sequence[memoryview]

_IOVEC_MAX = 512
_BUFFER_BYTES = 1 << 20
_DROPPED_BYTES = 1 << 16
_DROP_UNSENT = struct.pack("ii", 1, 0)


class PduStream:
    """Connection. A single thread sends and receives; any thread may call ``abort``."""

    def __init__(self, sock: socket.socket) -> None:
        """Own *sock* from now on."""
        self._socket = sock
        self._closing = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def send(self, buffers: Buffers | bytes, until_s: float) -> None:
        """Send all of *buffers* until *until_s*, of ``time.monotonic``. Raises OSError."""
        left = [memoryview(buffers)] if isinstance(buffers, bytes) else [each for each in buffers if each]
        while left:
            self._socket.settimeout(_left(until_s))
            left = _without(left, self._socket.sendmsg(left[:_IOVEC_MAX]))

    def receive(self, size: int, until_s: float | None) -> bytearray:
        """Return the next *size* bytes. Raises OSError; EOFError after the end of the stream."""
        data = bytearray(size)
        self.receive_into([memoryview(data)], until_s)
        return data

    def receive_into(self, buffers: Buffers, until_s: float | None) -> None:
        """Fill *buffers* from the stream; without a deadline if *until_s* is None."""
        left = [each for each in buffers if each]
        while left:
            self._socket.settimeout(None if until_s is None else _left(until_s))
            count = self._socket.recvmsg_into(left[:_IOVEC_MAX])[0]
            if not count:
                raise EOFError("the other end closed the connection")
            left = _without(left, count)

    def receive_common(self, data_bytes_max: int, until_s: float | None) -> PduHeader:
        """Return the checked common part of the next PDU. Raises PduError too."""
        return parse_common(self.receive(COMMON_BYTES, until_s), data_bytes_max)

    def fileno(self) -> int:
        """Return the descriptor, for ``poll``."""
        return self._socket.fileno()

    def is_idle(self) -> bool:
        """Tell whether the connection is open, with no byte to read."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def finish(self, until_s: float) -> None:
        """Send the end of the stream, and wait until the other end has read all and closed."""
        self._socket.shutdown(socket.SHUT_WR)
        dropped = bytearray(_DROPPED_BYTES)
        while True:
            self._socket.settimeout(_left(until_s))
            if not self._socket.recv_into(dropped):
                return

    def abort(self) -> None:
        """Wake the thread of the connection with an error; the thread then closes."""
        with self._closing:
            if self._socket.fileno() >= 0:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # already reset by the other end

    def close(self) -> None:
        """Close the connection at once, and drop unsent bytes."""
        with self._closing:
            self._socket.close()


def _left(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer in time")
    return left_s


def _without(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return *buffers* without their first *count* bytes."""
    number = 0
    while number < len(buffers) and count >= len(buffers[number]):
        count -= len(buffers[number])
        number += 1
    left = buffers[number:]
    if count:
        left[0] = left[0][count:]
    return left
