"""``ostraca events``: changes to a fabric, as they happen."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ostraca_cli.command import Command
from ostraca_cli.commands.admin.errors import AdminUnavailableError
from ostraca_cli.commands.admin.options import SERVICE_OPTIONS, client_of
from ostraca_cli.terminal.streams import write_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ostraca_admin.api.views import OperationView
    from ostraca_cli.commands.admin.client import AdminClient
    from ostraca_cli.commands.admin.watching import ProgressLines

RETRY_S = 1.0
OUTAGE_MAX_S = 60.0
"""Longest absence of the service before the command gives up; another service may take over, or a restart may
succeed."""

_PATH = "/v1/events"


class EventLines:
    """Writer of events as lines for people: each change and each step once."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """Write each line by *write*."""
        self._write = write
        self._running: dict[str, ProgressLines] = {}
        """State last written, by operation."""

    def show(self, kind: str, data: bytes) -> None:
        """Write the new part of an event; ignores unknown kinds."""
        from ostraca_admin.api.views import AuditView, OperationView
        from ostraca_cli.commands.admin.responses import read
        from ostraca_cli.commands.admin.view import audit_text

        match kind:
            case "audit":
                self._write(audit_text(read(data, AuditView)))
            case "operation":
                self._show_operation(read(data, OperationView))

    def _show_operation(self, operation: OperationView) -> None:
        from ostraca_cli.commands.admin.responses import printable
        from ostraca_cli.commands.admin.view import time_text
        from ostraca_cli.commands.admin.watching import ProgressLines

        def write(line: str, at: datetime | None) -> None:
            self._write(f"{time_text(at or datetime.now(UTC))}  {operation.id}  {line.strip()}")

        if operation.id not in self._running:
            self._running[operation.id] = ProgressLines(time.monotonic, write)
        self._running[operation.id].show(operation)
        if operation.has_ended:
            del self._running[operation.id]
            if operation.state != "done":
                write(f"{operation.state}: {printable(operation.message)}", operation.ended)


def stream_events(client: AdminClient) -> Iterator[tuple[str, bytes]]:
    """Yield events forever; opens a new stream after a cut.

    Raises the same errors as ``AdminClient.ask``: at once if the first connection fails, later if the service
    was away for OUTAGE_MAX_S.
    """
    is_first, away_since_s = True, None
    while True:
        try:
            with client.stream(_PATH) as events:
                is_first, away_since_s = False, None
                yield from events
        except AdminUnavailableError:
            if is_first or (away_since_s is not None and time.monotonic() - away_since_s > OUTAGE_MAX_S):
                raise
        if away_since_s is None:
            away_since_s = time.monotonic()
            sys.stderr.write(
                f"ostraca: {client.url} has ended its stream; reconnecting. For changes in between, see "
                "`ostraca audit` and `ostraca operation list`\n"
            )
        time.sleep(RETRY_S)


def _run(options: argparse.Namespace) -> int:
    client = client_of(options)
    lines = EventLines(lambda line: print(line, flush=True))
    for kind, data in stream_events(client):
        if options.json:
            write_line(b'{"event":%s,"data":%s}' % (json.dumps(kind).encode(), data))
        else:
            lines.show(kind, data)
    return 0


COMMAND = Command(
    name="events",
    summary="follow changes and operations live",
    description=(
        "Follow changes of a fabric and steps of operations live, from the admin service (`ostraca serve\n"
        "admin`), until Ctrl-C. Running operations come first. With --json, print a line for each event."
    ),
    example=(
        "  $ ostraca events\n"
        "  2026-03-01 13:04:07  alice (admin)  PUT /v1/enclosures/shelf-1  onboard 019a3b7c5d10-5f0e21aa\n"
        "  2026-03-01 13:04:07  019a3b7c5d10-5f0e21aa  onboard of shelf-1 (operation 019a3b7c5d10-5f0e21aa)\n"
        "  2026-03-01 13:04:08  019a3b7c5d10-5f0e21aa  reachable: 2 of 2 agents reach the enclosure\n"
    ),
    options=SERVICE_OPTIONS,
    run=_run,
    extra="admin",
)
