"""``ostraca events``: what is done to a fabric, as it is done."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ostraca.cli.admin.errors import AdminAwayError
from ostraca.cli.admin.options import add_asking_options, client_of, write_json
from ostraca.cli.command import Command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ostraca.cli.admin.answers import Operation
    from ostraca.cli.admin.client import AdminClient
    from ostraca.cli.admin.watching import Lines

LOOK_S = 1.0
PATIENCE_S = 60.0
"""How long the service may be away before we give up: others may take over, and it may start anew."""

_PATH = "/v1/events"


class Told:
    """Writes events as lines for people: each change, and each step of long work once."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """Write by *write*, which takes a line."""
        self._write = write
        self._running: dict[str, Lines] = {}
        """By operation."""

    def __call__(self, kind: str, data: bytes) -> None:
        """Write what is new of an event. Kinds that are not known here are left out."""
        from ostraca.cli.admin.answers import Change, Operation, read
        from ostraca.cli.admin.view import change_text

        match kind:
            case "audit":
                self._write(change_text(read(data, Change)))
            case "operation":
                self._tell(read(data, Operation), data)

    def _tell(self, operation: Operation, data: bytes) -> None:
        from ostraca.cli.admin.text import printable
        from ostraca.cli.admin.view import time_text
        from ostraca.cli.admin.watching import Lines

        def write(line: str, at: str | None) -> None:
            at = at or datetime.now(UTC).isoformat()
            self._write(f"{time_text(at)}  {operation.id}  {line.strip()}")

        if operation.id not in self._running:
            self._running[operation.id] = Lines(time.monotonic, write)
        self._running[operation.id](operation, data)
        if operation.has_ended:
            del self._running[operation.id]
            if operation.state != "done":
                write(f"{operation.state}: {printable(operation.message)}", operation.ended)


def followed(client: AdminClient) -> Iterator[tuple[str, bytes]]:
    """Yield events, for ever; where the stream is cut, go on with a new one.

    Raises as ``AdminClient.ask``: at once where nobody answers at first, later once the service has been away
    for PATIENCE_S.
    """
    is_first, away_since_s = True, None
    while True:
        try:
            with client.stream(_PATH) as events:
                is_first, away_since_s = False, None
                yield from events
        except AdminAwayError:
            if is_first or (away_since_s is not None and time.monotonic() - away_since_s > PATIENCE_S):
                raise
        if away_since_s is None:
            away_since_s = time.monotonic()
            sys.stderr.write(
                f"ostraca: {client.url} has ended its stream, and is asked for another: what is changed in "
                "between, `ostraca audit` and `ostraca operation list` say\n"
            )
        time.sleep(LOOK_S)


def _run(options: argparse.Namespace) -> int:
    client = client_of(options)
    told = Told(lambda line: print(line, flush=True))
    for kind, data in followed(client):
        if options.json:
            write_json(b'{"event":%s,"data":%s}' % (json.dumps(kind).encode(), data))
        else:
            told(kind, data)
    return 0


COMMAND = Command(
    name="events",
    summary="follow what is done to a fabric, as it is done",
    description=(
        "Have the admin service (`ostraca serve admin`) tell what is changed from now on, and how long work\n"
        "goes, first what runs now; until Ctrl-C. With --json, a line for each event."
    ),
    example=(
        "  $ ostraca events\n"
        "  2026-03-01 13:04:07  alice (admin)  PUT /v1/enclosures/shelf-1  onboard 019a3b7c5d10-5f0e21aa\n"
        "  2026-03-01 13:04:07  019a3b7c5d10-5f0e21aa  onboard of shelf-1 (operation 019a3b7c5d10-5f0e21aa)\n"
        "  2026-03-01 13:04:08  019a3b7c5d10-5f0e21aa  reachable: each of 2 agents reaches it\n"
    ),
    add_options=add_asking_options,
    run=_run,
    extra="admin",
)
