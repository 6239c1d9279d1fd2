"""``ostraca operation``: progress of long operations on a fabric."""

from __future__ import annotations

import argparse
from functools import partial

from ostraca_cli.command import Command, run_action
from ostraca_cli.commands.admin.options import add_action, client_of, option, print_list, show


def _add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add_action(
        actions,
        "list",
        partial(print_list, kind="operations"),
        summary="list operations, oldest first",
        description="List operations, oldest first: all running operations, and the newest ended ones.",
    )
    add_action(
        actions,
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
    )


def _show(options: argparse.Namespace) -> int:
    if options.watch:
        from ostraca_cli.commands.admin.watching import watch

        return watch(client_of(options), options.id, is_json=options.json)
    return show(options, "operation", "/v1/operations/{id}")


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
    add_options=_add_options,
    run=run_action,
    extra="admin",
)
