"""Follow long operations to their end.

An operation continues without its watcher: a user gets, on leaving, the command for watching again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from ostraca_admin.api.views import OperationView
from ostraca_cli.commands.admin.client import AdminClient, quoted
from ostraca_cli.commands.admin.errors import AdminUnavailableError, OperationError
from ostraca_cli.commands.admin.responses import printable, read, remaining_text
from ostraca_cli.terminal.streams import write_line

ShowProgress = Callable[[OperationView, bytes], None]
"""Shows the present state of an operation, decoded and as received."""

POLL_S = 0.5
OUTAGE_MAX_S = 60.0
"""Longest absence of the service before the command gives up; another service may take over, or a restart may
succeed."""

REPEAT_S = 60.0
"""Shortest interval between two lines about a step in progress."""


def watch(client: AdminClient, number: str, *, is_json: bool) -> int:
    """Follow an operation to its end and return 0 on success.

    Raises OperationError after a failure or cancellation, and the errors of ``AdminClient.ask``.
    """
    try:
        with _progress(is_json=is_json) as show:
            operation = _poll(client, number, show)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nostraca: operation {number} continues; {watch_hint(number)}\n")
        raise
    except AdminUnavailableError as error:
        raise AdminUnavailableError(f"{error}. Operation {number} continues; {watch_hint(number)}") from error
    if operation.state != "done":
        raise OperationError(f"{operation.title} {operation.state}: {printable(operation.message)}")
    return 0


def watch_hint(number: str) -> str:
    """Return the advice to watch an operation."""
    return f"watch by `ostraca operation show {number} --watch`"


def _poll(client: AdminClient, number: str, show: ShowProgress) -> OperationView:
    before, answered_s = b"", time.monotonic()
    while True:
        try:
            body = client.get(f"/v1/operations/{quoted(number)}").body
        except AdminUnavailableError:
            if time.monotonic() - answered_s > OUTAGE_MAX_S:
                raise
        else:
            answered_s = time.monotonic()
            operation = read(body, OperationView)
            if body != before:
                show(operation, body)
                before = body
            if operation.has_ended:
                return operation
        time.sleep(POLL_S)


@contextmanager
def _progress(*, is_json: bool) -> Iterator[ShowProgress]:
    if is_json:
        yield lambda _, body: write_line(body)
    elif sys.stdout.isatty():
        from rich.live import Live

        from ostraca_cli.commands.admin.view import operation_view

        with Live(refresh_per_second=8) as live:
            yield lambda operation, _: live.update(operation_view(operation, is_live=True))
    else:
        lines = ProgressLines(time.monotonic, lambda line, _: print(line))
        yield lambda operation, _: lines.show(operation)


class ProgressLines:
    """Progress display as lines, for logs and pipes."""

    def __init__(self, clock: Callable[[], float], write: Callable[[str, datetime | None], None]) -> None:
        """Write by *write*, called with a line and its time, or None for now."""
        self._clock = clock
        self._write = write
        self._has_title = False
        self._ended: set[str] = set()
        self._last = ("", "")
        """Step and message of the last line about a running step."""

        self._last_s = 0.0

    def show(self, operation: OperationView) -> None:
        """Write the changes since the last call."""
        if not self._has_title:
            self._has_title = True
            self._write(f"{operation.title} (operation {operation.id})", operation.created)
        for step in operation.steps:
            if step.ended and step.name not in self._ended:
                self._ended.add(step.name)
                mark = "" if step.state == "done" else f"{step.state}: "
                self._write(f"  {step.name}: {mark}{printable(step.message)}", step.ended)
            elif step.state == "running" and step.message:
                self._show_running(step.name, printable(step.message) + remaining_text(operation))
        if operation.state == "done":
            self._write(f"done: {printable(operation.message)}", operation.ended)
        sys.stdout.flush()

    def _show_running(self, step: str, message: str) -> None:
        is_new = step != self._last[0]
        now_s = self._clock()
        if is_new or (message != self._last[1] and now_s - self._last_s >= REPEAT_S):
            self._write(f"  {step}: {message} ...", None)
            self._last, self._last_s = (step, message), now_s
