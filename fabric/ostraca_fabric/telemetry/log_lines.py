"""Log lines for a standard stream, written by a thread: logging code never blocks.

An unread pipe and a hanging disk block a writer; a full disk and a closed terminal refuse a write. Only the
thread is exposed to such streams. A line is dropped and counted if too many bytes wait, or if the stream
refuses the line. Once writes succeed again, the thread writes the number of lost lines in their place.

A forked process has no threads of its parent. The queue stays with the parent; the child starts with an empty
queue, and starts a thread with its first line.

``LogDedup`` filters repeated warnings about a lasting problem. The log has a line at the beginning of a
problem, a reminder from time to time, and a line at the end. Findings in between are logged at level DEBUG.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable

from ostraca_fabric.runtime.threads import show_name

WAITING_BYTES_MAX = 1 << 20
"""Most bytes in the queue: some thousand lines, so that a reader may pause for a moment."""

NOT_READ = "they were not read in time"


class LineWriter:
    """Writer for one stream, usable from any thread.

    Finalizers may call ``put`` from within a running method of the same writer.
    """

    def __init__(
        self,
        descriptor: int,
        told: Callable[[int, str], bytes],
        *,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        """Write to *descriptor* and leave the descriptor open.

        *told* returns a line for a number of lost lines and a reason (a clause); called in the thread.
        """
        self._descriptor = descriptor
        self._told = told
        self._waiting_bytes_max = waiting_bytes_max
        self._has_thread = False
        self._refused = self._failed = 0
        self._why = NOT_READ
        self._is_torn = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    @property
    def lost(self) -> int:
        """Number of lines dropped so far."""
        return self._refused + self._failed

    def put(self, line: bytes) -> None:
        """Queue a line ending in a newline, or drop the line. Never blocks or raises."""
        with self._lock:
            if self._put_bytes - self._ended_bytes + len(line) > self._waiting_bytes_max:
                self._refused, self._why = self._refused + 1, NOT_READ
                return
            if not self._has_thread:
                try:
                    threading.Thread(target=self._run, name="log-lines", daemon=True).start()
                except RuntimeError:  # no memory for a thread, or the interpreter is shutting down
                    self._refused, self._why = self._refused + 1, "no thread could be started to write them"
                    return
                self._has_thread = True
            self._put_bytes += len(line)
            self._lines.put((line, self._refused))

    def flush(self, within_s: float) -> bool:
        """Wait for all earlier lines; return whether all were written or lost in time."""
        if not self._has_thread:
            return True
        ended = threading.Event()
        self._lines.put(ended)
        return ended.wait(within_s)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._lines: queue.SimpleQueue[tuple[bytes, int] | threading.Event] = queue.SimpleQueue()
        self._put_bytes = self._ended_bytes = 0
        self._lost_told = self.lost
        self._has_thread = False

    def _run(self) -> None:
        show_name("log-lines")
        lines = self._lines
        while True:
            entry = lines.get()
            if isinstance(entry, tuple):
                line, refused_before = entry
                self._tell(refused_before + self._failed)
                self._failed += not self._write(line)
                self._ended_bytes += len(line)
            if lines.empty():
                self._tell(self.lost)
            if isinstance(entry, threading.Event):
                entry.set()

    def _tell(self, lost: int) -> None:
        """Write the number of lost lines, if not yet in the stream."""
        if lost > self._lost_told and self._write(self._told(lost - self._lost_told, self._why)):
            self._lost_told = lost

    def _write(self, line: bytes) -> bool:
        """Write a line without a time limit; return whether the stream took all of it."""
        left = memoryview(b"\n" + line if self._is_torn else line)
        begun_bytes = len(left)
        try:
            while left:
                left = left[write_some(self._descriptor, left) :]
        except OSError as error:
            self._why = f"writing failed: {error.strerror}"
            self._is_torn = self._is_torn or len(left) < begun_bytes
            return False
        self._is_torn = False
        return True


def write_some(descriptor: int, data: memoryview) -> int:
    """Write the beginning of *data* once possible; return the bytes written.

    Raises OSError.
    """
    while True:
        try:
            return os.write(descriptor, data)
        except BlockingIOError:  # another process made the shared stream non-blocking
            room = select.poll()
            room.register(descriptor, select.POLLOUT)
            room.poll()


_of_process: LineWriter | None = None


def begin(writer: LineWriter) -> None:
    """Use *writer* for the log of this process."""
    global _of_process  # noqa: PLW0603 (a process has one log)
    _of_process = writer


def put(line: bytes) -> bool:
    """Queue a line for this process's log; return whether the process has a log."""
    if _of_process is None:
        return False
    _of_process.put(line)
    return True


def flush(within_s: float) -> None:
    """Wait at most *within_s* for the lines in this process's log."""
    if _of_process is not None:
        _of_process.flush(within_s)


def lost_lines() -> int:
    """Return the number of dropped lines of this process's log."""
    return 0 if _of_process is None else _of_process.lost


REMIND_S = 60.0


class LogDedup:
    """Lasting problem, reported again and again while present."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a problem; *clock* is in seconds and never decreases."""
        self._log = log
        self._clock = clock
        self._since_s: float | None = None
        self._said_s, self._said = 0.0, ""

    @property
    def lasts_s(self) -> float:
        """Duration of the problem so far; 0 without a problem."""
        return 0.0 if self._since_s is None else self._clock() - self._since_s

    def report(self, message: str, *args: object, since_s: float | None = None) -> None:
        """Report the problem as present.

        Logs a warning at the beginning, for a *message* other than the last, and once in ``REMIND_S``;
        otherwise logs at level DEBUG. *since_s* is the beginning of the problem, if earlier than the first
        report.
        """
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s if since_s is None else since_s
            self._log.warning(message, *args)
        elif message == self._said and now_s - self._said_s < REMIND_S:
            self._log.debug(message, *args)
            return
        else:
            self._log.warning(f"{message}; so for %.0f s now", *args, now_s - self._since_s)
        self._said_s, self._said = now_s, message

    def resolve(self, message: str, *args: object) -> None:
        """Log the end and the duration of the problem; no effect without a problem."""
        if self._since_s is not None:
            self._log.info(f"{message}, after %.1f s", *args, self.lasts_s)
            self._since_s = None


class LabelFilter(logging.Filter):
    """Log filter for the attribute ``label``: the request's label in brackets, or "".

    Add the filter to a handler with ``%(label)s`` in its format.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Set the record's label; every record passes."""
        from ostraca_fabric.telemetry.requests import current_label  # noqa: PLC0415 (numpy: `--help` works without)

        label = current_label()
        record.label = f"[{label}] " if label else ""
        return True
