"""One stream, without blocking: what waits to be sent on it, and receiving where a reader wants it.

Neither knows what a message means nor when there is room: the agent's end asks its event loop, the worker's
its pump. Bytes leave through an ``Exit``: a socket, which takes blocks from where they lie, or something that
takes copies of them.
"""

from __future__ import annotations

import errno
import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ostraca_fabric.native import at, library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca_fabric.wire.frames import BulkFrame, FrameReader
    from ostraca_fabric.wire.passage import Passage


_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class Exit(Protocol):
    """Where bytes leave, without waiting."""

    def send(self, frame: bytes | bytearray) -> int:
        """Take what there is room for of a frame; return how many bytes that was, and 0 for no room.

        Raises OSError when the connection is broken.
        """

    def send_blocks(
        self, head: bytearray, sent_bytes: int, blocks: Passage | None, bytes_max: int
    ) -> tuple[int, int]:
        """Take what there is room for of a head behind its first *sent_bytes*, and of what is left of the
        blocks behind it.

        Return how many bytes were offered, about *bytes_max* at most, and how many were taken. Raises OSError
        when the connection is broken.
        """


class SocketExit:
    """A socket, which need not be non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, frame: bytes | bytearray) -> int:
        """Take what the socket takes of a frame."""
        try:
            return self._socket.send(frame, _AT_ONCE)
        except BlockingIOError:
            return 0

    def send_blocks(
        self, head: bytearray, sent_bytes: int, blocks: Passage | None, bytes_max: int
    ) -> tuple[int, int]:
        """Take what the socket takes, from where it lies."""
        left_bytes = len(head) - sent_bytes
        head_bytes = min(left_bytes, bytes_max)
        passage, passed_bytes, offered = None, 0, head_bytes
        if blocks is not None and left_bytes <= bytes_max:
            passage, passed_bytes = blocks.address, blocks.passed_bytes
            offered += min(bytes_max, blocks.left_bytes)
        begin = at(head) + sent_bytes
        sent = library.ostraca_send(
            self._socket.fileno(), begin, head_bytes, passage, passed_bytes, bytes_max
        )
        if sent >= 0:
            return offered, sent
        error = _error(sent)
        if isinstance(error, BlockingIOError):
            return offered, 0
        raise error


class CopyingExit(ABC):
    """What takes bytes, and not where they lie: an encrypting end, a transport of the event loop."""

    @abstractmethod
    def send(self, frame: bytes | bytearray) -> int:
        """Take what there is room for of a frame; as ``Exit`` says."""

    def send_blocks(
        self, head: bytearray, sent_bytes: int, blocks: Passage | None, bytes_max: int
    ) -> tuple[int, int]:
        """Take what there is room for, of a copy."""
        copy = head[sent_bytes : sent_bytes + bytes_max]
        if blocks is not None and len(head) - sent_bytes <= bytes_max:
            copy += blocks.copied(bytes_max)
        return len(copy), self.send(copy)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A bulk frame that has not begun."""

    frame: BulkFrame
    on_sent: Callable[[], None] | None


class Outbox:
    """What waits to be sent on one stream: messages, and bulk frames, whose blocks stay where they are.

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

    def send(self, way_out: Exit, frame: bytes | bytearray) -> bool:
        """Send a message's frame, at once where nothing waits; tell whether nothing does now.

        Raises OSError when the connection is broken.
        """
        if not self.is_empty:
            self._messages += frame
            return False
        sent = way_out.send(frame)
        if sent < len(frame):
            self._head += frame
            self._sent_bytes = sent
        return sent == len(frame)

    def add_bulk(self, frames: Sequence[BulkFrame], on_sent: Callable[[], None] | None = None) -> None:
        """Send the frames of a transfer. Their blocks are in use until *on_sent* is called, or ``clear``."""
        for frame in frames:
            self._bulk.append(_Waiting(frame, on_sent if frame is frames[-1] else None))
            self._bulk_bytes += 2 * len(frame.header)

    def write(self, way_out: Exit, bytes_max: int) -> bool:
        """Give what there is room for, about *bytes_max* at most; tell whether nothing is left.

        Raises OSError when the connection is broken.
        """
        while bytes_max > 0 and self._begin():
            offered, sent = way_out.send_blocks(self._head, self._sent_bytes, self._blocks, bytes_max)
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

    def _count(self, sent: int) -> None:
        """Note what was taken, and end what is through."""
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
