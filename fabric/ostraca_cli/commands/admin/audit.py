"""``ostraca audit``: log of changes to a fabric and their authors."""

from __future__ import annotations

import argparse

from ostraca_cli.command import Command, count_argument, option
from ostraca_cli.commands.admin.options import SERVICE_OPTIONS, client_of, write_pages

_PATH = "/v1/audit"


def _run(options: argparse.Namespace) -> int:
    client = client_of(options)
    if options.json:
        write_pages(client.pages(_PATH), last=options.last)
        return 0
    from ostraca_admin.api.views import AuditView
    from ostraca_cli.commands.admin.responses import items
    from ostraca_cli.commands.admin.view import audit_text

    for entry in items(client.pages(_PATH), AuditView)[-options.last if options.last else 0 :]:
        print(audit_text(entry))
    return 0


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
    options=(
        *SERVICE_OPTIONS,
        option(
            "--last",
            type=count_argument,
            metavar="N",
            help="print only the newest N entries (default: all)",
        ),
    ),
    run=_run,
    extra="admin",
)
