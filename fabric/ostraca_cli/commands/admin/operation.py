"""``ostraca operation``: progress of long operations on a fabric."""

from __future__ import annotations

import argparse
from functools import partial

from ostraca_cli.command import Command, one_action, option, run_action
from ostraca_cli.commands.admin.options import client_of, print_list, service_action, show


def _show(options: argparse.Namespace) -> int:
    if options.watch:
        from ostraca_cli.commands.admin.watching import watch

        return watch(client_of(options), options.id, is_json=options.json)
    return show(options, "operation", "/v1/operations/{id}")


_ACTIONS = one_action(
    service_action(
        "list",
        partial(print_list, kind="operations"),
        summary="list operations, oldest first",
        description="List operations, oldest first: all running operations, and the newest ended ones.",
    ),
    service_action(
        "show",
        _show,
        option("id", metavar="ID", help="the operation, as in `ostraca operation list`"),
        option(
            "--watch",
            action="store_true",
            help="follow the operation to its end, with exit code 0 after success and 1 after failure; with "
            "--json, print a line for each change",
        ),
        summary="show the steps of an operation",
        description="Show the steps of an operation, with results and progress.",
    ),
)

COMMAND = Command(
    name="operation",
    summary="show the progress of long operations",
    description=(
        "Show long operations of the admin service (`ostraca serve admin`): onboarding, draining, replacing\n"
        "a drive, retiring, erasing. See ACTION --help."
    ),
    example=(
        "  $ ostraca operation show 019a3b7c5d10-5f0e21aa --watch\n"
        "  drain of shelf-1 (operation 019a3b7c5d10-5f0e21aa)\n"
        "    closed to writes: new blocks go to other enclosures\n"
        "    no longer searched: 7% of flash hits are in this enclosure; earlier placement epochs: 1 ...\n"
    ),
    options=(_ACTIONS,),
    run=run_action,
    extra="admin",
)
