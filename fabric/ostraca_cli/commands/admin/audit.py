"""``ostraca audit``: log of changes to a fabric and their authors."""

from __future__ import annotations

import argparse
import bisect
import time
from itertools import chain
from typing import TYPE_CHECKING

from ostraca_cli.command import Command, count_argument
from ostraca_cli.commands.admin.options import add_service_options, client_of, write_json, write_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

    from ostraca_cli.commands.admin.client import AdminClient

POLL_S = 1.0
OVERLAP = 100
"""Entries read again at each poll. Ids follow the clocks of the admin services; if the clock of a service is
late, its entry sorts before older entries."""

_PATH = "/v1/audit"


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_service_options(parser)
    parser.add_argument(
        "--last",
        type=count_argument,
        metavar="N",
        help="print only the newest N entries (default: all)",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="continue with new entries, until Ctrl-C; with --json, print a line for each entry",
    )


def _run(options: argparse.Namespace) -> int:
    client = client_of(options)
    if options.json and not options.follow:
        write_pages(client.pages(_PATH), last=options.last)
        return 0
    from ostraca_cli.commands.admin.responses import AuditInfo, raw_items, read
    from ostraca_cli.commands.admin.view import audit_text

    listed = raw_items(client.pages(_PATH))
    selected = listed[-options.last :] if options.last else listed
    for entry in chain(selected, _follow(client, listed) if options.follow else ()):
        if options.json:
            write_json(bytes(entry))
        else:
            print(audit_text(read(entry, AuditInfo)), flush=options.follow)
    return 0


def _follow(client: AdminClient, listed: list[msgspec.Raw]) -> Iterator[msgspec.Raw]:
    """Yield entries made after *listed*, forever; raises if the service is away."""
    from ostraca_cli.commands.admin.responses import AuditInfo, raw_items, read

    newest = [read(entry, AuditInfo).id for entry in listed]
    known = {*newest}
    while True:
        time.sleep(POLL_S)
        after = newest[-OVERLAP] if len(newest) >= OVERLAP else ""
        for entry in raw_items(client.pages(_PATH, after=after)):
            number = read(entry, AuditInfo).id
            if number not in known:
                known.add(number)
                bisect.insort(newest, number)
                yield entry
        if len(newest) > 2 * OVERLAP:
            known.difference_update(newest[:-OVERLAP])
            del newest[:-OVERLAP]


COMMAND = Command(
    name="audit",
    summary="show the log of changes",
    description=(
        "Print the log of changes and their authors, oldest first, from the admin service (`ostraca serve\n"
        "admin`). The service keeps the newest 2,000 entries (setting limits.audit_max)."
    ),
    example=(
        "  $ ostraca audit --last 1\n"
        "  2026-03-01 13:04:07  alice (admin)  PUT /v1/enclosures/shelf-1  onboard 019a3b7c5d10-5f0e21aa\n"
    ),
    add_options=_add_options,
    run=_run,
    extra="admin",
)
