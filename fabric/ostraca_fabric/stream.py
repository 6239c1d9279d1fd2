"""One stream socket, without blocking: what waits to be sent on it, and receiving where a reader wants it.

Neither knows what a message means nor when the socket is ready: the agent's end asks its event loop, the
worker's its pump.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.native import at, library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca_fabric.wire.frames import BulkFrame, FrameReader
    from ostraca_fabric.wire.passage import Passage


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A bulk frame that has not begun."""

    frame: BulkFrame
    on_sent: Callable[[], None] | None


class Outbox:
    """What waits to be sent on one socket: messages, and bulk frames, whose blocks stay where they are.

    Messages keep their order, and bulk frames theirs; messages go before bulk frames that have not begun, so
    they wait for one frame at most. Who must say something behind a transfer's bytes says it once they are
    gone. Not thread-safe.
    """

    def __init__(self) -> None:
        self._messages = bytearray()
        self._bulk: deque[_Waiting] = deque()
        self._bulk_bytes = 0  # of the headers waiting
        self._head = bytearray()  # what goes before the blocks under way
        self._sent_bytes = 0  # of the head
        self._blocks: Passage | None = None
        self._on_sent: Callable[[], None] | None = None

    @property
    def held_bytes(self) -> int:
        """How much memory this holds of its own; the blocks of bulk frames are others'."""
        return len(self._messages) + len(self._head) + self._bulk_bytes

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not (self._head or self._messages or self._bulk)

    def send(self, sock: socket.socket, frame: bytes | bytearray) -> bool:
        """Send a message's frame, at once where nothing waits; tell whether nothing does now.

        Raises OSError when the connection is broken.
        """
        if not self.is_empty:
            self._messages += frame
            return False
        try:
            sent = sock.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        if sent < len(frame):
            self._head += frame
            self._sent_bytes = sent
        return sent == len(frame)

    def add_bulk(self, frames: Sequence[BulkFrame], on_sent: Callable[[], None] | None = None) -> None:
        """Send the frames of a transfer. Their blocks are in use until *on_sent* is called, or ``clear``."""
        for frame in frames:
            self._bulk.append(_Waiting(frame, on_sent if frame is frames[-1] else None))
            self._bulk_bytes += 2 * len(frame.header)

    def write(self, descriptor: int, bytes_max: int) -> bool:
        """Give the socket what it takes, about *bytes_max* at most; tell whether nothing is left.

        Raises OSError when the connection is broken.
        """
        while bytes_max > 0 and self._begin():
            offered, sent = self._send(descriptor, bytes_max)
            self._count(sent)
            bytes_max -= sent
            if sent < offered:
                return False
        return self.is_empty

    def drop_bulk(self) -> None:
        """Begin no bulk frame that waits. Memory of their transfers may be in use until ``clear``."""
        self._bulk.clear()
        self._bulk_bytes = 0

    def clear(self) -> None:
        """Send nothing of all this: the connection is gone. No memory is in use any more."""
        self.drop_bulk()
        self._messages.clear()
        self._end_frame()

    def _begin(self) -> bool:
        """Take what is to be sent next, when nothing is under way; False when there is nothing."""
        if self._head:
            return True
        self._head, self._messages = self._messages, self._head
        if self._bulk:
            waiting = self._bulk.popleft()
            self._bulk_bytes -= 2 * len(waiting.frame.header)
            self._head += waiting.frame.header
            self._blocks, self._on_sent = waiting.frame.blocks, waiting.on_sent
        return bool(self._head)

    def _send(self, descriptor: int, bytes_max: int) -> tuple[int, int]:
        """Return how many bytes were offered to the socket, and how many it took."""
        left_bytes = len(self._head) - self._sent_bytes
        head_bytes = min(left_bytes, bytes_max)
        passage, passed_bytes, offered = None, 0, head_bytes
        if self._blocks is not None and left_bytes <= bytes_max:
            passage, passed_bytes = self._blocks.address, self._blocks.passed_bytes
            offered += min(bytes_max, self._blocks.left_bytes)
        head = at(self._head) + self._sent_bytes
        sent = library.ostraca_send(descriptor, head, head_bytes, passage, passed_bytes, bytes_max)
        if sent >= 0:
            return offered, sent
        error = _error(sent)
        if isinstance(error, BlockingIOError):
            return offered, 0
        raise error

    def _count(self, sent: int) -> None:
        """Note what the socket took, and end what is through."""
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
    """Receive what is there into the reader's landing and behind it.

    Wait for the landing to become whole, at most *wait_ms* and until the descriptor *wake* can be read.
    Return how many bytes came, 0 at the stream's end, and whether no more were there then. About *bytes_max*
    come at most. Raises OSError, of which BlockingIOError means that none came.
    """
    tail = reader.tail()
    offered = min(bytes_max, landing.left_bytes) + (len(tail) if landing.left_bytes <= bytes_max else 0)
    count = library.ostraca_receive(
        descriptor, landing.address, landing.passed_bytes, bytes_max, at(tail), len(tail), wake, wait_ms
    )
    if count < 0:
        raise _error(count)
    return count, count < offered


def _error(number: int) -> OSError:
    assert -number != errno.EFAULT, "a block lies outside of its memory"
    return OSError(-number, os.strerror(-number))
