"""``ostraca tenant``: tenants of a fabric, limits, and erasure of blocks."""

from __future__ import annotations

import argparse
from functools import partial

from ostraca_cli.command import Command, one_action, option, run_action
from ostraca_cli.commands.admin.options import (
    ETAG,
    WATCH,
    ask,
    change,
    if_match,
    name_argument,
    optional,
    print_done,
    print_list,
    print_resource,
    service_action,
    show,
)
from ostraca_cli.terminal.units import size_argument

_PATH = "/v1/tenants/{name}"
_NAME = option("name", type=name_argument("tenant"), metavar="NAME", help="the tenant")
_IF_MATCH = if_match("tenant")


def _add(options: argparse.Namespace) -> int:
    response = ask(options, "PUT", _PATH, "flash_bytes", "agent_bytes_per_s", "is_erasable")
    return print_resource(options, "tenant", response)


def _remove(options: argparse.Namespace) -> int:
    return print_done(options, ask(options, "DELETE", _PATH), f"tenant {options.name}: limits removed")


_ACTIONS = one_action(
    service_action(
        "add",
        _add,
        option(
            "name",
            type=name_argument("tenant"),
            metavar="NAME",
            help="the tenant, as named in the files of tokens",
        ),
        option(
            "--flash",
            type=size_argument,
            default=0,
            dest="flash_bytes",
            metavar="SIZE",
            help="flash reserved for the tenant's blocks in the whole fabric, and their limit (default: "
            "shared flash without a reservation)",
        ),
        option(
            "--rate",
            type=size_argument,
            default=0,
            dest="agent_bytes_per_s",
            metavar="SIZE",
            help="rate limit for gets and puts at each agent, per second (default: no limit)",
        ),
        option(
            "--erasable",
            action="store_true",
            dest="is_erasable",
            help="allow erasure of the tenant's volumes; only before the first volume",
        ),
        _IF_MATCH,
        summary="create a tenant, or change its limits",
        description=(
            "Create a tenant, or replace its limits: an omitted limit means no limit. Tokens of the tenant\n"
            "belong into the files of tokens on the agents' hosts."
        ),
    ),
    service_action(
        "list",
        partial(print_list, kind="tenants"),
        summary="list tenants",
        description="List created tenants, by name.",
    ),
    service_action(
        "show",
        partial(show, kind="tenant", path=_PATH),
        *(_NAME, ETAG),
        summary="show a tenant",
        description="Show the limits, usage and volumes of a tenant.",
    ),
    service_action(
        "remove",
        _remove,
        *(_NAME, _IF_MATCH),
        summary="remove the limits of a tenant; stored blocks stay",
        description="Remove the limits of a tenant. Stored blocks stay: erase them first.",
    ),
    service_action(
        "erase",
        partial(change, path=f"{_PATH}:erase", fields=("volume",)),
        _NAME,
        option(
            "--volume",
            type=optional(name_argument("volume")),
            default="",
            metavar="NAME",
            help="erase only this volume (default: all)",
        ),
        WATCH,
        summary="erase the blocks of a tenant",
        description=(
            "Erase all blocks in the volumes of a tenant: NO BLOCK IS FOUND AGAIN. The volumes stay, and\n"
            "accept puts at once. Done when no agent can serve an erased block, not even an agent cut off\n"
            "from etcd."
        ),
    ),
)

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
    options=(_ACTIONS,),
    run=run_action,
    extra="admin",
)
