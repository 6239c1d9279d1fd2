"""``ostraca volume``: volumes of a fabric, and the switch of each."""

from __future__ import annotations

import argparse
from functools import partial

from ostraca_cli.command import Command, one_action, option, run_action
from ostraca_cli.commands.admin.options import (
    ask,
    if_match,
    print_done,
    print_list,
    service_action,
    show,
    volume_argument,
)

_PATH = "/v1/volumes/{volume}"


_VOLUME = option("volume", type=volume_argument, metavar="TENANT/NAME", help="the volume")


def _switch(options: argparse.Namespace) -> int:
    response = ask(options, "PUT", f"{_PATH}/switch", "switch")
    return print_done(options, response, f"volume {'/'.join(options.volume)}: {options.switch}")


_ACTIONS = one_action(
    service_action(
        "list",
        partial(print_list, kind="volumes"),
        summary="list all volumes",
        description="List all volumes by tenant and name, with the switch of each.",
    ),
    service_action(
        "show",
        partial(show, kind="volume", path=_PATH),
        _VOLUME,
        summary="show a volume",
        description="Show a volume, its switch and its ETag.",
    ),
    service_action(
        "switch",
        _switch,
        _VOLUME,
        option("switch", choices=("off", "shadow", "on"), help="treatment of requests for the volume"),
        if_match("volume"),
        summary="switch a volume off, on or to shadow mode",
        description=(
            "Set the treatment of requests for a volume. off: every block is declined at once, so workers\n"
            "recompute; nothing is looked up, loaded or stored. shadow: gets load and verify blocks without\n"
            "delivery, while puts go on; metrics count the would-be hits. on: normal service. Agents with\n"
            "etcd apply the switch within a second."
        ),
    ),
)

COMMAND = Command(
    name="volume",
    summary="list volumes, and switch them off or on",
    description=(
        "List and switch volumes through the admin service (`ostraca serve admin`). See ACTION --help."
    ),
    example="  $ ostraca volume switch acme/llama-70b off\n  volume acme/llama-70b: off\n",
    options=(_ACTIONS,),
    run=run_action,
    extra="admin",
)
