"""Request labels, to find all log lines of one request from SDK to drive.

A label is ``<worker>/<request>``. The worker's part is the beginning of ``Hello.client``, so both ends use
the same label. An agent sets the label on receipt of a request; tasks started from there inherit the label.
For work on another thread, pass on ``current_label()``. ``LabelFilter`` adds the label to log records.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar, Token

LABEL_CHARS_MAX = 32
"""Longest label; a longer label from the wire is truncated."""

_WORKER_BYTES = 4

_current: ContextVar[str] = ContextVar("ostraca_label", default="")


def worker_name(client: bytes) -> str:
    """Return a worker's name for logs: the beginning of ``Hello.client`` in hex."""
    return client[:_WORKER_BYTES].hex() or "unnamed"


def label_of(worker: str, request: int) -> str:
    """Return the label of a worker's request."""
    return f"{worker}/{request}"


def current_label() -> str:
    """Return the label of the current request; empty outside of requests."""
    return _current.get()


class labelled:  # noqa: N801 (used like the functions of contextlib, in half of their time)
    """Context with a request label: ``with labelled(label): ...``."""

    __slots__ = ("_label", "_token")

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        """Set the label."""
        self._token: Token[str] = _current.set(self._label[:LABEL_CHARS_MAX])

    def __exit__(self, *_: object) -> None:
        """Restore the previous label."""
        _current.reset(self._token)


class LabelFilter(logging.Filter):
    """Log filter for the attribute ``label``: the request's label in brackets, or "".

    Add the filter to a handler with ``%(label)s`` in its format.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Set the record's label; every record passes."""
        label = current_label()
        record.label = f"[{label}] " if label else ""
        return True
