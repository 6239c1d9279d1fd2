"""Non-blocking stream: queue of outgoing data, and receiving into given memory.

The stream knows neither messages nor when there is room: the agent's end uses an event loop, the worker's end
an I/O loop. Bytes leave through a ``ByteSender``. A socket sends blocks from their place; other senders take
copies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.native import at, library, library_for
from ostraca_fabric.wire.frames import BulkFrame, FrameReader, Passage

_UCRED = struct.Struct("iII")

_NO_BLOCKS = Passage(np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.uint32))


class ByteSender(Protocol):
    """Non-blocking sink of bytes."""

    def send(self, frame: bytes | bytearray) -> int:
        """Accept as much of a frame as there is room for; return the bytes accepted.

        Return 0 without room. Raises OSError for a broken connection.
        """

    def send_blocks(
        self, head: bytearray, sent_bytes: int, blocks: Passage | None, bytes_max: int
    ) -> tuple[int, int]:
        """Accept as much of a head, after its first *sent_bytes*, and of the blocks behind.

        Return the bytes offered, about *bytes_max* at most, and the bytes accepted. Raises OSError for a
        broken connection.
        """


class SocketSender:
    """Exit to a socket, which need not be non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, frame: bytes | bytearray) -> int:
        """Send as much of a frame as the socket accepts."""
        head = frame if isinstance(frame, bytes) else at(frame)
        return self._accepted(
            library_for(len(frame)).ostraca_send(self._socket.fileno(), head, len(frame), None, 0, 0)
        )

    def send_blocks(
        self, head: bytearray, sent_bytes: int, blocks: Passage | None, bytes_max: int
    ) -> tuple[int, int]:
        """Send as much as the socket accepts, without a copy."""
        left_bytes = len(head) - sent_bytes
        head_bytes = min(left_bytes, bytes_max)
        passage, passed_bytes, offered = None, 0, head_bytes
        if blocks is not None and left_bytes <= bytes_max:
            passage, passed_bytes = blocks.address, blocks.passed_bytes
            offered += min(bytes_max, blocks.left_bytes)
        begin = at(head) + sent_bytes
        return offered, self._accepted(
            library_for(offered).ostraca_send(
                self._socket.fileno(), begin, head_bytes, passage, passed_bytes, bytes_max
            )
        )

    @staticmethod
    def _accepted(sent: int) -> int:
        """Return the number of accepted bytes. Raises OSError for a broken connection."""
        if sent >= 0:
            return sent
        error = _error(sent)
        if isinstance(error, BlockingIOError):
            return 0
        raise error


class CopyingSender(ABC):
    """Exit that takes a copy: a TLS stream or a transport of the event loop."""

    @abstractmethod
    def send(self, frame: bytes | bytearray) -> int:
        """Accept as much of a frame as there is room for; see ``ByteSender``."""

    def send_blocks(
        self, head: bytearray, sent_bytes: int, blocks: Passage | None, bytes_max: int
    ) -> tuple[int, int]:
        """Send a copy of as much as there is room for."""
        copy = head[sent_bytes : sent_bytes + bytes_max]
        if blocks is not None and len(head) - sent_bytes <= bytes_max:
            copy += blocks.copied(bytes_max)
        return len(copy), self.send(copy)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Bulk frame not yet begun."""

    frame: BulkFrame
    on_sent: Callable[[], None] | None


class Outbox:
    """Outgoing queue of a stream: messages, and bulk frames whose blocks stay in place.

    Messages keep their order, and so do bulk frames. Messages precede bulk frames not yet begun, so a message
    waits for at most one frame. To send a message behind a transfer's bytes, queue the message after the
    bytes are sent. Not thread-safe.
    """

    def __init__(self) -> None:
        self._messages = bytearray()
        self._bulk: deque[_Waiting] = deque()
        self._bulk_bytes = 0  # of the queued headers
        self._head = bytearray()  # bytes before the current blocks
        self._sent_bytes = 0  # sent bytes of the head
        self._blocks: Passage | None = None
        self._on_sent: Callable[[], None] | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of memory held here, without the blocks of bulk frames."""
        return len(self._messages) + len(self._head) + self._bulk_bytes

    @property
    def is_empty(self) -> bool:
        """Whether the queue is empty."""
        return not (self._head or self._messages or self._bulk)

    def send(self, sender: ByteSender, frame: bytes | bytearray) -> bool:
        """Send a message's frame, at once if the queue is empty.

        Return whether the queue is empty afterwards. Raises OSError for a broken connection.
        """
        if not self.is_empty:
            self._messages += frame
            return False
        sent = sender.send(frame)
        if sent < len(frame):
            self._head += frame
            self._sent_bytes = sent
        return sent == len(frame)

    def add_bulk(self, frames: Sequence[BulkFrame], on_sent: Callable[[], None] | None = None) -> None:
        """Queue the frames of a transfer.

        Their blocks are in use until *on_sent* is called, or until ``clear``.
        """
        for frame in frames:
            self._bulk.append(_Waiting(frame, on_sent if frame is frames[-1] else None))
            self._bulk_bytes += 2 * len(frame.header)

    def write(self, sender: ByteSender, bytes_max: int) -> bool:
        """Send as much as there is room for, about *bytes_max* at most.

        Return whether the queue is empty. Raises OSError for a broken connection.
        """
        while bytes_max > 0 and self._begin():
            offered, sent = sender.send_blocks(self._head, self._sent_bytes, self._blocks, bytes_max)
            self._count(sent)
            bytes_max -= sent
            if sent < offered:
                return False
        return self.is_empty

    def blank(self, memory: NDArray[np.uint8]) -> None:
        """Send zeros for all blocks in *memory*, an array object, that are not sent. Nothing uses it then."""
        if self._blocks is not None and self._blocks.lies_in(memory):
            self._blocks = self._blocks.blanked()
        for place, waiting in enumerate(self._bulk):
            if waiting.frame.blocks.lies_in(memory):
                frame = replace(waiting.frame, blocks=waiting.frame.blocks.blanked())
                self._bulk[place] = replace(waiting, frame=frame)

    def drop_bulk(self) -> None:
        """Discard queued bulk frames. Memory of their transfers may be in use until ``clear``."""
        self._bulk.clear()
        self._bulk_bytes = 0

    def clear(self) -> None:
        """Discard everything after the end of the connection. No memory is in use any more."""
        self.drop_bulk()
        self._messages.clear()
        self._end_frame()

    def _begin(self) -> bool:
        """Begin the next frame if none is under way; return False if the queue is empty."""
        if self._head:
            return True
        self._head, self._messages = self._messages, self._head
        if self._bulk:
            waiting = self._bulk.popleft()
            self._bulk_bytes -= 2 * len(waiting.frame.header)
            self._head += waiting.frame.header
            self._blocks, self._on_sent = waiting.frame.blocks, waiting.on_sent
        return bool(self._head)

    def _count(self, sent: int) -> None:
        """Record sent bytes, and end a complete frame."""
        of_head = min(sent, len(self._head) - self._sent_bytes)
        self._sent_bytes += of_head
        if self._blocks is not None:
            self._blocks.passed_bytes += sent - of_head
        if self._sent_bytes < len(self._head) or (self._blocks is not None and self._blocks.left_bytes):
            return
        on_sent = self._on_sent
        self._end_frame()
        if on_sent is not None:
            on_sent()

    def _end_frame(self) -> None:
        self._head.clear()
        self._sent_bytes, self._blocks, self._on_sent = 0, None, None


