"""``ostraca operation``: long work on a fabric, and how far it is."""

from __future__ import annotations

import argparse

from ostraca.cli.admin.options import add_action, client_of, write_json, write_pages
from ostraca.cli.command import Command


def _add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add_action(
        actions,
        "list",
        _list,
        summary="list what runs and what has ended, the oldest first",
        description="List long work, the oldest first: what runs, and the newest of what has ended.",
    )
    show = add_action(
        actions,
        "show",
        _show,
        summary="show one step by step",
        description="Show long work step by step: what was found, and how far it is.",
    )
    show.add_argument("id", metavar="ID", help="the operation, as `ostraca operation list` shows it")
    show.add_argument(
        "--watch",
        action="store_true",
        help="follow it to its end: 0 when it is done, 1 when it has failed; with --json, a line for "
        "each change",
    )


def _list(options: argparse.Namespace) -> int:
    pages = client_of(options).pages("/v1/operations")
    if options.json:
        write_pages(pages)
        return 0
    from ostraca.cli.admin.answers import Operation, items
    from ostraca.cli.admin.view import operations_view, show

    show(operations_view(items(pages, Operation)))
    return 0


def _show(options: argparse.Namespace) -> int:
    client = client_of(options)
    if options.watch:
        from ostraca.cli.admin.watching import watch

        return watch(client, options.id, is_json=options.json)
    from ostraca.cli.admin.client import quoted

    body = client.get(f"/v1/operations/{quoted(options.id)}").body
    if options.json:
        write_json(body)
        return 0
    from ostraca.cli.admin.answers import Operation, read
    from ostraca.cli.admin.view import operation_view, show

    show(operation_view(read(body, Operation)))
    return 0


def _run(options: argparse.Namespace) -> int:
    code: int = options.act(options)
    return code


COMMAND = Command(
    name="operation",
    summary="show long work, and how far it is",
    description=(
        "Ask the admin service (`ostraca serve admin`) about long work: onboarding, draining, replacing a\n"
        "drive, retiring. See ACTION --help."
    ),
    example=(
        "  $ ostraca operation show 019a3b7c5d10-5f0e21aa --watch\n"
        "  drain of shelf-1 (operation 019a3b7c5d10-5f0e21aa)\n"
        "    takes nothing new: new blocks go elsewhere\n"
        "    passed over: 7% of what is got from flash is got here; 1 earlier placements are ...\n"
    ),
    add_options=_add_options,
    run=_run,
    extra="admin",
)
