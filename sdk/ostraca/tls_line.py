"""A line over TLS. Imported when an address is ``tls://`` and not before: TLS takes its time to load.

The socket carries records, and TLS works on memory beside it: whoever waits for the socket, shuts it down or
closes it does so as with any other. One lock holds for both directions, as TLS keeps one state for both; it
is never held while anything is waited for.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ostraca.line import SocketLine, send_all
from ostraca_fabric.stream import CopyingExit
from ostraca_fabric.tls import HUNG_UP, in_words

if TYPE_CHECKING:
    from ostraca_fabric.tls import Tls
    from ostraca_fabric.wire.frames import FrameReader
    from ostraca_fabric.wire.passage import Passage

_TAKEN_BYTES = 256 << 10
"""Bytes taken at a time, before the socket is asked: what is copied, and waits here, is bounded by it."""

_RECEIVED_BYTES = 256 << 10


class TlsLine(SocketLine, CopyingExit):
    """The line of a connection over TLS, whose handshake is done: ``shaken`` makes it."""

    hung_up = HUNG_UP

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        super().__init__(sock)
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._goes, server_hostname=host)
        self._lock = threading.Lock()  # guards all of TLS, and what is sent
        self._unsent = memoryview(b"")  # encrypted
        self._received = memoryview(bytearray(_RECEIVED_BYTES))
        self._is_drained = False
        self._is_at_end = False

    @classmethod
    def shaken(cls, sock: socket.socket, tls: Tls, host: str, *, until_s: float) -> TlsLine:
        """Shake hands with who must be *host*. Raises OSError that says what to do."""
        line = cls(sock, tls.dialling, host)
        try:
            line._shake_hands(until_s)
        except ssl.SSLError as error:
            with suppress(OSError):
                line.flush()  # the alert, so that the other end's log has it too
            raise ConnectionError(in_words(error)) from error
        return line

    def _shake_hands(self, until_s: float) -> None:
        while True:
            is_done = self._is_shaken()
            send_all(self._socket, self._goes.read(), until_s=until_s)
            if is_done:
                return
            if not select.select([self._socket], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise TimeoutError("no answer to TLS in time; is it stopped, or no agent?")
            if not self._fetched() and self._is_at_end:
                raise ConnectionError(HUNG_UP)

    def _is_shaken(self) -> bool:
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
        """Whether what has come was not read to its end."""
        return not self._is_drained

    def send(self, frame: bytes | bytearray) -> int:
        """Encrypt a frame and give it to the socket; take nothing before the last one is sent."""
        with self._lock:
            if not self._flushed():
                return 0
            taken = self._tls.write(frame)
            self._flushed()
            return taken

    def send_blocks(
        self, head: bytearray, sent_bytes: int, blocks: Passage | None, bytes_max: int
    ) -> tuple[int, int]:
        """Take a copy of as much as is taken at a time."""
        if not self.flush():
            return 1, 0
        return super().send_blocks(head, sent_bytes, blocks, min(bytes_max, _TAKEN_BYTES))

    def flush(self) -> bool:
        """Give the socket what it takes of what is encrypted; tell whether nothing is left."""
        with self._lock:
            return self._flushed()

    def _flushed(self) -> bool:
        while self._unsent or self._goes.pending:
            if not self._unsent:
                self._unsent = memoryview(self._goes.read())
            try:
                sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self._unsent = self._unsent[sent:]
        return True

    def say(self, frame: bytes | bytearray, *, until_s: float) -> None:
        """Encrypt and send a frame, on a line on which nothing else is sent."""
        assert not self._unsent, "nothing was sent before"
        self._tls.write(frame)
        send_all(self._socket, self._goes.read(), until_s=until_s)

    def receive(self, reader: FrameReader, *, wake: int = -1, wait_ms: int = 0) -> tuple[int, bool]:  # noqa: ARG002 (nothing is waited for)
        """Receive and decrypt into one piece of memory."""
        buffer = reader.buffer()
        count = 0
        while count < len(buffer):
            step = self._decrypted(buffer[count:])
            if step == 0:
                return count, True
            if step is not None:
                count += step
            elif not self._fetched():
                self._is_drained = True
                if count or self._is_at_end:
                    return count, True
                raise BlockingIOError
        self._is_drained = False
        return count, False

    def _decrypted(self, target: memoryview) -> int | None:
        """Return how many bytes were put there: None for none yet, 0 for none ever again."""
        with self._lock:
            try:
                return self._tls.read(len(target), target)  # type: ignore[return-value]  # with a buffer, it counts
            except ssl.SSLWantReadError:
                self._flushed()  # what TLS itself has to say
                return None
            except ssl.SSLError as error:
                raise ConnectionError(in_words(error)) from error

    def _fetched(self) -> bool:
        """Take what the socket has; tell whether it had anything."""
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
