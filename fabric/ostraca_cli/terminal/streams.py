"""Standard streams of an ``ostraca`` process, made robust.

Streams may be closed, full or without UTF-8. A closed stream is reopened, because the next open file would
take its number. A library's message to standard error would then go into a drive. Writes to a reopened stream
fail, as on a full disk. The command reports failures of standard output at its end, by its exit code;
failures of standard error stay unreported. Characters missing in the encoding become escapes.

A daemon never waits for the reader of its log (``logs``) or ready line. Libraries that write to pipes or
terminals do not wait either.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import stat
import sys
import threading
from typing import TYPE_CHECKING, TextIO, TypeVar

from ostraca_fabric.telemetry import log_lines

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

_Text = TypeVar("_Text", bound=io.TextIOWrapper)

READY = "ready: "
"""Prefix of a daemon's ready line."""

_STDIN, _STDOUT, _STDERR = 0, 1, 2


def repair_streams() -> None:
    """Repair the standard streams; call before the process opens any file."""
    _reopen_closed_streams()
    _block(_STDOUT)
    sys.stdout = _text(_Output, io.BufferedWriter(io.FileIO(_STDOUT, "w", closefd=False)), sys.stdout)
    sys.stderr = _text(io.TextIOWrapper, io.BufferedWriter(_StandardError()), sys.stderr)


def flush_output(stream: TextIO) -> str:
    """Flush *stream*; return the error of this or an earlier write, empty for none.

    After a failure, further output to the stream is discarded.
    """
    trouble = stream.trouble if isinstance(stream, _Output) else ""
    try:
        stream.flush()
    except OSError as error:
        trouble = error.strerror or str(error)
    if trouble:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), stream.fileno())
    return trouble


def write_line(body: bytes) -> None:
    """Print a response as received."""
    sys.stdout.write(body.decode(errors="replace").rstrip("\n") + "\n")
    sys.stdout.flush()


def announce(line: str) -> None:
    """Print a daemon's ready line, without waiting for its reader."""
    data, stdout = f"{line}\n".encode("utf-8", "surrogateescape"), os.dup(_STDOUT)

    def write() -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[log_lines.write_some(stdout, left) :]
        except OSError as error:
            log.warning("The ready line can't be written to standard output: %s", error.strerror)
        finally:
            os.close(stdout)

    threading.Thread(target=write, name="ready-line", daemon=True).start()


def unblock() -> None:
    """Make standard streams non-blocking, for daemons.

    Reopens pipes and terminals, so that processes sharing the stream are unaffected. If the kernel refuses,
    as for a pipe of another user, the stream stays unchanged: then libraries may block, but not the log and
    the ready line.
    """
    for number in (_STDOUT, _STDERR):
        if stat.S_ISFIFO(os.fstat(number).st_mode) or os.isatty(number):
            with contextlib.suppress(OSError):
                _open_again(number)


def _block(number: int) -> None:
    """Make a stream blocking, if another process made the stream non-blocking."""
    if os.get_blocking(number) or stat.S_ISREG(os.fstat(number).st_mode):
        return
    with contextlib.suppress(OSError):
        _open_again(number)
    os.set_blocking(number, True)


def _open_again(number: int) -> None:
    """Reopen a pipe or a terminal as non-blocking; raises OSError."""
    opened = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.dup2(opened, number)
    os.close(opened)


def _reopen_closed_streams() -> None:
    for number in (_STDIN, _STDOUT, _STDERR):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one. Later writes fail, and reads find nothing.
            os.dup2(os.open(os.devnull, os.O_RDONLY), number)


def _text(kind: type[_Text], binary: io.BufferedWriter, before: TextIO | None) -> _Text:
    """Return a text stream over *binary*, with encoding and buffering of *before*."""
    return kind(
        binary,
        getattr(before, "encoding", None) or "utf-8",
        "backslashreplace",
        line_buffering=isinstance(binary.raw, _StandardError)
        or any(getattr(before, name, False) for name in ("line_buffering", "write_through")),
    )


class _Output(io.TextIOWrapper):
    """Standard output that remembers failed writes.

    Callers such as ``argparse`` ignore write errors. The layers below are the interpreter's own: a write
    there is never both done and interrupted, which would repeat the line at the end of the command.
    """

    trouble = ""

    def write(self, text: str, /) -> int:
        """Write text; raises OSError."""
        try:
            return super().write(text)
        except OSError as error:
            self._note(error)
            raise

    def flush(self) -> None:
        """Flush the buffer; raises OSError."""
        try:
            super().flush()
        except OSError as error:
            self._note(error)
            raise

    def _note(self, error: OSError) -> None:
        self.trouble = error.strerror or str(error)


class _StandardError(io.RawIOBase):
    """Standard error; part of the log in daemons. Failed writes are lost."""

    def fileno(self) -> int:
        """Return the file descriptor."""
        return _STDERR

    def isatty(self) -> bool:
        """Return whether standard error is a terminal."""
        return os.isatty(_STDERR)

    def writable(self) -> bool:
        """Return True: the stream is for writing."""
        return True

    def write(self, data: Buffer, /) -> int:
        """Write all of *data*; never raises."""
        left = memoryview(bytes(data))
        size_bytes = len(left)
        if not log_lines.put(left.tobytes()):
            with contextlib.suppress(OSError):
                while left:
                    left = left[log_lines.write_some(_STDERR, left) :]
        return size_bytes
