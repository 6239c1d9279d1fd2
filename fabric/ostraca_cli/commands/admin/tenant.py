"""``ostraca tenant``: tenants of a fabric, limits, and erasure of blocks."""

from __future__ import annotations

import argparse
from functools import partial

from ostraca_cli.command import Command, run_action
from ostraca_cli.commands.admin.options import (
    add_action,
    add_etag,
    add_if_match,
    add_watch,
    client_of,
    print_list,
    print_resource,
    write_json,
)
from ostraca_cli.terminal.units import size_argument


def _add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add = add_action(
        actions,
        "add",
        _add,
        summary="create a tenant, or change its limits",
        description=(
            "Create a tenant, or replace its limits: an omitted limit means no limit. Tokens of the tenant\n"
            "belong into the files of tokens on the agents' hosts."
        ),
    )
    add.add_argument("name", metavar="NAME", help="the tenant, as named in the files of tokens")
    add.add_argument(
        "--flash",
        type=size_argument,
        default=0,
        metavar="SIZE",
        help="flash reserved for the tenant's blocks in the whole fabric, and their limit (default: shared "
        "flash without a reservation)",
    )
    add.add_argument(
        "--rate",
        type=size_argument,
        default=0,
        metavar="SIZE",
        help="rate limit for gets and puts at each agent, per second (default: no limit)",
    )
    add.add_argument(
        "--erasable",
        action="store_true",
        help="allow erasure of the tenant's volumes; only before the first volume",
    )
    add_if_match(add, "tenant")
    add_action(
        actions,
        "list",
        partial(print_list, kind="tenants"),
        summary="list tenants",
        description="List created tenants, by name.",
    )
    show = add_action(
        actions,
        "show",
        _show,
        summary="show a tenant",
        description="Show the limits, usage and volumes of a tenant.",
    )
    add_etag(show)
    remove = add_action(
        actions,
        "remove",
        _remove,
        summary="remove the limits of a tenant; stored blocks stay",
        description="Remove the limits of a tenant. Stored blocks stay: erase them first.",
    )
    add_if_match(remove, "tenant")
    erase = add_action(
        actions,
        "erase",
        _erase,
        summary="erase the blocks of a tenant",
        description=(
            "Erase all blocks in the volumes of a tenant: NO BLOCK IS FOUND AGAIN. The volumes stay, and\n"
            "accept puts at once. Done when no agent can serve an erased block, not even an agent cut off\n"
            "from etcd."
        ),
    )
    erase.add_argument("--volume", default="", metavar="NAME", help="erase only this volume (default: all)")
    add_watch(erase)
    for action in (show, remove, erase):
        action.add_argument("name", metavar="NAME", help="the tenant")


def _add(options: argparse.Namespace) -> int:
    body = {
        "flash_bytes": options.flash,
        "agent_bytes_per_s": options.rate,
        "is_erasable": options.erasable,
    }
    response = client_of(options).ask("PUT", _path(options), body, if_match=options.if_match)
    return print_resource(options, "tenant", response)


def _show(options: argparse.Namespace) -> int:
    return print_resource(options, "tenant", client_of(options).get(_path(options)))


def _remove(options: argparse.Namespace) -> int:
    response = client_of(options).ask("DELETE", _path(options), if_match=options.if_match)
    if options.json:
        write_json(response.body)
    else:
        print(f"tenant {options.name}: limits removed")
    return 0


def _erase(options: argparse.Namespace) -> int:
    from ostraca_cli.commands.admin.watching import report_start

    client = client_of(options)
    response = client.ask("POST", f"{_path(options)}:erase", {"volume": options.volume})
    return report_start(client, response.body, is_json=options.json, is_watched=options.watch)


def _path(options: argparse.Namespace) -> str:
    from ostraca_cli.commands.admin.client import quoted

    return f"/v1/tenants/{quoted(options.name)}"


COMMAND = Command(
    name="tenant",
    summary="create tenants, limit their usage, erase their blocks",
    description=(
        "Manage the tenants of a fabric through the admin service (`ostraca serve admin`): see\n"
        "ACTION --help. Exit code 3: the present state forbids the request, and nothing was changed."
    ),
    example=(
        "  $ ostraca tenant add acme --flash 8TiB --rate 2GiB --erasable\n"
        "  $ ostraca tenant erase acme --watch\n"
        "  erase of acme (operation 019a3b7c5d10-5f0e21aa)\n"
        "    next incarnation: 3 volumes moved to a new incarnation\n"
        "    purged: 8 of 8 agents have stopped serving the erased blocks\n"
        "    expired: no agent can serve the erased blocks\n"
        "  done: no agent can serve the erased blocks\n"
    ),
    add_options=_add_options,
    run=run_action,
    extra="admin",
)
