"""``ostraca audit``: who changed what of a fabric."""

from __future__ import annotations

import argparse
import bisect
import time
from itertools import chain
from typing import TYPE_CHECKING

from ostraca.cli.admin.options import add_asking_options, client_of, write_json, write_pages
from ostraca.cli.command import Command, count_argument

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

    from ostraca.cli.admin.client import AdminClient

LOOK_S = 1.0
OVERLAP = 100
"""Entries that are looked through again at each look: ids are in the order of the clocks of the admins that
made them, and an entry of one whose clock is late comes before others that are older."""

_PATH = "/v1/audit"


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_asking_options(parser)
    parser.add_argument(
        "--last",
        type=count_argument,
        metavar="N",
        help="only the newest of them (default: all that are kept)",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="go on with what is changed from now on, until Ctrl-C; with --json, a line for each change",
    )


def _run(options: argparse.Namespace) -> int:
    client = client_of(options)
    if options.json and not options.follow:
        write_pages(client.pages(_PATH), last=options.last)
        return 0
    from ostraca.cli.admin.answers import Change, raw_items, read
    from ostraca.cli.admin.view import change_text

    listed = raw_items(client.pages(_PATH))
    shown = listed[-options.last :] if options.last else listed
    for entry in chain(shown, _followed(client, listed) if options.follow else ()):
        if options.json:
            write_json(bytes(entry))
        else:
            print(change_text(read(entry, Change)), flush=options.follow)
    return 0


def _followed(client: AdminClient, listed: list[msgspec.Raw]) -> Iterator[msgspec.Raw]:
    """Yield entries that were made since *listed*, for ever; raises when the service is away."""
    from ostraca.cli.admin.answers import Change, raw_items, read

    newest = [read(entry, Change).id for entry in listed]
    known = {*newest}
    while True:
        time.sleep(LOOK_S)
        behind = newest[-OVERLAP] if len(newest) >= OVERLAP else ""
        for entry in raw_items(client.pages(_PATH, after=behind)):
            number = read(entry, Change).id
            if number not in known:
                known.add(number)
                bisect.insort(newest, number)
                yield entry
        if len(newest) > 2 * OVERLAP:
            known.difference_update(newest[:-OVERLAP])
            del newest[:-OVERLAP]


COMMAND = Command(
    name="audit",
    summary="show who changed what",
    description=(
        "Ask the admin service (`ostraca serve admin`) who changed what, the oldest first. It keeps the\n"
        "newest 2,000 entries, or as many as limits.audit_max says."
    ),
    example=(
        "  $ ostraca audit --last 1\n"
        "  2026-03-01 13:04:07  alice (admin)  PUT /v1/enclosures/shelf-1  onboard 019a3b7c5d10-5f0e21aa\n"
    ),
    add_options=_add_options,
    run=_run,
    extra="admin",
)
