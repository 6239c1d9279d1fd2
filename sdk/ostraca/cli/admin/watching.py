"""Follows long work to its end. It goes on without us: whoever stops watching is told how to look again."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ostraca.cli.admin.answers import Operation, read
from ostraca.cli.admin.client import quoted
from ostraca.cli.admin.errors import AdminAwayError, OperationError
from ostraca.cli.admin.options import write_json
from ostraca.cli.admin.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ostraca.cli.admin.client import AdminClient

LOOK_S = 0.5
PATIENCE_S = 60.0
"""How long the service may be away before we give up: others may take over, and it may start anew."""

SAY_AGAIN_S = 60.0
"""Of a step that goes on, where lines are written: what it says is written again no sooner."""


class Shown(Protocol):
    """Shows how far long work is."""

    def __call__(self, operation: Operation, body: bytes) -> None:
        """Show it as it is now."""


def watch(client: AdminClient, number: str, *, is_json: bool) -> int:
    """Follow an operation to its end, and return 0 where it is done.

    Raises OperationError where it has failed or was cancelled, and as ``AdminClient.ask``.
    """
    try:
        with _shown(is_json=is_json) as show:
            operation = _followed(client, number, show)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nostraca: operation {number} goes on; {again(number)}\n")
        raise
    except AdminAwayError as error:
        raise AdminAwayError(f"{error}. Operation {number} goes on without us; {again(number)}") from error
    if operation.state != "done":
        raise OperationError(f"{operation.what} {operation.state}: {printable(operation.message)}")
    return 0


def begun(client: AdminClient, body: bytes, *, is_json: bool, is_watched: bool) -> int:
    """Say of long work that it was written down, as *body* does; follow it where that is wanted."""
    if is_json and not is_watched:
        write_json(body)
        return 0
    return followed(client, read(body, Operation), is_json=is_json, is_watched=is_watched)


def followed(client: AdminClient, operation: Operation, *, is_json: bool, is_watched: bool) -> int:
    """Follow long work where that is wanted, or say how to. Raises as ``watch``."""
    if is_watched:
        return watch(client, operation.id, is_json=is_json)
    print(f"{operation.what} has begun, as operation {operation.id}: {again(operation.id)}")
    return 0


def again(number: str) -> str:
    """Say how to watch an operation."""
    return f"watch it by `ostraca operation show {number} --watch`"


def _followed(client: AdminClient, number: str, show: Shown) -> Operation:
    before, answered_s = b"", time.monotonic()
    while True:
        try:
            body = client.get(f"/v1/operations/{quoted(number)}").body
        except AdminAwayError:
            if time.monotonic() - answered_s > PATIENCE_S:
                raise
        else:
            answered_s = time.monotonic()
            operation = read(body, Operation)
            if body != before:
                show(operation, body)
                before = body
            if operation.has_ended:
                return operation
        time.sleep(LOOK_S)


@contextmanager
def _shown(*, is_json: bool) -> Iterator[Shown]:
    if is_json:
        yield lambda _, body: write_json(body)
    elif sys.stdout.isatty():
        from rich.live import Live

        from ostraca.cli.admin.view import operation_view

        with Live(refresh_per_second=8) as live:
            yield lambda operation, _: live.update(operation_view(operation, is_live=True))
    else:
        yield Lines(time.monotonic, lambda line, _: print(line))


class Lines:
    """Writes a line for each step, for logs and pipes."""

    def __init__(self, clock: Callable[[], float], write: Callable[[str, str | None], None]) -> None:
        """Write by *write*, which takes a line and when it became so, where that was not just now."""
        self._clock = clock
        self._write = write
        self._has_begun = False
        self._ended: set[str] = set()
        self._said = ("", "")
        self._said_at_s = 0.0

    def __call__(self, operation: Operation, body: bytes) -> None:  # noqa: ARG002 (as others take it)
        """Write what is new."""
        if not self._has_begun:
            self._has_begun = True
            self._write(f"{operation.what} (operation {operation.id})", operation.created)
        for step in operation.steps:
            if step.ended and step.name not in self._ended:
                self._ended.add(step.name)
                mark = "" if step.state == "done" else f"{step.state}: "
                self._write(f"  {step.name}: {mark}{printable(step.message)}", step.ended)
            elif step.state == "running" and step.message:
                self._say(step.name, printable(step.message) + ends_text(operation))
        if operation.state == "done":
            self._write(f"done: {printable(operation.message)}", operation.ended)
        sys.stdout.flush()

    def _say(self, step: str, message: str) -> None:
        is_new = step != self._said[0]
        now_s = self._clock()
        if is_new or (message != self._said[1] and now_s - self._said_at_s >= SAY_AGAIN_S):
            self._write(f"  {step}: {message} ...", None)
            self._said, self._said_at_s = (step, message), now_s


def ends_text(operation: Operation) -> str:
    """Say when it may end, where that is known."""
    if operation.ends_in_s is None:
        return ""
    from ostraca.cli.durations import duration_text

    return f", within {duration_text(operation.ends_in_s)} at most"
