"""``ostraca settings``: settings of all agents that change while they run."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ostraca.cli.admin.options import add_action, client_of, write_json
from ostraca.cli.command import Command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostraca.cli.admin.client import AdminClient

_PATH = "/v1/settings"
_WORDS = {"on": True, "off": False}


def _add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add_action(
        actions,
        "show",
        _show,
        summary="show them",
        description="Show what holds for all agents; the others are as each agent's own settings say.",
    )
    sets = add_action(
        actions,
        "set",
        _set,
        summary="set some of them",
        description=(
            "Set some of them; agents that hear of etcd go by them within a second. `ostraca settings\n"
            "show` names all there are, and docs/reference/live-settings.md says what they are for."
        ),
    )
    sets.add_argument(
        "values", nargs="+", type=_assigned, metavar="NAME=VALUE", help="as in log_level=debug or scrub=off"
    )
    unset = add_action(
        actions,
        "unset",
        _unset,
        summary="take some of them back",
        description="Take some of them back: what each agent's own settings say holds again.",
    )
    unset.add_argument("names", nargs="+", metavar="NAME", help="as in log_level")
    for changing in (sets, unset):
        changing.add_argument(
            "--if-match",
            default="",
            metavar="ETAG",
            help="only if they were not changed since, as `show` says it",
        )


def _assigned(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} sets nothing: write NAME=VALUE")
    if value in _WORDS:
        return name, _WORDS[value]
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _show(options: argparse.Namespace) -> int:
    answer = client_of(options).get(_PATH)
    _write(options, answer.body, answer.etag)
    return 0


def _set(options: argparse.Namespace) -> int:
    return _change(options, dict(options.values))


def _unset(options: argparse.Namespace) -> int:
    return _change(options, dict.fromkeys(options.names))


def _change(options: argparse.Namespace, changes: Mapping[str, object]) -> int:
    """Read what holds, and put it back with what is to be otherwise, unless others changed it meanwhile."""
    client: AdminClient = client_of(options)
    now = client.get(_PATH)
    holds: dict[str, Any] = json.loads(now.body)
    answer = client.ask("PUT", _PATH, {**holds, **changes}, if_match=options.if_match or now.etag)
    _write(options, answer.body, answer.etag)
    return 0


def _write(options: argparse.Namespace, body: bytes, etag: str) -> None:
    if options.json:
        write_json(body)
        return
    from ostraca.cli.admin.view import settings_view, show

    show(settings_view(json.loads(body), etag))


def _run(options: argparse.Namespace) -> int:
    code: int = options.act(options)
    return code


COMMAND = Command(
    name="settings",
    summary="settings of all agents that change while they run",
    description=(
        "Ask the admin service (`ostraca serve admin`) for settings of all agents that change while they\n"
        "run, and change them. See ACTION --help."
    ),
    example="  $ ostraca settings set log_level=debug\n  $ ostraca settings unset log_level\n",
    add_options=_add_options,
    run=_run,
    extra="admin",
)
