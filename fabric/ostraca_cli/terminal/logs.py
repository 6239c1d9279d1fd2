"""Logs of a daemon on stderr: text for people, or a JSON object per line.

A daemon's line of text begins with time (UTC) and level. Under systemd, the journal adds the time, and the
level is a number in angle brackets, as in ``sd-daemon(3)``. Foreground commands, such as ``ostraca up``,
write neither.

A daemon never waits for the reader of its log: a thread writes the lines, drops lines not written in time,
and counts the drops (``ostraca_fabric.telemetry.log_lines``).

JSON objects have the fields ``time`` (UTC), ``level``, ``logger`` and ``message``. Optional fields are
``agent`` for a process of a single agent, ``label`` for lines of a request, ``exception``, and the fields of
``extra``. No line holds a secret: logs name only the presenter and the file of a token or key.
"""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from ostraca_fabric.runtime.sentences import counted
from ostraca_fabric.telemetry import log_lines

LEVELS = ("debug", "info", "warning", "error")

_JOURNAL_LEVELS = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_JOURNAL_DEBUG = 7

_STDERR = 2
_ENDING_S = 2.0
"""Longest wait of an ending process for its last log lines."""

_OUR_LOGGERS = (
    "ostraca",
    "ostraca_admin",
    "ostraca_cli",
    "ostraca_dpu_agent",
    "ostraca_enclosure",
    "ostraca_fabric",
)
_STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "label", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formatter for a JSON object per line."""

    def __init__(self, agent: str = "") -> None:
        """Add the field ``agent`` to each line unless *agent* is empty."""
        super().__init__()
        self._agent = agent

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; never raises, even for mismatched arguments."""
        from ostraca_fabric.telemetry.requests import current_label

        try:
            message = record.getMessage()
        except (TypeError, ValueError) as error:
            message = f"{record.msg} (wrong arguments: {error})"
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if self._agent:
            line["agent"] = self._agent
        if label := current_label():
            line["label"] = label
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        for key, value in record.__dict__.items():
            if key not in _STANDARD_FIELDS:
                line.setdefault(key, value)
        return json.dumps(line, default=str)


class StampedFormatter(logging.Formatter):
    """Formatter for text after time and level."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return f"{_timestamp(record)} {record.levelname:<7} {super().format(record)}"


class JournalFormatter(logging.Formatter):
    """Formatter for the journal: each line of a record begins with the level."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        level = next((number for least, number in _JOURNAL_LEVELS if record.levelno >= least), _JOURNAL_DEBUG)
        return "\n".join(f"<{level}>{line}" for line in super().format(record).splitlines())


class LineHandler(logging.Handler):
    """Handler that writes lines to stderr in a thread; never blocks."""

    def __init__(self) -> None:
        """Create the handler; ``begin`` or the first record starts the thread."""
        super().__init__()
        self._encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._lines: log_lines.LineWriter | None = None

    def begin(self) -> log_lines.LineWriter:
        """Start the writer, and route all output of ``sys.stderr`` through the log."""
        self._lines = lines = log_lines.LineWriter(os.dup(_STDERR), self._loss_line)
        log_lines.begin(lines)
        # Do not use ``flush``: libraries that configure logging, such as NIXL, flush handlers at any time and
        # make logging forget handlers.
        atexit.register(flush_log)
        return lines

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record for the writer."""
        try:
            line = self._line(record)
        except Exception:  # noqa: BLE001 (as logging's own handlers: what is wrong with one record is said)
            self.handleError(record)
            return
        (self._lines or self.begin()).put(line)

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(self._encoding, "backslashreplace")

    def _loss_line(self, lost: int, why: str) -> bytes:
        words = f"This log has lost {counted(lost, 'line')}: {why}."
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, "%s", (words,), None)
        record.label = ""
        return self._line(record)


def flush_log() -> None:
    """Wait a bounded time for queued lines; for processes that exit by ``os._exit``."""
    log_lines.flush(_ENDING_S)


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """Add the logging options, for ``log_to_stderr``."""
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help=(
            "format of the log on stderr; json: an object per line, with time, level, logger and "
            "message (default: %(default)s)"
        ),
    )
    level = parser.add_mutually_exclusive_group()
    level.add_argument(
        "--log-level",
        choices=LEVELS,
        default="info",
        help="lowest level to log (default: %(default)s)",
    )
    level.add_argument(
        "-v",
        "--verbose",
        action="store_const",
        const="debug",
        dest="log_level",
        help="as --log-level debug: log each request by its label, and details for debugging",
    )


def log_to_stderr(options: argparse.Namespace, *, agent: str = "", is_daemon: bool = False) -> None:
    """Configure logging by the options.

    Other libraries log from warnings on. A daemon's lines carry time and level.
    """
    handler = LineHandler()
    level = logging.getLevelNamesMapping()[options.log_level.upper()]
    if options.log_format == "json":
        handler.setFormatter(JsonFormatter(agent))
    else:
        handler.addFilter(log_lines.LabelFilter())
        handler.setFormatter(_text_formatter(level, is_daemon=is_daemon))
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])
    if handler in logging.getLogger().handlers:  # false if another program has configured logging
        handler.begin()
    for name in _OUR_LOGGERS:
        logging.getLogger(name).setLevel(level)


def final_error_line(options: argparse.Namespace, why: object) -> str:
    """Return the final error line of a command, in the format of its log."""
    own = (JsonFormatter, StampedFormatter, JournalFormatter)
    formatters = [each.formatter for each in logging.getLogger().handlers if isinstance(each.formatter, own)]
    if not formatters and getattr(options, "log_format", "") == "json":
        formatters = [JsonFormatter()]
    if not formatters:
        return f"ostraca: {why}"
    message = str(why) if isinstance(formatters[0], JsonFormatter) else f"ostraca: {why}"
    record = logging.LogRecord("ostraca", logging.ERROR, __file__, 0, "%s", (message,), None)
    record.label = ""
    return formatters[0].format(record)


def is_journal(environment: Mapping[str, str], file_descriptor: int) -> bool:
    """Return whether the journal reads *file_descriptor*, according to JOURNAL_STREAM."""
    try:
        found = os.fstat(file_descriptor)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _text_formatter(level: int, *, is_daemon: bool) -> logging.Formatter:
    if not is_daemon:
        before = "%(asctime)s %(name)s: " if level <= logging.DEBUG else ""
        return logging.Formatter(f"{before}%(label)s%(message)s")
    line = "%(name)s: %(label)s%(message)s" if level <= logging.DEBUG else "%(label)s%(message)s"
    return JournalFormatter(line) if is_journal(os.environ, _STDERR) else StampedFormatter(line)


def _timestamp(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return time.replace("+00:00", "Z")


def log_levels() -> Callable[[str | None], None]:
    """Return a function that sets the level of Ostraca's loggers.

    The function takes a level of ``LEVELS``, or None for the present level.
    """
    own = {name: logging.getLogger(name).level for name in _OUR_LOGGERS}

    def set_level(level: str | None) -> None:
        for name, before in own.items():
            logging.getLogger(name).setLevel(before if level is None else level.upper())

    return set_level
