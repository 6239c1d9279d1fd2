"""``ostraca volume``: volumes of a fabric, and the switch of each."""

from __future__ import annotations

import argparse
from functools import partial

from ostraca_cli.command import Command, run_action
from ostraca_cli.commands.admin.options import (
    add_action,
    add_if_match,
    client_of,
    print_list,
    print_resource,
    volume_argument,
    write_json,
)

_SWITCHES = ("off", "shadow", "on")


def _add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add_action(
        actions,
        "list",
        partial(print_list, kind="volumes"),
        summary="list all volumes",
        description="List all volumes by tenant and name, with the switch of each.",
    )
    show = add_action(
        actions,
        "show",
        _show,
        summary="show a volume",
        description="Show a volume, its switch and its ETag.",
    )
    switch = add_action(
        actions,
        "switch",
        _switch,
        summary="switch a volume off, on or to shadow mode",
        description=(
            "Set the treatment of requests for a volume. off: every block is declined at once, so workers\n"
            "recompute; nothing is looked up, loaded or stored. shadow: gets load and verify blocks without\n"
            "delivery, while puts go on; metrics count the would-be hits. on: normal service. Agents with\n"
            "etcd apply the switch within a second."
        ),
    )
    for action in (show, switch):
        action.add_argument("volume", type=volume_argument, metavar="TENANT/NAME", help="the volume")
    switch.add_argument("switch", choices=_SWITCHES, help="treatment of requests for the volume")
    add_if_match(switch, "volume")


def _path(options: argparse.Namespace) -> str:
    """Return the path of the volume in the REST API."""
    from ostraca_cli.commands.admin.client import quoted

    return "/".join(("/v1/volumes", *map(quoted, options.volume)))


def _show(options: argparse.Namespace) -> int:
    return print_resource(options, "volume", client_of(options).get(_path(options)))


def _switch(options: argparse.Namespace) -> int:
    response = client_of(options).ask(
        "PUT", f"{_path(options)}/switch", {"switch": options.switch}, if_match=options.if_match
    )
    if options.json:
        write_json(response.body)
        return 0
    from ostraca_cli.commands.admin.responses import VolumeInfo, printable, read

    volume = read(response.body, VolumeInfo)
    print(printable(f"volume {volume.tenant}/{volume.name}: {volume.switch}"))
    return 0


COMMAND = Command(
    name="volume",
    summary="list volumes, and switch them off or on",
    description=(
        "List and switch volumes through the admin service (`ostraca serve admin`). See ACTION --help."
    ),
    example="  $ ostraca volume switch acme/llama-70b off\n  volume acme/llama-70b: off\n",
    add_options=_add_options,
    run=run_action,
    extra="admin",
)
