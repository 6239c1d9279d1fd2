"""``ostraca settings``: settings of all agents, changed at run time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from ostraca_cli.command import Command, one_action, option, run_action
from ostraca_cli.commands.admin.options import client_of, if_match, print_resource, service_action, show
from ostraca_fabric.errors import UsageError, shown

_PATH = "/v1/settings"
_WORDS = {"on": True, "off": False}


def _assigned(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is no assignment: write NAME=VALUE")
    if value in _WORDS:
        return name, _WORDS[value]
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _change(options: argparse.Namespace, changes: Mapping[str, object]) -> int:
    """Read the settings and store them with *changes*, guarded by the ETag."""
    client = client_of(options)
    before = client.get(_PATH)
    settings: dict[str, Any] = json.loads(before.body)
    if unknown := [name for name in changes if name not in settings]:
        raise UsageError(f"{shown(unknown[0])} is no live setting: take any of {', '.join(settings)}")
    response = client.ask("PUT", _PATH, {**settings, **changes}, if_match=options.if_match or before.etag)
    return print_resource(options, "settings", response)


_ACTIONS = one_action(
    service_action(
        "show",
        partial(show, kind="settings", path=_PATH),
        summary="show all live settings",
        description="Show all live settings; an unset live setting leaves each agent's own setting in force.",
    ),
    service_action(
        "set",
        lambda options: _change(options, dict(options.values)),
        option(
            "values",
            nargs="+",
            type=_assigned,
            metavar="NAME=VALUE",
            help="as in log_level=debug or scrub=off",
        ),
        if_match("settings"),
        summary="set live settings",
        description=(
            "Set live settings; agents with etcd apply them within a second. `ostraca settings show` lists\n"
            "all names; docs/reference/live-settings.md explains each."
        ),
    ),
    service_action(
        "unset",
        lambda options: _change(options, dict.fromkeys(options.names)),
        option("names", nargs="+", metavar="NAME", help="as in log_level"),
        if_match("settings"),
        summary="reset live settings",
        description="Reset live settings: each agent's own setting applies again.",
    ),
)

COMMAND = Command(
    name="settings",
    summary="show and change settings of all running agents",
    description=(
        "Show and change live settings of all agents through the admin service (`ostraca serve admin`).\n"
        "See ACTION --help."
    ),
    example="  $ ostraca settings set log_level=debug\n  $ ostraca settings unset log_level\n",
    options=(_ACTIONS,),
    run=run_action,
    extra="admin",
)
