"""Logs of a daemon, on stderr: text for people, or one JSON object per line for machines.

An object has ``time`` (UTC), ``level``, ``logger`` and ``message``; ``agent`` where the process is one agent;
``label`` where the line is of a request; ``exception`` where there is one; and whatever else the line was
given as ``extra``. No line holds a secret: what is logged of tokens and keys is who showed them, and where
they lie.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LEVELS = ("debug", "info", "warning", "error")

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
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
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


def log_to_stderr(options: argparse.Namespace, *, agent: str = "") -> None:
    """Log as was asked. Others' libraries are heard from warnings on."""
    from ostraca_fabric.labels import LabelFilter

    handler = logging.StreamHandler(sys.stderr)
    level = logging.getLevelNamesMapping()[options.log_level.upper()]
    if options.log_format == "json":
        handler.setFormatter(JsonFormatter(agent))
    else:
        before = "%(asctime)s %(name)s: " if level <= logging.DEBUG else ""
        handler.addFilter(LabelFilter())
        handler.setFormatter(logging.Formatter(f"{before}%(label)s%(message)s"))
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])
    for name in _OUR_LOGGERS:
        logging.getLogger(name).setLevel(level)


def log_levels() -> Callable[[str | None], None]:
    """Return what sets the least that is logged of ours, one of ``LEVELS``; None: as it is now."""
    own = {name: logging.getLogger(name).level for name in _OUR_LOGGERS}

    def set_level(level: str | None) -> None:
        for name, before in own.items():
            logging.getLogger(name).setLevel(before if level is None else level.upper())

    return set_level
