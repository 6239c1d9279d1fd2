"""Byte stream over TLS. Loaded only for ``tls://`` addresses: TLS loads slowly.

The socket carries records, and TLS works on memory beside it: waiting, shutdown and close work as on a plain
socket. TLS keeps one state for both directions, so one lock guards both. The lock is never held during a
wait.
"""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from ostraca_fabric.sockets.stream import ByteStream, CopyingSender, can_be_read, send_all
from ostraca_fabric.sockets.tls import HUNG_UP, in_words
from ostraca_fabric.wire.frames import FrameReader, Passage

if TYPE_CHECKING:
    from ostraca_fabric.sockets.tls import Tls


_TAKEN_BYTES = 256 << 10
"""Bytes accepted per call before the socket is tried: bounds the copies and the waiting bytes."""

_RECEIVED_BYTES = 256 << 10


class TlsStream(CopyingSender, ByteStream):
    """Byte stream over TLS after the handshake. Created by ``connect``."""

    closed_message = HUNG_UP

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        super().__init__(sock)
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._goes, server_hostname=host)
        self._lock = threading.Lock()  # guards the TLS state and the unsent bytes
        self._unsent = memoryview(b"")  # encrypted
        self._received = memoryview(bytearray(_RECEIVED_BYTES))
        self._is_drained = False
        self._is_at_end = False

    @classmethod
    def connect(cls, sock: socket.socket, tls: Tls, host: str, *, until_s: float) -> TlsStream:
        """Do the handshake with an agent that must be *host*.

        Raises OSError with a remedy.
        """
        stream = cls(sock, tls.dialling, host)
        try:
            stream._shake_hands(until_s)
        except ssl.SSLError as error:
            with suppress(OSError):
                stream.flush()  # the alert, so that the other end's log has it too
            raise ConnectionError(in_words(error)) from error
        return stream

    def _shake_hands(self, until_s: float) -> None:
        while True:
            is_done = self._try_handshake()
            send_all(self._socket, self._goes.read(), until_s=until_s)
            if is_done:
                return
            if not can_be_read(self._socket, until_s=until_s):
                raise TimeoutError("no answer to TLS in time: check whether an agent runs there")
            if not self._fetch() and self._is_at_end:
                raise ConnectionError(HUNG_UP)

    def _try_handshake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    @property
    def has_unsent(self) -> bool:
        """Whether encrypted bytes wait for the socket."""
        return bool(self._unsent)

    @property
    def has_pending(self) -> bool:
        """Whether received records may not have been read to their end."""
        return not self._is_drained

    def send(self, frame: bytes | bytearray) -> int:
        """Encrypt a frame and write it to the socket.

        Accepts nothing until the previous frame is sent.
        """
        with self._lock:
            if not self._flush():
                return 0
            taken = self._tls.write(frame)
            self._flush()
            return taken

    def send_blocks(
        self, head: bytearray, sent_bytes: int, blocks: Passage | None, bytes_max: int
    ) -> tuple[int, int]:
        """Take a copy of at most ``_TAKEN_BYTES`` bytes."""
        if not self.flush():
            return 1, 0
        return super().send_blocks(head, sent_bytes, blocks, min(bytes_max, _TAKEN_BYTES))

    def flush(self) -> bool:
        """Write encrypted bytes to the socket; tell whether none are left."""
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        while self._unsent or self._goes.pending:
            if not self._unsent:
                self._unsent = memoryview(self._goes.read())
            try:
                sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self._unsent = self._unsent[sent:]
        return True

    def send_first(self, frame: bytes | bytearray, *, until_s: float) -> None:
        """Encrypt and send a frame, on a stream without any other sender."""
        assert not self._unsent, "nothing was sent before"
        self._tls.write(frame)
        send_all(self._socket, self._goes.read(), until_s=until_s)

    def receive(self, reader: FrameReader, *, wake: int = -1, wait_ms: int = 0) -> tuple[int, bool]:  # noqa: ARG002 (nothing is waited for)
        """Receive and decrypt into one piece of memory."""
        buffer = reader.buffer()
        count = 0
        while count < len(buffer):
            step = self._decrypt(buffer[count:])
            if step == 0:
                return count, True
            if step is not None:
                count += step
            elif not self._fetch():
                self._is_drained = True
                if count or self._is_at_end:
                    return count, True
                raise BlockingIOError
        self._is_drained = False
        return count, False

    def _decrypt(self, target: memoryview) -> int | None:
        """Return the number of decrypted bytes: None for none yet, 0 at the end."""
        with self._lock:
            try:
                return self._tls.read(len(target), target)  # type: ignore[return-value]  # with a buffer, it counts
            except ssl.SSLWantReadError:
                self._flush()  # records of TLS itself
                return None
            except ssl.SSLError as error:
                raise ConnectionError(in_words(error)) from error

    def _fetch(self) -> bool:
        """Read from the socket; tell whether it had bytes."""
        try:
            count = self._socket.recv_into(self._received)
        except BlockingIOError:
            return False
        if not count:
            self._is_at_end = True
            return False
        with self._lock:
            self._came.write(self._received[:count])
        return True
