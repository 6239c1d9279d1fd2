"""Logs of a daemon, on stderr: text for people, or one JSON object per line for machines.

A line of text begins with its time (UTC) and level where nobody else says them. systemd's journal says the
time; it is told the level as ``sd-daemon(3)`` says, by a number in angle brackets. What runs in front of
people, as ``ostraca up``, says neither.

An object has ``time`` (UTC), ``level``, ``logger`` and ``message``; ``agent`` where the process is one agent;
``label`` where the line is of a request; ``exception`` where there is one; and whatever else the line was
given as ``extra``. No line holds a secret: what is logged of tokens and keys is who showed them, and where
they lie.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LEVELS = ("debug", "info", "warning", "error")

_JOURNAL_LEVELS = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_JOURNAL_DEBUG = 7

_OUR_LOGGERS = ("ostraca", "ostraca_fabric", "ostraca_dpu_agent", "ostraca_enclosure")
_OF_EVERY_RECORD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "label", "taskName"}


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON."""

    def __init__(self, agent: str = "") -> None:
        """*agent* says who speaks, where one agent alone does."""
        super().__init__()
        self._agent = agent

    def format(self, record: logging.LogRecord) -> str:
        """Write one record; never raises for what it was given."""
        from ostraca_fabric.labels import current_label

        try:
            message = record.getMessage()
        except (TypeError, ValueError) as error:
            message = f"{record.msg} (its arguments do not fit: {error})"
        line: dict[str, Any] = {
            "time": _time_of(record),
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
            if key not in _OF_EVERY_RECORD:
                line.setdefault(key, value)
        return json.dumps(line, default=str)


class StampedFormatter(logging.Formatter):
    """Writes a record as text behind its time and level."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        return f"{_time_of(record)} {record.levelname:<7} {super().format(record)}"


class JournalFormatter(logging.Formatter):
    """Writes a record as text behind its level, as the journal reads it. All of its lines have one."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        level = next((number for least, number in _JOURNAL_LEVELS if record.levelno >= least), _JOURNAL_DEBUG)
        return "\n".join(f"<{level}>{line}" for line in super().format(record).splitlines())


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """Let the user say how to log, for ``log_to_stderr``."""
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="how to log to stderr; json: an object per line, with time, level, logger and message "
        "(default: %(default)s)",
    )
    level = parser.add_mutually_exclusive_group()
    level.add_argument(
        "--log-level",
        choices=LEVELS,
        default="info",
        help="the least that is logged (default: %(default)s)",
    )
    level.add_argument(
        "-v",
        "--verbose",
        action="store_const",
        const="debug",
        dest="log_level",
        help="as --log-level debug: log every request by its label, and what else is of use in debugging",
    )


def log_to_stderr(options: argparse.Namespace, *, agent: str = "", is_daemon: bool = False) -> None:
    """Log as was asked. Others' libraries are heard from warnings on. A daemon's lines say when they were
    written, and how grave they are.
    """
    from ostraca_fabric.labels import LabelFilter

    handler = logging.StreamHandler(sys.stderr)
    level = logging.getLevelNamesMapping()[options.log_level.upper()]
    if options.log_format == "json":
        handler.setFormatter(JsonFormatter(agent))
    else:
        handler.addFilter(LabelFilter())
        handler.setFormatter(_text_formatter(level, is_daemon=is_daemon))
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])
    for name in _OUR_LOGGERS:
        logging.getLogger(name).setLevel(level)


def last_words(options: argparse.Namespace, why: object) -> str:
    """Return the line that says why a command ends, as it writes its logs."""
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
    """Say whether the journal reads what is written there: then it is what the variable for that names."""
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
    stderr = 2
    return JournalFormatter(line) if is_journal(os.environ, stderr) else StampedFormatter(line)


def _time_of(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return time.replace("+00:00", "Z")


def log_levels() -> Callable[[str | None], None]:
    """Return what sets the least that is logged of ours, one of ``LEVELS``; None: as it is now."""
    own = {name: logging.getLogger(name).level for name in _OUR_LOGGERS}

    def set_level(level: str | None) -> None:
        for name, before in own.items():
            logging.getLogger(name).setLevel(before if level is None else level.upper())

    return set_level