def receive(
    descriptor: int,
    reader: FrameReader,
    landing: Passage,
    bytes_max: int,
    *,
    wake: int = -1,
    wait_ms: int = 0,
) -> tuple[int, bool]:
    """Receive available bytes into the reader's landing memory and behind.

    Wait at most *wait_ms* for the landing memory to be full, and no longer once the descriptor *wake* is
    readable. About *bytes_max* are received at most. Return the number of bytes, 0 at the stream's end, and
    whether no more were available. Raises OSError; BlockingIOError means no bytes.
    """
    tail = reader.tail()
    bytes_now = min(bytes_max, landing.left_bytes)
    receiving = library if wait_ms else library_for(bytes_now)
    count = receiving.ostraca_receive(
        descriptor, landing.address, landing.passed_bytes, bytes_max, at(tail), len(tail), wake, wait_ms
    )
    if count < 0:
        raise _error(count)
    return count, count < bytes_now + (len(tail) if landing.left_bytes <= bytes_max else 0)


def _error(number: int) -> OSError:
    assert -number != errno.EFAULT, "a block lies outside of its memory"
    return OSError(-number, os.strerror(-number))


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

    @property
    def peer_process(self) -> int:
        """Process of the other end of a unix socket; 0 in another process namespace. Raises OSError."""
        return peer_credentials(self._socket)[0]

    def flush(self) -> bool:
        """Write accepted bytes to the socket; tell whether none are left.

        Raises OSError.
        """
        return True

    def send_first(self, frame: bytes | bytearray, *, until_s: float) -> None:
        """Send a frame before any other, waiting for room until *until_s*.

        Raises OSError.
        """
        sent = self.send(frame)
        if sent < len(frame):
            send_all(self._socket, frame[sent:], until_s=until_s)

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
        return receive(self._socket.fileno(), reader, _NO_BLOCKS, 0)

    def shut_down(self) -> None:
        """End the connection in both directions; the receiver finds its end. Raises OSError."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child, without a shutdown of the connection."""
        os.close(self._socket.detach())


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return process and user of the other end of a unix socket, from the kernel. Raises OSError."""
    process, user, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return process, user


def can_be_read(stream: ByteStream | socket.socket, *, until_s: float) -> bool:
    """Wait until *until_s* for readable bytes."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, until_s - time.monotonic())))


def send_all(sock: socket.socket, content: bytes | bytearray, *, until_s: float) -> None:
    """Send all of *content* through a non-blocking socket. Raises OSError."""
    sock.settimeout(max(0.001, until_s - time.monotonic()))
    try:
        sock.sendall(content, socket.MSG_NOSIGNAL)
    finally:
        sock.settimeout(0)


TCP_RTO_MAX_MS = 44
"""From ``linux/tcp.h``, since Linux 6.15; Python's ``socket`` lacks the name."""

_SENT_AGAIN_MS = 1000
"""Smallest value accepted by Linux."""

_MS_PER_S = 1000


def be_watchful(sock: socket.socket, *, idle_s: int, every_s: int, asked_max: int, lost_after_s: int) -> None:
    """Make a connection send without delay, and end after the loss of the other host.

    After *idle_s* of silence, TCP sends up to *asked_max* probes, *every_s* apart. TCP sends no probes while
    data is unacknowledged, and would retransmit for a quarter of an hour. Therefore the connection ends after
    *lost_after_s* without an acknowledgement. The same limit ends a connection whose peer process stops
    reading until all buffers are full.

    Until then TCP retransmits at least every second on a new enough kernel. On older kernels the pauses
    double, so a network back after ten seconds may be noticed ten seconds late.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, asked_max)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_after_s * _MS_PER_S)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, _SENT_AGAIN_MS)
