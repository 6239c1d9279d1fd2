"""Labels of requests: what makes the log lines of one request findable, from the SDK to the drive.

A label is ``<worker>/<request>``. The worker's part is the beginning of ``Hello.client``, so both ends say
the same. It is set where an agent takes a request up, and goes along with every task started from there; who
hands work to a thread takes ``current_label()`` with it. ``LabelFilter`` puts it on log records.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar, Token

LABEL_CHARS_MAX = 32
"""No label is longer; one that comes over the wire is cut to it."""

_WORKER_BYTES = 4

_current: ContextVar[str] = ContextVar("ostraca_label", default="")


def worker_name(client: bytes) -> str:
    """Name a worker in logs and metrics: the beginning of its ``Hello.client``, in hex."""
    return client[:_WORKER_BYTES].hex() or "unnamed"


def label_of(worker: str, request: int) -> str:
    """Return the label of a worker's request."""
    return f"{worker}/{request}"


def current_label() -> str:
    """Return the label of the request that is being handled here; empty when it is none in particular."""
    return _current.get()


class labelled:  # noqa: N801 (it is used like the functions of contextlib, and takes half of their time)
    """Handle a request under its label: ``with labelled(label): ...``."""

    __slots__ = ("_label", "_token")

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        """Set it."""
        self._token: Token[str] = _current.set(self._label[:LABEL_CHARS_MAX])

    def __exit__(self, *_: object) -> None:
        """Go on under the one before."""
        _current.reset(self._token)


class LabelFilter(logging.Filter):
    """Gives each record ``label``: that of the request it was made for, in brackets, or nothing.

    Add it to a handler whose format has ``%(label)s``.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Label the record; lets every record pass."""
        label = current_label()
        record.label = f"[{label}] " if label else ""
        return True
